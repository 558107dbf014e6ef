"""Tokenizers convert text to token ids. A tokenizer is always a tiktoken.Encoding.

Each function in TOKENIZERS makes a vocabulary from texts: the pattern that splits text, and the
tokens in the order of their ids. To add a tokenizer, add a function (docs/hacking.md).

Prepared data and checkpoints contain the spec of a tokenizer, which is plain data (to_spec).
"""

import base64
import itertools
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import rustbpe
import tiktoken

from common.errors import UserError
from common.settings import unknown_value
from data.config import TokenizerConfig

END_OF_TEXT = "<|endoftext|>"
CHARACTER_PATTERN = r"(?s)."  # each character is a separate piece
# GPT-4's pattern to split text into pieces that tokens never cross, but with at most two digits in
# a piece, so that a small vocabulary is not spent on numbers. Possessive quantifiers (++) keep long
# runs from overflowing the regex stack.
BPE_PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,2}+"
    r"| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
)
MAX_TRAIN_CHARS = 2**25  # characters that a vocabulary is trained on, at most
# Added to each text's length, so that a sample of short texts needs limited memory.
TEXT_OVERHEAD_CHARS = 64
MAX_LISTED_CHARACTERS = 9  # in a message
# Vocabularies that tiktoken downloads, with their sizes.
OPENAI_SIZES = {"gpt2": 50_257, "cl100k_base": 100_277, "o200k_base": 200_019}


class Tokenizer(tiktoken.Encoding):
    """A tiktoken.Encoding with start_token, the token before a document, from which samples start.

    pattern: regular expression that splits text into pieces, which tokens never cross.
    tokens: in the order of their ids.
    special: ids of special tokens, above the ids of `tokens`.
    start_token: None stands for the end-of-text token, or for a newline if there is none.
    """

    def __init__(
        self,
        name: str,
        pattern: str,
        tokens: Sequence[bytes],
        special: dict[str, int],
        start_token: int | None = None,
    ):
        ranks = {token: rank for rank, token in enumerate(tokens)}
        super().__init__(name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        if start_token is None:
            start_token = special.get(END_OF_TEXT, ranks.get(b"\n", 0))
        self.start_token = start_token

    def __reduce__(self) -> tuple:
        """Pickle and copy the spec."""
        return from_spec, (to_spec(self) | {"start": self.start_token},)


def char(texts: Iterable[str], vocab_size: int | None) -> tuple[str, list[bytes]]:
    """One token per distinct character, in code point order."""
    characters = set(itertools.chain.from_iterable(texts))
    return CHARACTER_PATTERN, [character.encode() for character in sorted(characters)]


def byte(texts: Iterable[str], vocab_size: int | None) -> tuple[str, list[bytes]]:
    """One token per UTF-8 byte: 256 tokens, which encode any text."""
    return CHARACTER_PATTERN, [bytes([i]) for i in range(256)]


def bpe(texts: Iterable[str], vocab_size: int | None) -> tuple[str, list[bytes]]:
    """Byte-pair encoding over bytes (Sennrich et al., arXiv:1508.07909), trained on the texts.

    Of more than MAX_TRAIN_CHARS characters, it is trained on a sample.
    """
    trainer = rustbpe.Tokenizer()  # ty: ignore[missing-attribute] (compiled, without type stubs)
    sample = iter(sample_texts(texts))
    # In a thread, so that a signal can interrupt this one.
    training = ThreadPoolExecutor(1).submit(
        trainer.train_from_iterator, sample, vocab_size, pattern=BPE_PATTERN
    )
    training.result()
    return BPE_PATTERN, [bytes(token) for token, _ in trainer.get_mergeable_ranks()]


def sample_texts(texts: Iterable[str]) -> list[str]:
    """Up to MAX_TRAIN_CHARS characters, spread evenly over the texts.

    Takes every text, or every third, every ninth, and so on.
    """
    sample = []
    size = 0
    stride = 1
    for number, text in enumerate(texts):
        if number % stride == 0:
            # longer runs of spaces overflow the stack of rustbpe's regex
            sample.append(re.sub(r"(\s{1000})\s+", r"\1", text))
            size += len(text) + TEXT_OVERHEAD_CHARS
        if size > MAX_TRAIN_CHARS:
            # every third, not every second, because prompts and completions alternate
            sample = sample[::3]
            size //= 3
            stride *= 3
    return sample


TOKENIZERS: dict[str, Callable[[Iterable[str], int | None], tuple[str, list[bytes]]]] = {
    "char": char,
    "byte": byte,
    "bpe": bpe,
}


def build_tokenizer(
    config: TokenizerConfig,
    texts: Iterable[str],
    has_several_documents: bool,
    spec: dict | None = None,
) -> Tokenizer:
    """Build the tokenizer that `config` names, trained on texts where it is trained.

    has_several_documents: whether it needs an end-of-text token.
    spec: the tokenizer of another run, which is used instead.
    Raises UserError.
    """
    if spec is not None:
        return from_spec(spec)
    if config.name in TOKENIZERS:
        vocab_size = config.vocab_size
        if has_several_documents and vocab_size is not None:
            vocab_size -= 1  # for the end-of-text token
        pattern, tokens = TOKENIZERS[config.name](texts, vocab_size)
        special = {END_OF_TEXT: len(tokens)} if has_several_documents else {}
        return Tokenizer(config.name, pattern, tokens, special)
    if config.name not in OPENAI_SIZES:
        raise unknown_value("tokenizer.name", config.name, [*TOKENIZERS, *OPENAI_SIZES])
    try:
        return from_spec(to_spec(tiktoken.get_encoding(config.name)))
    except Exception as error:  # network and cache raise exceptions of many types
        raise UserError(
            f"tokenizer={config.name} cannot be downloaded ({type(error).__name__}); set "
            "tokenizer=bpe, or TIKTOKEN_CACHE_DIR to a folder that tiktoken has filled on another "
            "machine"
        ) from error


def to_spec(tokenizer: tiktoken.Encoding) -> dict:
    """Convert a tokenizer to plain data.

    name: of the tokenizer, not of the run.
    pattern: regular expression that splits text into pieces, which tokens never cross.
    tokens: base64, in the order of their ids.
    special: ids of special tokens.
    start: the token before a document, which data/prepare.py adds if there is no end-of-text token.
    """
    ranks = tokenizer._mergeable_ranks
    return {
        "name": tokenizer.name,
        "pattern": tokenizer._pat_str,
        "tokens": [base64.b64encode(token).decode() for token in sorted(ranks, key=ranks.get)],
        "special": dict(tokenizer._special_tokens),
    }


def is_same_vocabulary(spec: dict, other: dict) -> bool:
    """Whether two specs convert text to the same ids."""
    may_differ = {"name": None, "start": None}
    return spec | may_differ == other | may_differ


def from_spec(spec: dict) -> Tokenizer:
    """Build the tokenizer that to_spec converted."""
    tokens = [base64.b64decode(token) for token in spec["tokens"]]
    return Tokenizer(spec["name"], spec["pattern"], tokens, spec["special"], spec.get("start"))


def end_of_text(tokenizer: tiktoken.Encoding) -> int | None:
    """The id of the end-of-text token. None if the tokenizer has none."""
    return tokenizer._special_tokens.get(END_OF_TEXT)


def find_start_token(spec: dict, ids: np.ndarray) -> int:
    """The token before a document, for a vocabulary without an end-of-text token.

    This is the token that most often ends a line, or the first token of a text without line ends.
    A sample must start from a token that the model has seen: in a text of sentences, one per line,
    ".\\n" is a token, and "\\n" alone never occurs.

    spec: of the tokenizer.
    ids: tokens of the text.
    """
    counts = np.bincount(ids, minlength=len(spec["tokens"]))
    for line_end in (b"\n", b"\r"):
        ends_line = [base64.b64decode(token).endswith(line_end) for token in spec["tokens"]]
        if (counts * ends_line).any():
            return int((counts * ends_line).argmax())
    return int(ids[0])


def encode(tokenizer: tiktoken.Encoding, text: str, where: str = "the text") -> np.ndarray:
    """Token ids of `text`, (n,) uint32. Special tokens in the text are encoded as ordinary text.

    where: name of the text, for UserErrors about characters without a token.
    """
    if tokenizer.name == "char":  # tiktoken panics if a character has no token
        ranks = tokenizer._mergeable_ranks
        unknown = [c for c in sorted(set(text)) if c.encode(errors="surrogatepass") not in ranks]
        if unknown:
            raise UserError(
                f"{where} has characters that are not in the vocabulary: "
                f"{', '.join(map(repr, unknown[:MAX_LISTED_CHARACTERS]))}; remove them, or train a "
                "new model with tokenizer=byte or bpe"
            )
    try:
        if tokenizer.name == "byte":  # 100 times as fast
            return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)
        return tokenizer.encode_to_numpy(text, disallowed_special=())
    # half a character from a terminal with another encoding; a million spaces
    except ValueError as error:
        raise UserError(f"{where} cannot be encoded ({error}); correct the text") from None


def token_strings(tokenizer: tiktoken.Encoding, ids: Sequence[int]) -> list[str]:
    """Each token as a label in one line.

    \\n stands for a newline, and \\xNN for a byte that is not a complete character.
    """
    strings = [token_to_bytes(tokenizer, i).decode(errors="surrogateescape") for i in ids]
    # byte 0xc3 is "\udcc3" in a string
    return [re.sub(r"(?<!\\)\\udc", r"\\x", repr(string)[1:-1]) for string in strings]


def token_to_bytes(tokenizer: tiktoken.Encoding, token: int) -> bytes:
    """The bytes of a token. Empty for an unused id, of which cl100k_base has a few."""
    try:
        return tokenizer.decode_single_token_bytes(token)
    except KeyError:
        return b""


def token_bytes(tokenizer: tiktoken.Encoding) -> np.ndarray:
    """Number of text bytes of each token, (V,) int64. 0 for special tokens."""
    lengths = np.zeros(tokenizer.n_vocab, dtype=np.int64)
    for token, rank in tokenizer._mergeable_ranks.items():
        lengths[rank] = len(token)
    return lengths
