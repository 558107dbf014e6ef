"""Settings of loading a model and of sampling, and their limits.

This module does not import torch, so that errors on the command line are reported immediately.
"""

from dataclasses import dataclass, field
from typing import Any

from common.settings import Rule, setting
from model import AttentionConfig


@dataclass
class CheckpointChoice:
    """The checkpoint that a script reads."""

    run: str = "last"  # name or path of a run; last: the newest run with a checkpoint
    checkpoint: str = setting("best", choices=("best", "last", "step-N"))


@dataclass
class LoadConfig(CheckpointChoice):
    """The checkpoint, where it runs, and how."""

    # samples, windows of documents or requests that are computed together
    batch_size: int = setting(32, 1, 10**6)
    device: str = setting("auto", choices=("auto", "cpu", "cuda", "mps"))
    # int8: on CPUs only
    dtype: str = setting("auto", choices=("auto", "float32", "bfloat16", "float16", "int8"))
    attention: AttentionConfig = field(default_factory=AttentionConfig)


@dataclass
class SamplingConfig:
    """How the next token is drawn from the logits, and when a sample ends.

    generation/sampling.py explains temperature, top_k, top_p and min_p.
    """

    max_new_tokens: int = setting(300, 0, 10**9)
    temperature: float = setting(0.9, 0, 1e30)  # 0: greedy decoding
    top_k: int | None = setting(None, 1, 10**9)  # None keeps all tokens
    top_p: float | None = setting(None, above=0, high=1)  # None keeps all tokens
    min_p: float | None = setting(None, above=0, high=1)  # None keeps all tokens
    # a string or a list of strings; a sample ends before the first of them
    stop: Any = None

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list, which is empty for None."""
        if self.stop is None:
            return []
        if isinstance(self.stop, list):
            return self.stop
        return [self.stop]

    def rules(self, section: str) -> list[Rule]:
        is_stop_valid = all(isinstance(stop, str) and stop for stop in self.stop_strings)
        return [
            (
                "temperature",
                not 0 < self.temperature < 1e-30,
                "is too small; set 0 for greedy decoding",
            ),
            (
                "stop",
                is_stop_valid and self.stop != [],
                "must be a string that is not empty, or a list of them; set null for none",
            ),
        ]
