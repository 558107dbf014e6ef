"""What a person sees while text is read and encoded: a bar on a terminal, a line now and then anywhere else."""

import time
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from common.console import LINE_INTERVAL_S, format_bytes, format_duration
from data.text import Piece

AFTER = 1.0  # a bar that is gone within a second is a flicker


class PrepareProgress:
    """One stretch of work after another, each of so many bytes of text where that is known."""

    def __init__(self, say: Callable[[str], None]):
        console = Console(highlight=False, emoji=False)
        self.say, self.label, self.total, self.begun = say, "", None, time.perf_counter()
        self.bar = Progress(
            TextColumn("{task.description}"), BarColumn(bar_width=None), TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console,
            disable=not console.is_terminal, transient=True, expand=True, speed_estimate_period=60,
        )  # fmt: skip
        self.task = self.bar.add_task("", total=None, numbers="")

    def __enter__(self) -> "PrepareProgress":
        return self

    def __exit__(self, *_) -> None:
        self.bar.stop()

    def begin(self, label: str, total: int | None = None, done: int = 0) -> None:
        """total: bytes; None: not known. done: those that were done before."""
        self.label, self.total, self.first, self.done = label, total, done, done
        self.started = self.said = self.shown = time.perf_counter()
        self.bar.reset(self.task, total=total, completed=done, description=label, numbers="")

    def add(self, size: int) -> None:
        """So many bytes more."""
        self.done += size
        now = time.perf_counter()
        if now - self.shown < 0.1:  # of many small documents each would cost more to show than to read
            return
        self.shown = now
        speed = (self.done - self.first) / max(1e-9, now - self.started)
        total = f" of {format_bytes(self.total)}" if self.total else ""
        numbers = f"{format_bytes(self.done)}{total}, {format_bytes(speed)}/s"
        if not self.bar.disable:
            if now - self.begun > AFTER and not self.bar.live.is_started:
                self.bar.start()
            self.bar.update(self.task, completed=self.done, numbers=numbers)
        elif now - self.said >= LINE_INTERVAL_S:
            self.said = now
            left = f", {format_duration((self.total - self.done) / max(1, speed))} left" if self.total else ""
            self.say(f"{self.label}: {numbers}{left}")

    def through(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """The pieces, counted by their characters."""
        for piece in pieces:
            yield piece
            self.add(len(piece[0]))
