"""Tokenizers convert text to token ids. A tokenizer is always a tiktoken.Encoding.

Each function in TOKENIZERS makes a vocabulary from texts: the pattern that splits text, and the tokens in the order of
their ids (docs/hacking.md). Prepared data and checkpoints contain the tokenizer's spec, which is plain data.
"""

import base64
import itertools
import json
import re
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken

from common.errors import TrainingFailed, UserError
from data.config import TokenizerConfig
from data.fast_bpe import FastBPE

END_OF_TEXT = "<|endoftext|>"
CHARACTER_PATTERN = r"(?s)."  # each character is a separate piece
# GPT-4's pattern to split text into pieces that tokens never cross, but with at most two digits in a piece, so that a
# small vocabulary is not spent on numbers. Possessive quantifiers (++) keep long runs from overflowing the regex stack.
BPE_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,2}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
TRAIN_BPE = Path(__file__).with_name("train_bpe.py")
MAX_TRAIN_CHARS = 2**25  # characters that a vocabulary is trained on, at most
TEXT_OVERHEAD_CHARS = (
    64  # added to each text's length, so that a sample of short texts has bounded memory
)
MAX_LISTED_CHARACTERS = 9  # in a message
OPENAI_SIZES = {
    "gpt2": 50_257,
    "cl100k_base": 100_277,
    "o200k_base": 200_019,
}  # vocabularies that tiktoken downloads


class Tokenizer(tiktoken.Encoding):
    """A tiktoken.Encoding that knows the token before a document.

    start_token: None stands for the end-of-text token, or for a newline if the tokenizer has none.
    """

    def __init__(self, name: str, *, start_token: int | None = None, **arguments: Any):
        super().__init__(name, **arguments)
        if start_token is None:
            start_token = end_of_text(self)
        if start_token is None:
            start_token = self._mergeable_ranks.get(b"\n", 0)
        self.start_token = start_token

    def __getstate__(self) -> Any:  # for copies
        return {**super().__getstate__(), "start_token": self.start_token}


def _make_tokenizer(
    name: str,
    pattern: str,
    tokens: Sequence[bytes],
    special: dict[str, int],
    start_token: int | None = None,
) -> Tokenizer:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return Tokenizer(
        name,
        pat_str=pattern,
        mergeable_ranks=ranks,
        special_tokens=special,
        start_token=start_token,
    )


def char(texts: Iterable[str], vocab_size: int | None) -> tuple[str, list[bytes]]:
    """One token per distinct character, in code point order."""
    return CHARACTER_PATTERN, [
        c.encode() for c in sorted(set(itertools.chain.from_iterable(texts)))
    ]


def byte(texts: Iterable[str], vocab_size: int | None) -> tuple[str, list[bytes]]:
    """One token per UTF-8 byte: 256 tokens, which encode any text."""
    return CHARACTER_PATTERN, [bytes([i]) for i in range(256)]


def bpe(texts: Iterable[str], vocab_size: int | None) -> tuple[str, list[bytes]]:
    """Byte-pair encoding (Sennrich et al., arXiv:1508.07909) over bytes, trained on the text or a sample of it."""
    request = {"texts": sample_texts(texts), "vocab_size": vocab_size, "pattern": BPE_PATTERN}
    content = json.dumps(request, ensure_ascii=False).encode()
    # A signal to this process ends `run`, which then kills the child. In its own session, it gets no Ctrl-C itself.
    done = subprocess.run(
        [sys.executable, str(TRAIN_BPE)], input=content, capture_output=True, start_new_session=True
    )
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").splitlines() or [
            f"exit code {done.returncode}"
        ]
        advice = "free some memory, or set tokenizer=byte"
        raise TrainingFailed(f"training the vocabulary failed ({lines[-1]}); {advice}")
    return BPE_PATTERN, [base64.b64decode(token) for token in json.loads(done.stdout)]


def sample_texts(texts: Iterable[str]) -> list[str]:
    """Up to MAX_TRAIN_CHARS characters, spread evenly over the texts: every text, every third, every ninth, ..."""
    sample, size, stride = [], 0, 1
    for number, text in enumerate(texts):
        if number % stride == 0:
            sample.append(
                re.sub(r"(\s{1000})\s+", r"\1", text)
            )  # longer runs overflow the stack of rustbpe's regex
            size += len(text) + TEXT_OVERHEAD_CHARS
        if size > MAX_TRAIN_CHARS:
            sample, stride, size = (
                sample[::3],
                3 * stride,
                size // 3,
            )  # odd: prompts and completions alternate
    return sample


TOKENIZERS: dict[str, Callable[[Iterable[str], int | None], tuple[str, list[bytes]]]] = {
    f.__name__: f for f in (char, byte, bpe)
}


def build_tokenizer(
    config: TokenizerConfig,
    texts: Iterable[str],
    has_several_documents: bool,
    spec: dict | None = None,
) -> Tokenizer:
    """Build the tokenizer that `config` names from texts, or from the spec of another run. Raises UserError.

    has_several_documents: whether it needs an end-of-text token.
    """
    if spec is not None:
        return from_spec(spec)
    if config.name in TOKENIZERS:
        vocab_size = (
            config.vocab_size and config.vocab_size - has_several_documents
        )  # without the end-of-text token
        pattern, tokens = TOKENIZERS[config.name](texts, vocab_size)
        special = {END_OF_TEXT: len(tokens)} if has_several_documents else {}
        return _make_tokenizer(config.name, pattern, tokens, special)
    if config.name not in OPENAI_SIZES:
        raise UserError(
            f"tokenizer.name={config.name} is unknown; set {', '.join([*TOKENIZERS, *OPENAI_SIZES])}"
        )
    try:
        return from_spec(to_spec(tiktoken.get_encoding(config.name)))
    except Exception as error:  # network and cache raise exceptions of many types
        advice = "set tokenizer=bpe, or TIKTOKEN_CACHE_DIR to a folder that tiktoken has filled on another machine"
        raise UserError(
            f"tokenizer={config.name} cannot be downloaded ({type(error).__name__}); {advice}"
        ) from error


def to_spec(tokenizer: tiktoken.Encoding) -> dict:
    """Convert a tokenizer to plain data: {name, pattern, tokens (base64, in the order of their ids), special}.

    Prepared data and checkpoints add `start`, the token before a document.
    """
    ranks = tokenizer._mergeable_ranks
    tokens = [base64.b64encode(token).decode() for token in sorted(ranks, key=ranks.__getitem__)]
    special = dict(tokenizer._special_tokens)
    return {
        "name": tokenizer.name,
        "pattern": tokenizer._pat_str,
        "tokens": tokens,
        "special": special,
    }


def from_spec(spec: dict) -> Tokenizer:
    """Build the tokenizer that to_spec converted."""
    tokens = [base64.b64decode(token) for token in spec["tokens"]]
    return _make_tokenizer(
        spec["name"], spec["pattern"], tokens, spec["special"], spec.get("start")
    )


def end_of_text(tokenizer: tiktoken.Encoding) -> int | None:
    """The id of the end-of-text token. None if the tokenizer has none."""
    return tokenizer._special_tokens.get(END_OF_TEXT)


def find_start_token(spec: dict, ids: np.ndarray) -> int:
    """The token before a document, for a vocabulary without an end-of-text token: the one that most often ends a line.

    spec: of the tokenizer. ids: tokens of the text. Without a line end, it is the first token of the text.
    An unconditional sample must start from a token that the model has seen. In a text of sentences, one per line,
    ".\\n" is a token, and "\\n" alone never occurs.
    """
    counts = np.bincount(ids, minlength=len(spec["tokens"]))
    tokens = [base64.b64decode(token) for token in spec["tokens"]]
    for line_end in (b"\n", b"\r"):
        line_ends = counts * [token.endswith(line_end) for token in tokens]
        if line_ends.any():
            return int(line_ends.argmax())
    return int(ids[0])


def encode(
    tokenizer: tiktoken.Encoding, text: str, where: str = "the text", fast: FastBPE | None = None
) -> np.ndarray:
    """Token ids of `text`, (n,) uint32. Special tokens in the text are encoded as ordinary text.

    where: name of the text, for UserErrors about characters without a token. fast: FastBPE of the tokenizer.
    """
    if tokenizer.name == "char":
        _check_characters(tokenizer, text, where)
    try:
        if tokenizer.name == "byte":
            return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)
        return (
            tokenizer.encode_to_numpy(text, disallowed_special=())
            if fast is None
            else fast.encode(text)
        )
    except (
        ValueError
    ) as error:  # half a character from a terminal with another encoding; a million spaces
        raise UserError(f"{where} cannot be encoded ({error}); correct the text") from None


def _check_characters(tokenizer: tiktoken.Encoding, text: str, where: str) -> None:
    """Raise UserError if a character of the text has no token. Combining marks are shown as U+0301."""
    ranks = tokenizer._mergeable_ranks
    unknown = sorted(c for c in set(text) if c.encode(errors="surrogatepass") not in ranks)
    if not unknown:
        return
    has_marks = any(map(unicodedata.combining, unknown))
    names = [
        repr(c) if c.isprintable() and not unicodedata.combining(c) else f"U+{ord(c):04X}"
        for c in unknown
    ]
    listed = ", ".join(names[:MAX_LISTED_CHARACTERS])
    if len(names) > MAX_LISTED_CHARACTERS:
        listed += f" and {len(names) - MAX_LISTED_CHARACTERS} more"
    advice = "normalize the text to NFC, " if has_marks else ""
    advice += "remove them, or train a new model with tokenizer=byte or bpe"
    raise UserError(f"{where} has characters that are not in the vocabulary: {listed}; {advice}")


def token_strings(tokenizer: tiktoken.Encoding, ids: Sequence[int]) -> list[str]:
    """Each token as a label in one line: \\n for a newline, \\xNN for a byte that is not a complete character."""
    strings = [token_to_bytes(tokenizer, i).decode(errors="surrogateescape") for i in ids]
    return [
        re.sub(r"(?<!\\)\\udc", r"\\x", repr(string)[1:-1]) for string in strings
    ]  # byte 0xc3 is "\udcc3"


def token_to_bytes(tokenizer: tiktoken.Encoding, token: int) -> bytes:
    """The bytes of a token; empty for an unused id, of which cl100k_base has a few."""
    try:
        return tokenizer.decode_single_token_bytes(token)
    except KeyError:
        return b""


def token_bytes(tokenizer: tiktoken.Encoding) -> np.ndarray:
    """Number of text bytes of each token, (V,) int64; 0 for special tokens."""
    lengths = np.zeros(tokenizer.n_vocab, dtype=np.int64)
    for token, rank in tokenizer._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths
