"""Tokenizers convert text to token ids. A tokenizer is always a tiktoken.Encoding.

Each function in TOKENIZERS makes a vocabulary from texts: the pattern that splits text, and the tokens in the order of
their ids (docs/hacking.md). Prepared data and checkpoints contain the tokenizer's spec, which is plain data.
"""

import base64
import itertools
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import tiktoken

from common.errors import UserError
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
MAX_TRAIN_CHARS = 2**25  # characters that a vocabulary is trained on, at most
TEXT_OVERHEAD_CHARS = 64  # added to each text's length, so that a sample of short texts has bounded memory
OPENAI_SIZES = {"gpt2": 50_257, "cl100k_base": 100_277, "o200k_base": 200_019}  # vocabularies that tiktoken downloads


def _make_tokenizer(name: str, pattern: str, tokens: Sequence[bytes], special: dict[str, int]) -> tiktoken.Encoding:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def char(texts: Iterable[str], vocab_size: int | None) -> tuple[str, list[bytes]]:
    """One token per distinct character, in code point order."""
    return CHARACTER_PATTERN, [c.encode() for c in sorted(set(itertools.chain.from_iterable(texts)))]


def byte(texts: Iterable[str], vocab_size: int | None) -> tuple[str, list[bytes]]:
    """One token per UTF-8 byte: 256 tokens, which encode any text."""
    return CHARACTER_PATTERN, [bytes([i]) for i in range(256)]


def bpe(texts: Iterable[str], vocab_size: int | None) -> tuple[str, list[bytes]]:
    """Byte-pair encoding (Sennrich et al., arXiv:1508.07909) over bytes, trained on the text or a sample of it."""
    import rustbpe

    trainer = rustbpe.Tokenizer()  # ty: ignore[missing-attribute] (compiled, without type stubs)
    trainer.train_from_iterator(iter(sample_texts(texts)), vocab_size, pattern=BPE_PATTERN)
    return BPE_PATTERN, [bytes(token) for token, _ in sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])]


def sample_texts(texts: Iterable[str]) -> list[str]:
    """Up to MAX_TRAIN_CHARS characters, spread evenly over the texts: every text, every third, every ninth, ..."""
    sample, size, stride = [], 0, 1
    for number, text in enumerate(texts):
        if number % stride == 0:
            sample.append(re.sub(r"(\s{1000})\s+", r"\1", text))  # longer runs overflow the stack of rustbpe's regex
            size += len(text) + TEXT_OVERHEAD_CHARS
        if size > MAX_TRAIN_CHARS:
            sample, stride, size = sample[::3], 3 * stride, size // 3  # odd: prompts and completions alternate
    return sample


TOKENIZERS: dict[str, Callable[[Iterable[str], int | None], tuple[str, list[bytes]]]] = {
    f.__name__: f for f in (char, byte, bpe)
}


def build_tokenizer(
    config: TokenizerConfig, texts: Iterable[str], has_several_documents: bool, spec: dict | None = None
) -> tiktoken.Encoding:
    """Build the tokenizer that `config` names from texts, or from the spec of another run. Raises UserError.

    has_several_documents: whether it needs an end-of-text token.
    """
    if spec is not None:
        return from_spec(spec)
    if config.name in TOKENIZERS:
        vocab_size = config.vocab_size and config.vocab_size - has_several_documents  # without the end-of-text token
        pattern, tokens = TOKENIZERS[config.name](texts, vocab_size)
        special = {END_OF_TEXT: len(tokens)} if has_several_documents else {}
        return _make_tokenizer(config.name, pattern, tokens, special)
    if config.name not in OPENAI_SIZES:
        raise UserError(f"tokenizer.name={config.name} is unknown; set {', '.join([*TOKENIZERS, *OPENAI_SIZES])}")
    try:
        return tiktoken.get_encoding(config.name)
    except Exception as error:  # network and cache raise exceptions of many types
        advice = "set tokenizer=bpe, or TIKTOKEN_CACHE_DIR to a folder that tiktoken has filled on another machine"
        raise UserError(f"tokenizer={config.name} cannot be downloaded ({type(error).__name__}); {advice}") from error


def to_spec(tokenizer: tiktoken.Encoding) -> dict:
    """Convert a tokenizer to plain data: {name, pattern, tokens (base64, in the order of their ids), special}."""
    ranks = tokenizer._mergeable_ranks
    tokens = [base64.b64encode(token).decode() for token in sorted(ranks, key=ranks.__getitem__)]
    special = dict(tokenizer._special_tokens)
    return {"name": tokenizer.name, "pattern": tokenizer._pat_str, "tokens": tokens, "special": special}


def from_spec(spec: dict) -> tiktoken.Encoding:
    """Build the tokenizer that to_spec converted."""
    tokens = [base64.b64decode(token) for token in spec["tokens"]]
    return _make_tokenizer(spec["name"], spec["pattern"], tokens, spec["special"])


def end_of_text(tokenizer: tiktoken.Encoding) -> int | None:
    """The id of the end-of-text token. None if the tokenizer has none."""
    return tokenizer._special_tokens.get(END_OF_TEXT)


def initial_tokens(tokenizer: tiktoken.Encoding) -> list[int]:
    """The start of an unconditional sample: the end-of-text token, else a newline, else the first token."""
    return [tokenizer._special_tokens.get(END_OF_TEXT, tokenizer._mergeable_ranks.get(b"\n", 0))]


def encode(tokenizer: tiktoken.Encoding, text: str, where: str = "the text", fast: FastBPE | None = None) -> np.ndarray:
    """Token ids of `text`, (n,) uint32. Special tokens in the text are encoded as ordinary text.

    where: name of the text, for UserErrors about characters without a token. fast: FastBPE of the tokenizer.
    """
    try:
        if tokenizer.name == "char" and (
            unknown := {c for c in set(text) if c.encode() not in tokenizer._mergeable_ranks}
        ):
            problem = f"{where} has characters that are not in the vocabulary: {sorted(unknown)[:9]}"
            raise UserError(f"{problem}; remove them, or train a new model with tokenizer=byte or bpe")
        if tokenizer.name == "byte":
            return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)
        return tokenizer.encode_to_numpy(text, disallowed_special=()) if fast is None else fast.encode(text)
    except ValueError as error:  # half a character from a terminal with another encoding; a million spaces
        raise UserError(f"{where} cannot be encoded ({error}); correct the text") from None


def token_strings(tokenizer: tiktoken.Encoding, ids: Sequence[int]) -> list[str]:
    """Each token decoded separately; bytes that are not a complete character become \\xNN."""
    return [token_to_bytes(tokenizer, i).decode(errors="backslashreplace") for i in ids]


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
