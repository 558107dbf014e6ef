"""Progress while many samples are generated or documents are scored."""

import sys
import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from common.console import LINE_INTERVAL_S, format_duration


class GenerationProgress:
    """On stderr, while many texts are made or read: how many are done, tokens/s, the time left; as a bar or in lines.

    work: how much there is to do, in any unit. what: what the texts are called.
    """

    def __init__(self, texts: int, work: int, what: str):
        console = Console(stderr=True, highlight=False)
        self.texts, self.work, self.what = texts, max(1, work), what
        self.done = self.worked = self.tokens = 0
        self.started = self.said = time.perf_counter()
        self.bar = Progress(
            TextColumn("{task.fields[label]}"), BarColumn(bar_width=None), TimeElapsedColumn(), TextColumn("left"),
            TimeRemainingColumn(), console=console, disable=not console.is_terminal, transient=True, expand=True,
            speed_estimate_period=600,
        )  # fmt: skip
        self.task = self.bar.add_task("", total=self.work, label=f"0/{texts} {what}")

    def __enter__(self) -> "GenerationProgress":
        self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        self.bar.stop()

    def add(self, tokens: int, share: int, ended: bool) -> None:
        """So many tokens more, and so much of the work; ended: a text is done with them."""
        self.tokens += tokens
        self.done += ended
        self.worked += share
        now = time.perf_counter()
        seconds = now - self.started
        label = f"{self.done:,}/{self.texts:,} {self.what}  {self.tokens / seconds:,.0f} tokens/s"
        self.bar.update(self.task, advance=share, label=label)
        if self.bar.disable and now - self.said >= LINE_INTERVAL_S:
            self.said = now
            left = seconds / max(1, self.worked) * (self.work - self.worked)
            print(f"{label}  {format_duration(left)} left", file=sys.stderr, flush=True)

    def summary(self) -> str:
        seconds = time.perf_counter() - self.started
        speed = f"{self.tokens:,} tokens in {seconds:.1f} s, {self.tokens / seconds:,.0f} tokens/s"
        return f"{self.done:,} {self.what}, {speed}" if self.texts > 1 else speed
