"""Incremental detokenizer: converts tokens to text while a sample is generated."""

import codecs

from data.tokenizer import Tokenizer, token_to_bytes
from generation.config import SamplingConfig


class IncrementalDetokenizer:
    """Converts tokens to complete characters, one token at a time, and finds the end of the sample.

    Text that may begin a stop string is held back until the following tokens decide.
    end_token: id of the end-of-text token, or None.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingConfig, end_token: int | None):
        self.tokenizer = tokenizer
        self.end_token = end_token
        self.max_new_tokens = sampling.max_new_tokens
        # A model of Windows texts writes \r\n, and its sample must not end with \r.
        windows = [stop.replace("\n", "\r\n") for stop in sampling.stop_strings if "\n" in stop]
        self.stop_strings = sampling.stop_strings + windows
        self.utf8_decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.pending = ""  # may be the beginning of a stop string
        self.n_tokens = 0  # so far, without the end-of-text token

    def push(self, token: int) -> tuple[str, str | None]:
        """Add a token. Returns the text that can be shown now, and TextChunk's finish reason.

        An incomplete character at the end of a sample is dropped.
        """
        if token == self.end_token:
            return self.pending, "end"
        self.n_tokens += 1
        self.pending += self.utf8_decoder.decode(token_to_bytes(self.tokenizer, token))
        found = []  # (end, start) of stop strings
        for stop in self.stop_strings:
            start = self.pending.find(stop)
            if start >= 0:
                found.append((start + len(stop), start))
        if found:
            _, start = min(found)  # of the stop string that ends first
            return self.pending[:start], "stop"
        if self.n_tokens == self.max_new_tokens:
            return self.pending, "length"
        shown = len(self.pending) - self._count_held_back()
        text = self.pending[:shown]
        self.pending = self.pending[shown:]
        return text, None

    def _count_held_back(self) -> int:
        """Number of characters at the end of the pending text that may begin a stop string."""
        count = 0
        for stop in self.stop_strings:
            for length in range(1, len(stop)):
                if self.pending.endswith(stop[:length]):
                    count = max(count, length)
        return count
