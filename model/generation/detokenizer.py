"""From tokens to text as it is made: whole characters alone, and nothing that a stop string may begin with."""

import codecs

import tiktoken

from model.generation.config import SamplingConfig


class IncrementalDetokenizer:
    """The text of one token after another. tokens: how many there were."""

    def __init__(self, encoding: tiktoken.Encoding, sampling: SamplingConfig):
        self.encoding, self.stops, self.most = encoding, sampling.stop_strings, sampling.max_new_tokens
        self.characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.held = ""  # made, but it may be the beginning of a stop string
        self.tokens = 0

    def push(self, token: int, end: int | None) -> tuple[str, str | None]:
        """What can be shown now, and why the text ends here, as in Piece.ended; None: it goes on.

        Half a character at the end of a text is left out.
        """
        if token == end:
            return self.held, "end"
        self.tokens += 1
        self.held += self.characters.decode(self._bytes(token))
        met = [(at + len(stop), at) for stop in self.stops if (at := self.held.find(stop)) >= 0]
        if met:
            _, at = min(met)  # the one that is complete first
            return self.held[:at], "stop"
        if self.tokens == self.most:
            return self.held, "length"
        sure = len(self.held) - self._begun()
        shown, self.held = self.held[:sure], self.held[sure:]
        return shown, None

    def _bytes(self, token: int) -> bytes:
        try:
            return self.encoding.decode_single_token_bytes(token)
        except KeyError:  # an id that the vocabulary leaves out, as cl100k_base does a few: it stands for nothing
            return b""

    def _begun(self) -> int:
        """How many characters at the end may become a stop string."""
        longest = max(map(len, self.stops), default=1) - 1
        for size in range(min(longest, len(self.held)), 0, -1):
            if any(stop.startswith(self.held[-size:]) for stop in self.stops):
                return size
        return 0
