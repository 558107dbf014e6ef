r"""Byte-pair encoding of long texts in half the time, to the same ids.

tiktoken cuts text into pieces with a regular expression first, and that takes most of the time: `\s+(?!\S)`, by which
the last blank of several goes with the word behind them, looks ahead, which takes a machine that backtracks. Where such
blanks are is found here instead, and marked with a special token that tiktoken splits at; what is left of the
expression runs in linear time. Patterns of another kind are left to tiktoken as they are.
"""

import re

import numpy as np
import tiktoken

MARK = "\x1e"  # a control character, so that what is marked is no wider in memory
BLANK = np.isin(np.arange(256), list(b"\t\n\v\f\r "))  # of the bytes of UTF-8
OTHER_BLANKS = re.compile("[\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")  # the rest of Rust's \s


def linear(pattern: str) -> str | None:
    """A pattern without what looks ahead, or forbids to backtrack; None: this is none of those known here.

    They end in \\s+(?!\\S)|\\s, with a + or without, as GPT-2's, GPT-4's and ours.
    """
    head, looks_ahead, tail = pattern.rpartition(r"\s+(?!\S)|")
    head = re.sub(r"([+*?]|\{\d+,?\d*\})\+", r"\1", head.replace(r"\s++$|", ""))
    if not looks_ahead or tail not in (r"\s", r"\s+") or re.search(r"\(\?[=!<>]", head):
        return None
    return head + r"\s+"


class FastBPE:
    """Encodes as `encoding` does, whose pattern is the one that `linear` made linear."""

    @classmethod
    def of(cls, encoding: tiktoken.Encoding) -> "FastBPE | None":
        """None: of this encoding's pattern there is none."""
        pattern = linear(encoding._pat_str)
        return None if pattern is None else cls(encoding, pattern)

    def __init__(self, encoding: tiktoken.Encoding, pattern: str):
        self.encoding, self.mark = encoding, encoding.n_vocab
        self.fast = tiktoken.Encoding(
            f"{encoding.name} linear", pat_str=pattern, mergeable_ranks=encoding._mergeable_ranks,
            special_tokens={MARK: self.mark},
        )  # fmt: skip
        # Where a pattern takes blanks up to a line end as one piece, a line end does not go with the word behind it.
        self.last = BLANK & ~np.isin(np.arange(256), list(b"\r\n")) if r"\s*[\r\n]" in pattern else BLANK

    def encode(self, text: str) -> np.ndarray:
        """The ids of `text`, (n,) uint32. Raises what tiktoken raises."""
        end = text[len(text.rstrip()) :]
        ends_otherwise = ("\n" in end or "\r" in end) and end[-1] not in "\r\n"  # \s++$ takes all of these blanks
        if MARK in text or ends_otherwise or (not text.isascii() and OTHER_BLANKS.search(text)):
            return self.encoding.encode_to_numpy(text, disallowed_special=())
        raw = np.frombuffer(text.encode(), dtype=np.uint8)
        blank = BLANK[raw]
        marks = np.flatnonzero(blank[:-2] & self.last[raw[1:-1]] & ~blank[2:]) + 1
        marked = np.insert(raw, marks, ord(MARK)).tobytes().decode()
        ids = self.fast.encode_to_numpy(marked, allowed_special={MARK}, disallowed_special=())
        return ids[ids != self.mark]
