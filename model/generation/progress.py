"""Progress while many samples are generated or documents are scored."""

import time

from common.console import ProgressBar


class GenerationProgress:
    """Progress bar on stderr: finished items, tokens/s and the remaining time. A context manager.

    items: number of samples or documents. total_tokens: of all items, at most. noun: "samples" or "documents".
    """

    def __init__(self, items: int, total_tokens: int, noun: str):
        self.items, self.noun = items, noun
        self.finished_items = self.tokens = self.skipped = 0
        self.started = time.perf_counter()
        self.bar = ProgressBar(max(1, total_tokens), stderr=True)

    def __enter__(self) -> "GenerationProgress":
        self.bar.__enter__()
        return self

    def __exit__(self, *error) -> None:
        self.bar.__exit__(*error)

    def add(self, tokens: int, skipped: int = 0, finished: bool = False) -> None:
        """Count new tokens. finished: they complete an item, and `skipped` of its tokens will never be generated."""
        self.tokens += tokens
        self.skipped += skipped
        self.finished_items += finished
        if self.finished_items < self.items:  # afterwards, the summary is printed
            speed = self.tokens / (time.perf_counter() - self.started)
            label = f"{self.finished_items:,}/{self.items:,} {self.noun}  {speed:,.0f} tokens/s"
            self.bar.update(self.tokens + self.skipped, label)

    def summary(self) -> str:
        """One line: items, tokens, seconds and tokens/s."""
        seconds = time.perf_counter() - self.started
        speed = f"{self.tokens:,} tokens in {seconds:.1f} s, {self.tokens / seconds:,.0f} tokens/s"
        return f"{self.finished_items:,} {self.noun}, {speed}" if self.items > 1 else speed
