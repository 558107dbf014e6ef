"""Incremental detokenizer: converts tokens to text while a sample is generated."""

import codecs

import tiktoken

from data.tokenizer import token_to_bytes
from generation.config import SamplingConfig


class IncrementalDetokenizer:
    """Converts tokens to complete characters, one token at a time. Holds back text that may begin a stop string."""

    def __init__(
        self, tokenizer: tiktoken.Encoding, sampling: SamplingConfig, end_token: int | None
    ):
        self.tokenizer, self.end_token = tokenizer, end_token
        # A model of documents with Windows line ends writes \r\n, and its sample must not end with \r.
        windows_stops = [
            stop.replace("\n", "\r\n") for stop in sampling.stop_strings if "\n" in stop
        ]
        self.stop_strings = sampling.stop_strings + windows_stops
        self.max_new_tokens = sampling.max_new_tokens
        self.utf8_decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.pending = ""  # may be the beginning of a stop string
        self.n_tokens = 0  # so far, without the end-of-text token

    def push(self, token: int) -> tuple[str, str | None]:
        """Add a token. Returns the text that can be shown now, and the finish reason as in TextChunk.

        An incomplete character at the end of a sample is dropped.
        """
        if token == self.end_token:
            return self.pending, "end"
        self.n_tokens += 1
        self.pending += self.utf8_decoder.decode(token_to_bytes(self.tokenizer, token))
        starts = [(self.pending.find(stop), stop) for stop in self.stop_strings]
        found = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if found:
            _, start = min(found)  # of several stop strings, the one that ends first
            return self.pending[:start], "stop"
        if self.n_tokens == self.max_new_tokens:
            return self.pending, "length"
        prefixes = [stop[:length] for stop in self.stop_strings for length in range(1, len(stop))]
        held_back = max(
            (len(prefix) for prefix in prefixes if self.pending.endswith(prefix)), default=0
        )
        shown = len(self.pending) - held_back
        text, self.pending = self.pending[:shown], self.pending[shown:]
        return text, None
