"""Console output of all commands: text, tables, progress bars, and formats of numbers."""

import os
import signal
import sys
import textwrap
import time
from datetime import timedelta

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from common.errors import printable

# How the user calls the commands. uv sets UV.
PYTHON = "uv run" if "UV" in os.environ else "python"
# Both apply if the output is not a terminal: seconds between progress lines, which replace the
# bar, and characters per line of a table.
LINE_INTERVAL_S = 10.0
TABLE_WIDTH = 120
SI_PREFIXES = ["", "k", "M", "G", "T", "P", "E", "Z", "Y"]


class PlainConsole(Console):
    """A rich console without markup.

    Control characters, which documents and names can contain, are replaced.
    """

    def __init__(self, stderr: bool = False):
        stream = sys.stderr if stderr else sys.stdout
        # rich would obey FORCE_COLOR in a log file, and show no progress if TERM=dumb
        is_terminal = stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
        super().__init__(
            stderr=stderr, force_terminal=is_terminal, highlight=False, emoji=False, markup=False
        )
        if not self.is_terminal:
            self.width = TABLE_WIDTH

    def render_str(self, text: str, **options) -> Text:
        """Convert a string to rich's Text. Console calls this for every string that it prints."""
        return super().render_str(printable(text), **options)

    def print_text(self, text: str, indent: str = " " * 9, style: str | None = None) -> None:
        """Print lines of text.

        indent: start of a continued line. On a terminal, long lines are broken between words.
        """
        for line in text.split("\n"):
            if self.is_terminal:
                line = textwrap.fill(
                    line,
                    self.width,
                    subsequent_indent=indent,
                    break_long_words=False,  # such as paths
                    break_on_hyphens=False,
                )
            self.print(line, style=style, soft_wrap=True)

    def on_broken_pipe(self) -> None:
        """Stop as after SIGTERM, so that a run is saved.

        Console calls this when the reader of the output has exited, as in `train.py | head`.
        """
        os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())
        print_text("the output is no longer read; stopping", stderr=True)
        signal.raise_signal(signal.SIGTERM)


def print_text(text: str, stderr: bool = False) -> None:
    """Print lines of text. On a terminal, long lines are broken between words."""
    PlainConsole(stderr).print_text(text)


def prints_unicode() -> bool:
    """Whether stdout can print all characters: its encoding is UTF-8."""
    return (sys.stdout.encoding or "utf-8").lower() == "utf-8"  # None: a StringIO


def show(text: str) -> None:
    """Print text immediately, without a newline. On a terminal, control characters are replaced."""
    if sys.stdout.isatty():
        text = printable(text)
    print(text, end="", flush=True)


def make_table(*columns: str, left: int = 1) -> Table:
    """Make an empty table.

    left: number of left-aligned columns, before the right-aligned columns of numbers.
    """
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for column in columns[:left]:
        table.add_column(column, overflow="fold")
    for column in columns[left:]:
        table.add_column(column, justify="right", no_wrap=True, overflow="fold")
    return table


class ProgressBar(Progress):
    """Context manager: a progress bar on a terminal, otherwise a line every LINE_INTERVAL_S.

    total: amount of work in any unit. None if it is unknown.
    initial: amount of work that is already done.
    """

    def __init__(self, total: float | None = None, *, initial: float = 0.0, stderr: bool = False):
        console = PlainConsole(stderr)
        super().__init__(
            BarColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self.print_text = console.print_text  # prints above the bar
        self.total = total
        self.initial = initial
        self.task_id = self.add_task("", total=total, completed=initial)
        self.started = time.perf_counter()
        self.last_line = self.started

    def show(self, done: float, label: str, details: str = "") -> None:
        """Show the finished amount of work, with the remaining time at the mean speed so far."""
        now = time.perf_counter()
        if self.disable and now - self.last_line < LINE_INTERVAL_S:
            return
        self.last_line = now
        line = f"{label}  {details}".rstrip()
        if self.total is not None and done > self.initial:
            seconds_per_unit = (now - self.started) / (done - self.initial)
            line += f"  {format_duration(seconds_per_unit * (self.total - done))} left"
        self.update(self.task_id, completed=done, description=line)
        if self.disable:
            self.print_text(line)


def format_duration(seconds: float) -> str:
    """Format a duration: "0:01:30", "3 days"."""
    if seconds >= 3 * 86400:
        return f"{seconds / 86400:,.0f} days"
    return str(timedelta(seconds=round(max(0, seconds))))


def format_memory(size: int) -> str:
    """Format a size in bytes in binary units: "512 MiB", "1.25 GiB"."""
    if size < 2**30:
        return f"{size / 2**20:.0f} MiB"
    return f"{size / 2**30:.2f} GiB"


def format_si(number: float, unit: str = "") -> str:
    """Format a number with an SI prefix: "12", "1.23 M", "3.4 GB"."""
    power = 0  # of 1000
    while number >= 999.5:  # which has no three digits
        number /= 1000
        power += 1
    return f"{number:.3g} {SI_PREFIXES[power]}{unit}".rstrip()


def pluralize(count: float, noun: str) -> str:
    """Format a count of things: "1 layer", "2.5 minutes", "2 processes"."""
    if count != 1:
        noun += "es" if noun.endswith(("s", "tch")) else "s"
    return f"{count:,.12g} {noun}"


def format_number(number: float) -> str:
    """Format a number with at least three significant digits: "0.0123", "46.0", "1,234"."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:#.3g}"
