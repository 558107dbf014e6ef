"""Text to tokens: a tokenizer is a tiktoken.Encoding, always.

Each function builds one from the text. A new one is one function here, in TOKENIZERS, and one YAML file
in configs/tokenizer/ that names it. Its spec is plain data (name, pattern, tokens, special tokens), kept in the
prepared data and in every checkpoint, so that sampling never guesses.
"""

import base64
import os
from collections.abc import Callable, Sequence

import numpy as np
import tiktoken

from data.config import TokenizerConfig
from errors import UserError

END_OF_TEXT = "<|endoftext|>"
EACH_CHARACTER = r"(?s)."
# GPT-4's way to cut text into pieces that tokens never cross, in which digits come at most two at a time, so that a
# small vocabulary is not spent on numbers.
PIECES = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)


def _encoding(name: str, pattern: str, tokens: Sequence[bytes], special: dict[str, int]) -> tiktoken.Encoding:
    ranks = {token: rank for rank, token in enumerate(tokens)}
    return tiktoken.Encoding(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)


def _special(documents: Sequence[str], first: int) -> dict[str, int]:
    """A token that separates documents, where there is more than one."""
    return {END_OF_TEXT: first} if len(documents) > 1 else {}


def _refuse_size(config: TokenizerConfig) -> None:
    if config.vocab_size is not None:
        raise UserError(
            f"tokenizer={config.name} has the size that it has; leave tokenizer.vocab_size out, or set tokenizer=bpe"
        )


def char(documents: Sequence[str], config: TokenizerConfig) -> tiktoken.Encoding:
    """A token per distinct character, in code point order."""
    _refuse_size(config)
    characters = sorted(set().union(*documents))
    tokens = [c.encode() for c in characters]
    return _encoding("char", EACH_CHARACTER, tokens, _special(documents, len(tokens)))


def byte(documents: Sequence[str], config: TokenizerConfig) -> tiktoken.Encoding:
    """A token per byte of UTF-8: 256 of them, and any text can be encoded."""
    _refuse_size(config)
    return _encoding("byte", EACH_CHARACTER, [bytes([i]) for i in range(256)], _special(documents, 256))


def bpe(documents: Sequence[str], config: TokenizerConfig) -> tiktoken.Encoding:
    """Byte-pair encoding (Sennrich et al., arXiv:1508.07909) over bytes, trained on the text."""
    import rustbpe

    room = (config.vocab_size or 0) - (len(documents) > 1)
    if room < 256:
        raise UserError(
            f"tokenizer.vocab_size={config.vocab_size} has no room for the 256 bytes; set 512 or more, "
            "or tokenizer=byte"
        )
    trainer = rustbpe.Tokenizer()
    trainer.train_from_iterator(iter(documents), room, pattern=PIECES)
    tokens = [bytes(token) for token, _ in sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])]
    return _encoding("bpe", PIECES, tokens, _special(documents, len(tokens)))


def gpt2(documents: Sequence[str], config: TokenizerConfig) -> tiktoken.Encoding:
    """GPT-2's own vocabulary of 50,257 tokens, which tiktoken downloads once, or finds in TIKTOKEN_CACHE_DIR."""
    _refuse_size(config)
    try:
        return tiktoken.get_encoding("gpt2")
    except Exception as error:  # whatever the network or the cache came to
        cache = os.environ.get("TIKTOKEN_CACHE_DIR", "not set")
        raise UserError(
            f"tokenizer=gpt2 needs GPT-2's vocabulary, which could not be downloaded ({type(error).__name__}); set the "
            f"environment variable TIKTOKEN_CACHE_DIR (now {cache}) to a tiktoken cache that holds it, or tokenizer=bpe"
        ) from error


TOKENIZERS: dict[str, Callable[..., tiktoken.Encoding]] = {f.__name__: f for f in (char, byte, bpe, gpt2)}


DOWNLOADED = ("gpt2",)  # those whose vocabulary comes from the network where it is not yet at hand


def size_without_text(config: TokenizerConfig, several: bool) -> int | None:
    """How many tokens there are, or for bpe can be at the most, before a text is read; None: the text decides.

    several: whether the text is of several documents. Raises UserError.
    """
    if config.name == "bpe":
        return config.vocab_size
    _refuse_size(config)
    return {"byte": 256 + several, "gpt2": 50_257}.get(config.name)


def build(documents: Sequence[str], config: TokenizerConfig) -> tiktoken.Encoding:
    """The tokenizer that `config` asks for, made from the documents. Raises UserError."""
    if config.name not in TOKENIZERS:
        raise UserError(f"tokenizer.name={config.name} is unknown; set one of {', '.join(TOKENIZERS)}")
    return TOKENIZERS[config.name](documents, config)


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


def beginning(encoding: tiktoken.Encoding) -> list[int]:
    """What a text starts from when nothing is given: an end of text, else a new line, else the first token."""
    end = end_of_text(encoding)
    newline = encoding._mergeable_ranks.get(b"\n", 0)
    return [newline if end is None else end]


def encode(encoding: tiktoken.Encoding, text: str, where: str = "the text") -> np.ndarray:
    """Token ids (uint32) of `text`, special tokens not looked for.

    Raises UserError where a character has no token, naming it and its place: tiktoken itself would end the process.
    """
    if encoding.name == "char":
        unknown = set(text) - set(to_characters(encoding))
        if unknown:
            at = min(text.index(c) for c in unknown)
            raise UserError(
                f"{where} has the character {text[at]!r} at position {at}, which this vocabulary of "
                f"{encoding.n_vocab} characters lacks; leave it out, or train with tokenizer=byte or bpe"
            )
    try:
        return encoding.encode_to_numpy(text, disallowed_special=())
    except UnicodeEncodeError:  # half a character, as a broken terminal gives it
        raise UserError(f"{where} is not valid text (a character is incomplete); write it again") from None


def to_characters(encoding: tiktoken.Encoding) -> list[str]:
    return [token.decode() for token in encoding._mergeable_ranks]


def words(encoding: tiktoken.Encoding, ids: Sequence[int]) -> list[str]:
    """The text of each token by itself; bytes that are no whole character stand as \\xNN."""
    return [encoding.decode_single_token_bytes(i).decode(errors="backslashreplace") for i in ids]


def token_bytes(encoding: tiktoken.Encoding) -> np.ndarray:
    """How many bytes of text each token id stands for, (V,) int64; 0 for special tokens."""
    lengths = np.zeros(encoding.n_vocab, dtype=np.int64)
    for token, rank in encoding._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths
