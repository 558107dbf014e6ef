"""tokenizer.json, the format of Hugging Face's `tokenizers`.

It is converted from and to the spec of data/tokenizer.py. All tokenizers are byte-level BPE there.
tiktoken merges any two neighbours whose concatenation is a token, lowest id first. The merges are
therefore all splits of each token into two tokens, in the order of the token ids. The tokenizers
`char` and `byte` have no merges: each piece of a text is a token.

Special tokens are also in the vocabulary, because `tokenizers` gives ids in sequence to special
tokens that it does not know.
"""

import base64
import json
from typing import Any

from common.errors import UserError
from data.tokenizer import BPE_PATTERN, CHARACTER_PATTERN

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
# Writes bytes as printable characters.
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
# Splits a text by GPT2_PATTERN, then writes bytes as printable characters.
GPT2_STEP = BYTE_LEVEL | {"use_regex": True}
# Byte-level BPE writes unprintable bytes as the characters from U+0100.
UNPRINTABLE = [*range(33), *range(127, 161), 173]
TO_PRINTABLE = {byte: 256 + i for i, byte in enumerate(UNPRINTABLE)}
FROM_PRINTABLE = {character: byte for byte, character in TO_PRINTABLE.items()}
ALL_BYTES = [bytes([byte]) for byte in range(256)]


def to_printable(token: bytes) -> str:
    """A token as byte-level BPE writes it: a space becomes Ġ."""
    return token.decode("latin-1").translate(TO_PRINTABLE)


def list_merges(tokens: list[bytes]) -> list[list[str]]:
    """All pairs of tokens whose concatenation is a token, in the order of its id."""
    known = set(tokens)
    merges = []
    for token in tokens:
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        merges += [pair for pair in pairs if known.issuperset(pair)]
    return [[to_printable(left), to_printable(right)] for left, right in merges]


def to_onig(pattern: str) -> str:
    """A pattern of tiktoken for the regex library of `tokenizers`, in which {1,2}+ repeats.

    In the patterns of data/tokenizer.py, {1,2} matches the same.
    """
    return pattern.replace("}+", "}").replace(CHARACTER_PATTERN, r"[\s\S]")


def list_steps(regex: str) -> list[dict[str, Any]]:
    """The pre-tokenizers: split a text by the regex, then write bytes as printable characters."""
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return [split, BYTE_LEVEL]


def to_tokenizer_json(spec: dict) -> dict[str, Any]:
    """The content of tokenizer.json for the spec of a tokenizer."""
    tokens = [base64.b64decode(token) for token in spec["tokens"]]
    vocab = {to_printable(token): rank for rank, token in enumerate(tokens)}
    return {
        "version": "1.0",
        "added_tokens": [
            {
                "id": rank,
                "content": content,
                "special": True,
                "normalized": False,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
            }
            for content, rank in spec["special"].items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": list_steps(to_onig(spec["pattern"])),
        },
        "post_processor": None,
        "decoder": GPT2_STEP,
        "model": {
            "type": "BPE",
            "vocab": vocab | spec["special"],
            "merges": list_merges(tokens),
            "ignore_merges": True,  # like tiktoken, look up complete pieces first
            "unk_token": "",  # a character that `char` does not know is an error, and not skipped
        },
    }


def from_tokenizer_json(content: dict[str, Any], path: str) -> dict:
    """Convert a tokenizer.json to the spec of a tokenizer.

    path: of the file, for messages.
    Raises UserError for tokenizers that tiktoken cannot replace. A damaged file can raise anything.
    """
    only = "but only byte-level BPE with one pattern can be imported; set another folder"
    model = content["model"]
    adds_tokens = "SpecialToken" in json.dumps(content["post_processor"])
    if model["type"] != "BPE" or content["normalizer"] is not None or adds_tokens:
        raise UserError(
            f"{path} has another model than BPE, a normalizer, or a post_processor that adds "
            f"tokens, {only}"
        )

    pre_tokenizer = content["pre_tokenizer"]
    steps = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    regex = steps[0].get("pattern", {}).get("Regex")
    if GPT2_STEP | pre_tokenizer == GPT2_STEP:
        regex = to_onig(GPT2_PATTERN)
    elif not regex or steps != list_steps(regex):  # an empty regex would match everywhere
        raise UserError(f"{path} has a pre_tokenizer with other steps, {only}")
    patterns = {to_onig(known): known for known in (CHARACTER_PATTERN, BPE_PATTERN, GPT2_PATTERN)}
    pattern = patterns.get(regex, regex)

    if not all(token["special"] for token in content["added_tokens"]):
        raise UserError(f"{path} has added tokens that are not special, {only}")
    special = {token["content"]: token["id"] for token in content["added_tokens"]}
    ids = {token: rank for token, rank in model["vocab"].items() if token not in special}
    # A merge is ["a", "b"], or "a b" in older files.
    merged_ids = [ids["".join(merge).replace(" ", "")] for merge in model["merges"]]
    if merged_ids != sorted(merged_ids):  # tiktoken merges the lowest id first
        raise UserError(f"{path} has merges in another order than the token ids, {only}")
    if sorted(ids.values()) != list(range(len(ids))):
        raise UserError(f"{path} has token ids with gaps, or special tokens before others, {only}")
    by_id = sorted(ids, key=ids.__getitem__)
    tokens = [token.translate(FROM_PRINTABLE).encode("latin-1") for token in by_id]
    name = "bpe"
    if pattern == CHARACTER_PATTERN:
        name = "byte" if tokens == ALL_BYTES else "char"
    elif not set(ALL_BYTES) <= set(tokens):
        raise UserError(f"{path} has no token for some bytes, {only}")
    return {
        "name": name,
        "pattern": pattern,
        "tokens": [base64.b64encode(token).decode() for token in tokens],
        "special": special,
    }
