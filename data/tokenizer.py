"""Tokenizers, which convert text to token ids. A tokenizer is always a tiktoken.Encoding.

Each function in TOKENIZERS builds a tokenizer from a corpus. To add a tokenizer, write a function here and list it
there. tokenizer.name=NAME then selects it (docs/hacking.md). The tokenizer's spec is plain data (name, pattern, tokens,
special tokens). It is saved in prepared data and in every checkpoint, so that sampling uses the tokenizer of the run.
"""

import base64
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import tiktoken

from common.errors import UserError
from data.config import TokenizerConfig
from data.fast_bpe import FastBPE
from data.sources import DOWNLOAD_TIMEOUT_S

END_OF_TEXT = "<|endoftext|>"
CHARACTER_PATTERN = r"(?s)."  # each character is a separate piece
# GPT-4's pattern to split text into pieces that tokens never cross, but with at most two digits in a piece, so that a
# small vocabulary is not spent on numbers. Possessive quantifiers (++) keep long runs from overflowing the regex stack.
BPE_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,2}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
MAX_TRAIN_CHARS = 2**25  # characters that a vocabulary is trained on, at most
OPENAI_URL = "https://openaipublic.blob.core.windows.net/"
# Vocabularies that tiktoken downloads once, and their files.
OPENAI_FILES = {
    "gpt2": ("gpt-2/encodings/main/vocab.bpe", "gpt-2/encodings/main/encoder.json"),
    "cl100k_base": ("encodings/cl100k_base.tiktoken",),
    "o200k_base": ("encodings/o200k_base.tiktoken",),
}
OPENAI_SIZES = {"gpt2": 50_257, "cl100k_base": 100_277, "o200k_base": 200_019}  # known without a download


@dataclass(frozen=True)
class Corpus:
    """The text that a tokenizer is built from. texts: pieces of documents; iterable several times.

    has_several_documents: whether there is more than one document.
    characters: length of all texts, if known.
    """

    texts: Iterable[str]
    has_several_documents: bool
    characters: int | None = None

    def special_tokens(self, first_id: int) -> dict[str, int]:
        """The end-of-text token, which separates documents if there are several."""
        return {END_OF_TEXT: first_id} if self.has_several_documents else {}


def _make_tokenizer(name: str, pattern: str, tokens: Sequence[bytes], special: dict[str, int]) -> tiktoken.Encoding:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def char(corpus: Corpus, config: TokenizerConfig) -> tiktoken.Encoding:
    """One token per distinct character, in code point order."""
    characters = set()
    for text in corpus.texts:
        characters.update(text)
    tokens = [c.encode() for c in sorted(characters)]
    return _make_tokenizer("char", CHARACTER_PATTERN, tokens, corpus.special_tokens(len(tokens)))


def byte(corpus: Corpus, config: TokenizerConfig) -> tiktoken.Encoding:
    """One token per UTF-8 byte: 256 tokens, which encode any text."""
    return _make_tokenizer("byte", CHARACTER_PATTERN, [bytes([i]) for i in range(256)], corpus.special_tokens(256))


def bpe(corpus: Corpus, config: TokenizerConfig) -> tiktoken.Encoding:
    """Byte-pair encoding (Sennrich et al., arXiv:1508.07909) over bytes, trained on the corpus or a sample of it."""
    import rustbpe

    trainer = rustbpe.Tokenizer()  # ty: ignore[missing-attribute] (compiled, without type stubs)
    trainer.train_from_iterator(
        _sample_texts(corpus), config.vocab_size - corpus.has_several_documents, pattern=BPE_PATTERN
    )
    tokens = [bytes(token) for token, _ in sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])]
    return _make_tokenizer("bpe", BPE_PATTERN, tokens, corpus.special_tokens(len(tokens)))


def _sample_texts(corpus: Corpus) -> Iterator[str]:
    """Yield MAX_TRAIN_CHARS characters, spread evenly over the corpus; if its length is unknown, from its start."""
    share = MAX_TRAIN_CHARS / max(MAX_TRAIN_CHARS, corpus.characters or 0)
    seen = sampled = 0
    for text in corpus.texts:
        seen += len(text)
        if sampled < seen * share:
            sampled += len(text)
            yield re.sub(r"(\s{1000})\s+", r"\1", text)  # longer runs overflow the stack of rustbpe's regex
        if sampled >= MAX_TRAIN_CHARS:
            return


def _openai(corpus: Corpus, config: TokenizerConfig) -> tiktoken.Encoding:
    """One of OpenAI's vocabularies, which tiktoken downloads once or finds in TIKTOKEN_CACHE_DIR."""
    try:
        if not _missing_files(config.name):
            return tiktoken.get_encoding(config.name)
        from unittest.mock import patch

        import requests

        # tiktoken calls requests.get without a time limit
        with patch.object(requests, "get", partial(requests.get, timeout=DOWNLOAD_TIMEOUT_S)):
            return tiktoken.get_encoding(config.name)
    except Exception as error:  # network and cache raise exceptions of many types
        missing = [f"{OPENAI_URL}{name} as {_cached_name(name)}" for name in _missing_files(config.name)]
        folder = _cache_folder()  # "" switches tiktoken's cache off
        place = f"{folder} (or the folder in TIKTOKEN_CACHE_DIR)" if folder else "the folder TIKTOKEN_CACHE_DIR=FOLDER"
        raise UserError(
            f"tokenizer={config.name} needs a vocabulary that could not be downloaded ({type(error).__name__}); "
            f"download {' and '.join(missing) or 'it'} another way into {place}, or set tokenizer=bpe"
        ) from error


def _cache_folder() -> str:
    """The folder where tiktoken stores downloads."""
    default = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    return os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", default))


def _cached_name(name: str) -> str:
    return hashlib.sha1(f"{OPENAI_URL}{name}".encode()).hexdigest()


def _missing_files(name: str) -> list[str]:
    """The files of a vocabulary that are not in tiktoken's cache."""
    return [file for file in OPENAI_FILES[name] if not Path(_cache_folder(), _cached_name(file)).is_file()]


def needs_download(config: TokenizerConfig) -> bool:
    """Whether the vocabulary is not on this machine yet."""
    return config.name in OPENAI_FILES and bool(_missing_files(config.name))


TOKENIZERS: dict[str, Callable[[Corpus, TokenizerConfig], tiktoken.Encoding]] = {
    f.__name__: f for f in (char, byte, bpe)
} | dict.fromkeys(OPENAI_FILES, _openai)


def size_without_text(config: TokenizerConfig, has_several_documents: bool) -> int | None:
    """Vocabulary size that is known before reading text (for bpe: the maximum). None if it depends on the text."""
    if config.name == "bpe":
        return config.vocab_size
    return 256 + has_several_documents if config.name == "byte" else OPENAI_SIZES.get(config.name)


def build_tokenizer(corpus: Corpus, config: TokenizerConfig, spec: dict | None = None) -> tiktoken.Encoding:
    """Build the tokenizer that `config` names from the corpus, or from `spec` if it is given. Raises UserError."""
    if spec is not None:
        return from_spec(spec)
    if config.name not in TOKENIZERS:
        raise UserError(f"tokenizer.name={config.name} is unknown; set one of {', '.join([*TOKENIZERS, 'run'])}")
    return TOKENIZERS[config.name](corpus, config)


def to_spec(tokenizer: tiktoken.Encoding) -> dict:
    """Convert a tokenizer to plain data: {name, pattern, tokens (base64, in the order of their ids), special}."""
    ranks = sorted(tokenizer._mergeable_ranks.items(), key=lambda item: item[1])
    return {
        "name": tokenizer.name,
        "pattern": tokenizer._pat_str,
        "tokens": [base64.b64encode(token).decode() for token, _ in ranks],
        "special": dict(tokenizer._special_tokens),
    }


def from_spec(spec: dict) -> tiktoken.Encoding:
    """Build the tokenizer that to_spec converted."""
    tokens = [base64.b64decode(token) for token in spec["tokens"]]
    return _make_tokenizer(spec["name"], spec["pattern"], tokens, spec["special"])


def end_of_text(tokenizer: tiktoken.Encoding) -> int | None:
    """The id of the end-of-text token. None if the tokenizer has none."""
    return tokenizer._special_tokens.get(END_OF_TEXT)


def initial_tokens(tokenizer: tiktoken.Encoding) -> list[int]:
    """The start of an unconditional sample: the end-of-text token, else a newline, else the first token."""
    end = end_of_text(tokenizer)
    newline = tokenizer._mergeable_ranks.get(b"\n", 0)
    return [newline if end is None else end]


def encode(tokenizer: tiktoken.Encoding, text: str, where: str = "the text", fast: FastBPE | None = None) -> np.ndarray:
    """Token ids of `text`, (n,) uint32. Special tokens in the text are encoded as ordinary text.

    where: name of the text for error messages. fast: FastBPE of the tokenizer, for long texts.
    Raises UserError for a character that has no token, with its position; tiktoken would end the process.
    """
    try:
        if tokenizer.name == "char":
            return _encode_characters(tokenizer, text, where)
        if tokenizer.name == "byte":
            return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)
        return _encode_bpe(tokenizer, text, fast)
    except UnicodeEncodeError as error:  # for example from a terminal with another encoding
        raise UserError(
            f"{where} has a lone surrogate (half a character) at position {error.start}; remove it"
        ) from None


def _encode_characters(tokenizer: tiktoken.Encoding, text: str, where: str) -> np.ndarray:
    """Look up ids by code point, which takes a tenth of tiktoken's time."""
    ids = _id_by_code_point(tokenizer)[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")]
    if ids.size and ids.min() < 0:
        position = int((ids < 0).argmax())
        raise UserError(
            f"{where} has the character {text[position]!r} at position {position}, which is not in this vocabulary of "
            f"{tokenizer.n_vocab} characters; remove it, or train a new model with tokenizer=byte or bpe"
        )
    return ids.astype(np.uint32)


@lru_cache(maxsize=4)
def _id_by_code_point(tokenizer: tiktoken.Encoding) -> np.ndarray:
    table = np.full(sys.maxunicode + 1, -1, dtype=np.int32)
    for token, rank in tokenizer._mergeable_ranks.items():
        table[ord(token.decode())] = rank
    return table


def _encode_bpe(tokenizer: tiktoken.Encoding, text: str, fast: FastBPE | None) -> np.ndarray:
    try:
        return tokenizer.encode_to_numpy(text, disallowed_special=()) if fast is None else fast.encode(text)
    except ValueError as error:  # for example a run of spaces that overflows the stack of tiktoken's regex
        if isinstance(error, UnicodeEncodeError) or len(text) < 2:
            raise
        half = len(text) // 2
        return np.concatenate([_encode_bpe(tokenizer, text[:half], fast), _encode_bpe(tokenizer, text[half:], fast)])


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
