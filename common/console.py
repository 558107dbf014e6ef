"""Console output shared by all commands: progress bars, tables, and formatting of times, sizes and counts."""

import time
from typing import Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from common.errors import printable

LINE_INTERVAL_S = 10.0  # between progress lines, which replace the bar if the output is not a terminal
REFRESH_INTERVAL_S = 0.1  # between updates of the bar
TABLE_WIDTH = 120  # characters per line of a table, if the output is not a terminal


class PrintableConsole(Console):
    """A rich console that prints no control characters: documents and other people's runs can contain them."""

    def render_str(self, text: str, **options) -> Text:
        return super().render_str(printable(text), **options)


def make_console(stderr: bool = False, width: int | None = None) -> Console:
    """A console without markup or highlighting. width: characters per line if the output is not a terminal."""
    console = PrintableConsole(stderr=stderr, highlight=False, emoji=False, markup=False)
    if width is not None and not console.is_terminal:
        console.width = width
    return console


def make_table(*columns: str, left: int = 1, header: bool = True) -> Table:
    """An empty table. left: number of left-aligned columns; the columns after them contain numbers, right-aligned."""
    table = Table(box=box.SIMPLE_HEAD if header else None, show_header=header, pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns[:left]:
        table.add_column(column, overflow="fold")
    for column in columns[left:]:
        table.add_column(column, justify="right", no_wrap=True, overflow="fold")
    return table


class ProgressBar:
    """Context manager: a progress bar on a terminal, otherwise a line every LINE_INTERVAL_S seconds.

    total: amount of work in any unit; None: unknown. initial: work that is already done. stderr: show it on stderr.
    write_line: function that prints the lines that replace the bar; None: print them to the console.
    """

    def __init__(self, total: float | None = None, *, initial: float = 0.0, stderr: bool = False, write_line=None):
        self.console = make_console(stderr)
        self.write_line = write_line or self.print
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("{task.fields[details]}", markup=False),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
            expand=True,
        )
        self._task = self._bar.add_task("", total=total, details="")
        self.restart(total, initial)

    def restart(self, total: float | None, initial: float = 0.0) -> None:
        """Reset the bar for the next task."""
        self.total, self.initial, self.done = total, initial, initial
        self._started = time.perf_counter()
        self._last_update = self._started if self._bar.disable else 0.0  # a bar is drawn at once
        self._bar.reset(self._task, total=total, completed=initial, description="", details="")

    def update(self, done: float, label: str, details: str = "") -> None:
        """Set the finished amount of work. Calls are cheap: the bar is redrawn at most ten times a second."""
        is_finished = self.total is not None and self.done < self.total <= done
        interval = LINE_INTERVAL_S if self._bar.disable else REFRESH_INTERVAL_S
        self.done, now = done, time.perf_counter()
        if not is_finished and now - self._last_update < interval:
            return
        self._last_update = now
        if self.total is not None and done > self.initial:  # estimated from the mean speed since the start
            seconds = (now - self._started) / (done - self.initial) * (self.total - done)
            details = "  ".join(filter(None, (details, f"{format_duration(seconds)} left")))
        if self._bar.disable:
            self.write_line("  ".join(filter(None, (label, details))))
        else:
            self._bar.update(self._task, completed=done, description=label, details=details)

    def update_bytes(self, done: float, label: str) -> None:
        """Set the finished amount of work in bytes. The details are the size and the mean speed."""
        speed = (done - self.initial) / max(1e-9, time.perf_counter() - self._started)
        total = f" of {format_bytes(self.total)}" if self.total else ""
        self.update(done, label, f"{format_bytes(done)}{total}, {format_bytes(speed)}/s")

    def print(self, text: str, style: str | None = None) -> None:
        """Print a line above the bar."""
        self.console.print(text, style=style, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()


def format_duration(seconds: float) -> str:
    """90.4 -> "1:30"; 3700 -> "1:01:40"; three days and more -> "3 days"."""
    if seconds >= 72 * 3600:
        return f"{seconds / 86400:,.0f} days"
    minutes, seconds = divmod(round(max(0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def format_bytes(size: float) -> str:
    """Size of a file or a text in decimal units: "512 B", "1.23 kB", "3.4 MB"."""
    return format_si(size, "B")


def format_memory(size: int) -> str:
    """Size of memory in binary units: "512 MiB", "1.25 GiB"."""
    return f"{size / 2**20:.0f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"


def format_number(number: float) -> str:
    """At least three significant digits: "0.0123", "1.23", "46.0", "123", "1,234"."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:#.3g}"


def format_si(number: float, unit: str = "") -> str:
    """1234567 -> "1.23 M", with the SI prefixes k, M, G, T, P, E, Z and Y."""
    for prefix in ("", "k", "M", "G", "T", "P", "E", "Z"):
        if number < 999.5:
            return f"{number:.3g} {prefix}{unit}".rstrip()
        number /= 1000
    return f"{number:.3g} Y{unit}"


def pluralize(count: int, noun: str) -> str:
    """1 layer, 2 layers, 2 processes."""
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}" + ending * (count != 1)
