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
TABLE_WIDTH = 120  # characters per line of a table, if the output is not a terminal


class PrintableConsole(Console):
    """A rich console that prints no control characters, which documents and names of runs can contain."""

    def render_str(self, text: str, **options) -> Text:
        return super().render_str(printable(text), **options)


def make_console(stderr: bool = False, width: int = TABLE_WIDTH) -> Console:
    """A console without markup and highlighting. width: characters per line if the output is not a terminal."""
    console = PrintableConsole(stderr=stderr, highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = width
    return console


def make_table(*columns: str, left: int = 1, header: bool = True) -> Table:
    """An empty table. left: number of left-aligned columns before the right-aligned columns of numbers."""
    table = Table(box=box.SIMPLE_HEAD if header else None, show_header=header, pad_edge=False, padding=(0, 2, 0, 0))
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < left else "right", no_wrap=i >= left, overflow="fold")
    return table


class ProgressBar:
    """Context manager: a progress bar on a terminal, otherwise a line every LINE_INTERVAL_S seconds.

    total: amount of work in any unit, or None if it is unknown.
    initial: work that is already done.
    stderr: whether to print to stderr.
    """

    def __init__(self, total: float | None = None, *, initial: float = 0.0, stderr: bool = False):
        self.total, self.initial, self.done = total, initial, initial
        self.console = make_console(stderr)
        self._started = self._last_line = time.perf_counter()
        text, details = (TextColumn(f"{{task.{name}}}", markup=False) for name in ("description", "fields[details]"))
        columns = (text, BarColumn(bar_width=None), TimeElapsedColumn(), details)
        hidden = not self.console.is_terminal
        self._bar = Progress(*columns, console=self.console, disable=hidden, transient=True, expand=True)
        self._task = self._bar.add_task("", total=total, completed=initial, details="")

    def update(self, done: float, label: str, details: str = "") -> None:
        """Set the finished amount of work."""
        is_finished = self.total is not None and self.done < self.total <= done
        self.done, now = done, time.perf_counter()
        if self._bar.disable and not is_finished and now - self._last_line < LINE_INTERVAL_S:
            return
        if self.total is not None and done > self.initial:  # estimated from the mean speed since the start
            seconds = (now - self._started) / (done - self.initial) * (self.total - done)
            details = f"{details}  {format_duration(seconds)} left".lstrip()
        if self._bar.disable:
            self.print(f"{label}  {details}".rstrip())
            self._last_line = now
        else:
            self._bar.update(self._task, completed=done, description=label, details=details)

    def print(self, text: str, style: str | None = None) -> None:
        """Print a line above the bar."""
        self.console.print(text, style=style, soft_wrap=True)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()


def format_duration(seconds: float) -> str:
    """Format a duration as "1:30", "1:01:40", or "3 days" if it is not shorter."""
    if seconds >= 72 * 3600:
        return f"{seconds / 86400:,.0f} days"
    minutes, seconds = divmod(round(max(0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def format_memory(size: int) -> str:
    """Size of memory in binary units: "512 MiB", "1.25 GiB"."""
    return f"{size / 2**20:.0f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"


def format_number(number: float) -> str:
    """Format a number with at least three significant digits: "0.0123", "1.23", "46.0", "123", "1,234"."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:#.3g}"


def format_si(number: float, unit: str = "") -> str:
    """Format a number with an SI prefix: "12", "1.23 M", "3.4 GB"."""
    for prefix in ("", "k", "M", "G", "T", "P", "E", "Z"):
        if number < 999.5:
            return f"{number:.3g} {prefix}{unit}".rstrip()
        number /= 1000
    return f"{number:.3g} Y{unit}"


def pluralize(count: int, noun: str) -> str:
    """Format a count of things as "1 layer", "2 layers", "2 processes"."""
    ending = "es" if noun.endswith(("s", "ch")) else "s"
    return f"{count:,} {noun}" + ending * (count != 1)
