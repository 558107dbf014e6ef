"""Sampling settings and their checks. This module imports no torch, so that errors are reported immediately."""

import re
from dataclasses import dataclass
from math import inf
from typing import Any

from common.errors import check_positive, check_settings

ESCAPES = {r"\n": "\n", r"\t": "\t", r"\\": "\\"}


def unescape(value: Any) -> Any:
    """Replace \\n, \\t and \\\\ in a string or a list of strings. Other values are returned unchanged."""
    if isinstance(value, list):
        return [unescape(item) for item in value]
    return re.sub(r"\\[nt\\]", lambda match: ESCAPES[match[0]], value) if isinstance(value, str) else value


@dataclass
class SamplingConfig:
    """How the next token is drawn from the model's logits, and when a sample ends. See model/generation/sampling.py.

    temperature: 0 is greedy decoding. top_k, top_p, min_p: None applies no filter. repetition_penalty: 1 is no penalty.
    stop: None, a string or a list of strings. A sample ends before its first stop string.
    """

    max_new_tokens: int
    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    stop: Any  # str, None, or a list of str

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list."""
        return [] if self.stop is None else self.stop if isinstance(self.stop, list) else [self.stop]

    def check(self, section: str = "") -> None:
        """Raise UserError if a value is out of range. section: of the keys in messages, as in "eval.sample"."""
        check_positive(section, self, top_k=10**9)
        keep_all = "must be above 0 and at most 1; set null to keep all tokens"
        has_stop_strings = self.stop != [] and all(isinstance(stop, str) and stop for stop in self.stop_strings)
        rules = [
            ("max_new_tokens", 0 <= self.max_new_tokens <= 10**9, "must be from 0 to 10^9; set 300, for example"),
            ("temperature", 0 <= self.temperature < inf, "must be finite and not negative; set 0 for greedy decoding"),
            ("temperature", not 0 < self.temperature < 1e-30, "is too small; set 0 for greedy decoding"),
            ("top_p", self.top_p is None or 0 < self.top_p <= 1, keep_all),
            ("min_p", self.min_p is None or 0 < self.min_p <= 1, keep_all),
            ("repetition_penalty", 0 < self.repetition_penalty < inf, "must be positive; set 1 for no penalty"),
            ("stop", has_stop_strings, "must be a string that is not empty, or a list of them; set null for none"),
        ]
        check_settings(section, self, rules)
