"""Console output shared by all commands: progress bars, tables, and formatting of times, sizes and counts."""

import os
import re
import signal
import time
from datetime import timedelta

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from common.errors import printable

PYTHON = "uv run" if "UV" in os.environ else "python"  # how the user calls the commands; uv sets UV
LINE_INTERVAL_S = (
    10.0  # between progress lines, which replace the bar if the output is not a terminal
)
TABLE_WIDTH = 120  # characters per line of a table, if the output is not a terminal
NO_BREAK = (
    "\ue000"  # replaces a space while lines are broken: rich breaks lines at no-break spaces, too
)


class PlainConsole(Console):
    """A rich console without markup. Control characters, which documents and names can contain, are replaced."""

    def __init__(self, stderr: bool = False):
        super().__init__(stderr=stderr, highlight=False, emoji=False, markup=False)
        if not self.is_terminal:
            self.width = TABLE_WIDTH

    def render_str(self, text: str, **options) -> Text:
        return super().render_str(printable(text), **options)

    def print_text(self, text: str, indent: str = " " * 9, style: str | None = None) -> None:
        """Print lines of text. On a terminal, long lines are broken between words, and continue after `indent`."""
        for line in self.render_str(text).split("\n"):
            if self.is_terminal and line.cell_len > self.width:
                unbroken = Text(
                    re.sub(r"(?<=\d) (?=[^\W\d])", NO_BREAK, line.plain)
                )  # a number and its noun
                lines = unbroken.wrap(self, max(20, self.width - len(indent)))
                line = Text(f"\n{indent}".join(map(str, lines)).replace(NO_BREAK, " "))
            self.print(line, style=style, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Stop as after SIGTERM: a run is saved. The reader of the output has exited, as in `train.py | head`."""
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        print_text("the output is no longer read; stopping", stderr=True)
        signal.raise_signal(signal.SIGTERM)


def print_text(text: str, stderr: bool = False) -> None:
    """Print lines of text. On a terminal, long lines are broken between words."""
    PlainConsole(stderr).print_text(text)


def make_table(*columns: str, left: int = 1, header: bool = True) -> Table:
    """An empty table. left: number of left-aligned columns before the right-aligned columns of numbers."""
    table = Table(
        box=box.SIMPLE_HEAD if header else None,
        show_header=header,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for i, column in enumerate(columns):
        table.add_column(
            column, justify="left" if i < left else "right", no_wrap=i >= left, overflow="fold"
        )
    return table


class ProgressBar(Progress):
    """Context manager: a progress bar on a terminal, otherwise a line every LINE_INTERVAL_S seconds.

    total: amount of work in any unit, or None if it is unknown. initial: work that is already done.
    """

    def __init__(self, total: float | None = None, *, initial: float = 0.0, stderr: bool = False):
        console = PlainConsole(stderr)
        columns = BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
        super().__init__(*columns, console=console, disable=not console.is_terminal, transient=True)
        self.print_text = console.print_text  # above the bar
        self.total, self.initial, self.task_id = (
            total,
            initial,
            self.add_task("", total=total, completed=initial),
        )
        self.started = self.last_line = time.perf_counter()

    def show(self, done: float, label: str, details: str = "") -> None:
        """Show the finished amount of work."""
        now = time.perf_counter()
        if self.disable and now - self.last_line < LINE_INTERVAL_S:
            return
        self.last_line, line = now, f"{label}  {details}".rstrip()
        if (
            self.total is not None and done > self.initial
        ):  # estimated from the mean speed since the start
            seconds = (now - self.started) / (done - self.initial) * (self.total - done)
            line += f"  {format_duration(seconds)} left"
        self.update(self.task_id, completed=done, description=line)
        if self.disable:
            self.print_text(line)


def format_duration(seconds: float) -> str:
    """Format a duration as "0:01:30", or "3 days" if it is not shorter."""
    return (
        str(timedelta(seconds=round(max(0, seconds))))
        if seconds < 3 * 86400
        else f"{seconds / 86400:,.0f} days"
    )


def format_memory(size: int) -> str:
    """Size of memory in binary units: "512 MiB", "1.25 GiB"."""
    return f"{size / 2**20:.0f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"


def format_si(number: float, unit: str = "") -> str:
    """Format a number with an SI prefix: "12", "1.23 M", "3.4 GB"."""
    power = max(
        0, int(f"{number:.2e}".partition("e")[2]) // 3
    )  # of 1000, when rounded to three digits
    return f"{number / 1000**power:.3g} {('', *'kMGTPEZY')[power]}{unit}".rstrip()


def pluralize(count: int, noun: str) -> str:
    """Format a count of things as "1 layer", "2 layers", "2 processes"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "es" if noun.endswith(("s", "ch")) else "s")


def format_number(number: float) -> str:
    """Format a number with at least three significant digits: "0.0123", "1.23", "46.0", "123", "1,234"."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:#.3g}"
