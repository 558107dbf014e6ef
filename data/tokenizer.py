"""Text to tokens: a tokenizer is a tiktoken.Encoding, always.

Each function builds one from texts. A new one is one function here, in TOKENIZERS, and one YAML file
in configs/tokenizer/ that names it. Its spec is plain data (name, pattern, tokens, special tokens), kept in the
prepared data and in every checkpoint, so that sampling never guesses.
"""

import base64
import hashlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import tiktoken

from common.errors import UserError
from data.config import TokenizerConfig
from data.fast_bpe import FastBPE

END_OF_TEXT = "<|endoftext|>"
EACH_CHARACTER = r"(?s)."
# GPT-4's way to cut text into pieces that tokens never cross, in which digits come at most two at a time, so that a
# small vocabulary is not spent on numbers. What is possessive (++) keeps long runs from overflowing the regex's stack.
BPE_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,2}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
MAX_TRAIN_CHARS = 2**25  # characters that a vocabulary is trained on, spread evenly over the text, where it has more
OPENAI = "https://openaipublic.blob.core.windows.net/"
# Vocabularies that tiktoken downloads once, and the files that they come from.
DOWNLOADED = {
    "gpt2": ("gpt-2/encodings/main/vocab.bpe", "gpt-2/encodings/main/encoder.json"),
    "cl100k_base": ("encodings/cl100k_base.tiktoken",),
    "o200k_base": ("encodings/o200k_base.tiktoken",),
}
SIZES = {"gpt2": 50_257, "cl100k_base": 100_277, "o200k_base": 200_019}  # before a text is read


@dataclass(frozen=True)
class Corpus:
    """What a tokenizer is made from. texts: pieces of documents, which can be gone through again.

    several: whether there is more than one document. characters: how many there are, where that is known.
    """

    texts: Iterable[str]
    several: bool
    characters: int | None = None

    def special(self, first: int) -> dict[str, int]:
        """A token that separates documents, where there is more than one."""
        return {END_OF_TEXT: first} if self.several else {}


def _encoding(name: str, pattern: str, tokens: Sequence[bytes], special: dict[str, int]) -> tiktoken.Encoding:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def char(corpus: Corpus, config: TokenizerConfig) -> tiktoken.Encoding:
    """A token per distinct character, in code point order."""
    characters = set()
    for text in corpus.texts:
        characters.update(text)
    tokens = [c.encode() for c in sorted(characters)]
    return _encoding("char", EACH_CHARACTER, tokens, corpus.special(len(tokens)))


def byte(corpus: Corpus, config: TokenizerConfig) -> tiktoken.Encoding:
    """A token per byte of UTF-8: 256 of them, and any text can be encoded."""
    return _encoding("byte", EACH_CHARACTER, [bytes([i]) for i in range(256)], corpus.special(256))


def bpe(corpus: Corpus, config: TokenizerConfig) -> tiktoken.Encoding:
    """Byte-pair encoding (Sennrich et al., arXiv:1508.07909) over bytes, trained on the text, or a sample of it."""
    import rustbpe

    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(_sample(corpus), config.vocab_size - corpus.several, pattern=BPE_PATTERN)
    tokens = [bytes(token) for token, _ in sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])]
    return _encoding("bpe", BPE_PATTERN, tokens, corpus.special(len(tokens)))


def _sample(corpus: Corpus) -> Iterator[str]:
    """SAMPLE characters of the texts, spread evenly over them where their length is known, or all there are."""
    share = MAX_TRAIN_CHARS / max(MAX_TRAIN_CHARS, corpus.characters or 0)
    seen = kept = 0
    for text in corpus.texts:
        seen += len(text)
        if kept < seen * share:
            kept += len(text)
            yield re.sub(r"(\s{1000})\s+", r"\1", text)  # longer runs overflow the stack of rustbpe's regex
        if kept >= MAX_TRAIN_CHARS:
            return


def _openai(corpus: Corpus, config: TokenizerConfig) -> tiktoken.Encoding:
    """A vocabulary of OpenAI's, which tiktoken downloads once, or finds in TIKTOKEN_CACHE_DIR."""
    try:
        return tiktoken.get_encoding(config.name)
    except Exception as error:  # whatever the network or the cache came to
        cache = _cache()
        missing = _missing(config.name)
        files = " and ".join(f"{OPENAI}{name} as {_cached_name(name)}" for name in missing)
        set_to = " (the environment variable TIKTOKEN_CACHE_DIR names another folder)"
        where = f"in {cache}{set_to}" if cache else "in a folder that the environment variable TIKTOKEN_CACHE_DIR names"
        raise UserError(
            f"tokenizer={config.name} needs a vocabulary that could not be downloaded ({type(error).__name__}); get "
            f"{files or 'it'} by other means and put {'them' if len(missing) > 1 else 'it'} {where}, or set "
            "tokenizer=bpe"
        ) from error


def _cache() -> str:
    """Where tiktoken keeps what it downloads; empty: nowhere."""
    default = os.path.join(tempfile.gettempdir(), "data-gym-cache")
    return os.environ.get("TIKTOKEN_CACHE_DIR", os.environ.get("DATA_GYM_CACHE_DIR", default))


def _cached_name(name: str) -> str:
    return hashlib.sha1(f"{OPENAI}{name}".encode()).hexdigest()


def _missing(name: str) -> list[str]:
    """The files of a vocabulary that are not in tiktoken's cache."""
    return [file for file in DOWNLOADED[name] if not (_cache() and Path(_cache(), _cached_name(file)).is_file())]


def needs_download(config: TokenizerConfig) -> bool:
    """Whether the vocabulary would have to come from the network."""
    return config.name in DOWNLOADED and bool(_missing(config.name))


TOKENIZERS: dict[str, Callable[[Corpus, TokenizerConfig], tiktoken.Encoding]] = {
    f.__name__: f for f in (char, byte, bpe)
} | dict.fromkeys(DOWNLOADED, _openai)


def size_without_text(config: TokenizerConfig, several: bool) -> int | None:
    """How many tokens there are, or for bpe can be at the most, before a text is read; None: the text decides."""
    if config.name == "bpe":
        return config.vocab_size
    return 256 + several if config.name == "byte" else SIZES.get(config.name)


def build(corpus: Corpus, config: TokenizerConfig, spec: dict | None = None) -> tiktoken.Encoding:
    """The tokenizer that `config` asks for, made from the texts, or from `spec`. Raises UserError."""
    if spec is not None:
        return from_spec(spec)
    if config.name not in TOKENIZERS:
        raise UserError(f"tokenizer.name={config.name} is unknown; set one of {', '.join([*TOKENIZERS, 'run'])}")
    return TOKENIZERS[config.name](corpus, config)


def to_spec(encoding: tiktoken.Encoding) -> dict:
    """The tokenizer as plain data: {name, pattern, tokens (base64, in the order of their ids), special}."""
    ranks = sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1])
    return {
        "name": encoding.name,
        "pattern": encoding._pat_str,
        "tokens": [base64.b64encode(token).decode() for token, _ in ranks],
        "special": dict(encoding._special_tokens),
    }


def from_spec(spec: dict) -> tiktoken.Encoding:
    tokens = [base64.b64decode(token) for token in spec["tokens"]]
    return _encoding(spec["name"], spec["pattern"], tokens, spec["special"])


def end_of_text(encoding: tiktoken.Encoding) -> int | None:
    """The id that ends a document, or None where the tokenizer has none."""
    return encoding._special_tokens.get(END_OF_TEXT)


def initial_tokens(encoding: tiktoken.Encoding) -> list[int]:
    """What a text starts from when nothing is given: an end of text, else a new line, else the first token."""
    end = end_of_text(encoding)
    newline = encoding._mergeable_ranks.get(b"\n", 0)
    return [newline if end is None else end]


def encode(encoding: tiktoken.Encoding, text: str, where: str = "the text", fast: FastBPE | None = None) -> np.ndarray:
    """Token ids (uint32) of `text`, special tokens not looked for. fast: a `LinearEncoding` of it, for much text.

    Raises UserError where a character has no token, naming it and its place: tiktoken itself would end the process.
    """
    try:
        if encoding.name == "char":
            return _characters(encoding, text, where)
        if encoding.name == "byte":
            return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)
        return _merged(encoding, text, fast)
    except UnicodeEncodeError as error:  # half a character, as a broken terminal gives it
        raise UserError(
            f"{where} has a lone surrogate, half a character, at position {error.start}; take it out"
        ) from None


def _characters(encoding: tiktoken.Encoding, text: str, where: str) -> np.ndarray:
    """As the encoding itself, in a tenth of the time."""
    ids = _id_of_code_point(encoding)[np.frombuffer(text.encode("utf-32-le"), dtype="<u4")]
    if ids.size and ids.min() < 0:
        at = int((ids < 0).argmax())
        raise UserError(
            f"{where} has the character {text[at]!r} at position {at}, which this vocabulary of "
            f"{encoding.n_vocab} characters lacks; leave it out, or train with tokenizer=byte or bpe"
        )
    return ids.astype(np.uint32)


@lru_cache(maxsize=4)
def _id_of_code_point(encoding: tiktoken.Encoding) -> np.ndarray:
    table = np.full(sys.maxunicode + 1, -1, dtype=np.int32)
    for character, rank in zip(to_characters(encoding), encoding._mergeable_ranks.values(), strict=True):
        table[ord(character)] = rank
    return table


def _merged(encoding: tiktoken.Encoding, text: str, fast: FastBPE | None) -> np.ndarray:
    try:
        return encoding.encode_to_numpy(text, disallowed_special=()) if fast is None else fast.encode(text)
    except ValueError as error:  # a run of blanks, say, that is too long for the stack of tiktoken's regex
        if isinstance(error, UnicodeEncodeError) or len(text) < 2:
            raise
        half = len(text) // 2
        return np.concatenate([_merged(encoding, text[:half], fast), _merged(encoding, text[half:], fast)])


def to_characters(encoding: tiktoken.Encoding) -> list[str]:
    return [token.decode() for token in encoding._mergeable_ranks]


def token_strings(encoding: tiktoken.Encoding, ids: Sequence[int]) -> list[str]:
    """The text of each token by itself; bytes that are no whole character stand as \\xNN."""
    return [bytes_of(encoding, i).decode(errors="backslashreplace") for i in ids]


def bytes_of(encoding: tiktoken.Encoding, token: int) -> bytes:
    """What a token stands for; nothing where the vocabulary leaves its id out, as cl100k_base does a few."""
    try:
        return encoding.decode_single_token_bytes(token)
    except KeyError:
        return b""


def token_bytes(encoding: tiktoken.Encoding) -> np.ndarray:
    """How many bytes of text each token id stands for, (V,) int64; 0 for special tokens."""
    lengths = np.zeros(encoding.n_vocab, dtype=np.int64)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths
