"""Sampling settings and their limits. This module does not import torch, so that errors are reported immediately."""

from dataclasses import dataclass
from typing import Any

from common.settings import Rule, setting


@dataclass
class SamplingConfig:
    """How the next token is drawn from the logits, and when a sample ends. See generation/sampling.py."""

    max_new_tokens: int = setting(300, 0, 10**9)
    temperature: float = setting(0.8, 0, 1e30)  # 0: greedy decoding
    top_k: int | None = setting(None, 1, 10**9)  # None: all tokens
    top_p: float | None = setting(None, above=0, high=1)  # None: all tokens
    min_p: float | None = setting(None, above=0, high=1)  # None: all tokens
    stop: Any = None  # a string or a list of strings; a sample ends before the first of them

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return (
            [] if self.stop is None else self.stop if isinstance(self.stop, list) else [self.stop]
        )

    def rules(self, section: str) -> list[Rule]:
        has_stop_strings = self.stop != [] and all(
            isinstance(stop, str) and stop for stop in self.stop_strings
        )
        return [
            (
                "temperature",
                not 0 < self.temperature < 1e-30,
                "is too small; set 0 for greedy decoding",
            ),
            (
                "stop",
                has_stop_strings,
                "must be a string that is not empty, or a list of them; set null for none",
            ),
        ]
