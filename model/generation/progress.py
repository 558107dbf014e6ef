"""Progress bar for generating samples and for scoring documents."""

import time

from common.console import ProgressBar


def format_speed(tokens: int, seconds: float) -> str:
    return f"{tokens:,} tokens in {seconds:.1f} s, {tokens / seconds:,.0f} tokens/s"


class GenerationProgress(ProgressBar):
    """Context manager: progress bar on stderr with finished items, tokens/s and the remaining time.

    items: number of samples or documents. total_tokens: maximum for all items. noun: "samples" or "documents".
    finished_items: items that an earlier command has finished.
    """

    def __init__(self, items: int, total_tokens: int, noun: str, finished_items: int = 0):
        self.items, self.noun, self.finished_items = items, noun, finished_items
        self.tokens, self.skipped = 0, total_tokens * finished_items // items
        self.started = time.perf_counter()
        super().__init__(max(1, total_tokens), initial=self.skipped, stderr=True)

    def add(self, tokens: int, skipped: int = 0, finished: bool = False) -> None:
        """Count new tokens. finished: an item is complete. skipped: its tokens that were expected but not generated."""
        self.tokens += tokens
        self.skipped += skipped
        self.finished_items += finished
        if self.finished_items < self.items:  # afterwards, the summary is printed
            speed = self.tokens / (time.perf_counter() - self.started)
            label = f"{self.finished_items:,}/{self.items:,} {self.noun}  {speed:,.0f} tokens/s"
            self.update(self.tokens + self.skipped, label)

    def summary(self) -> str:
        """One line: items, tokens, seconds and tokens/s."""
        speed = format_speed(self.tokens, time.perf_counter() - self.started)
        return f"{self.finished_items:,} {self.noun}, {speed}" if self.items > 1 else speed
