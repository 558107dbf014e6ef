"""tokenizer.json, the format of Hugging Face's `tokenizers`: converted from and to the spec of data/tokenizer.py.

    char        WordLevel: a table of characters
    byte        BPE without merges
    all others  byte-level BPE. tiktoken merges any two neighbours whose concatenation is a token, lowest id first. The
                merges are therefore all splits of each token into two tokens, in the order of the token ids.

Special tokens are also in the vocabulary: `tokenizers` gives ids in sequence to special tokens that it does not know.
"""

import base64
from typing import Any

from common.errors import UserError
from data.tokenizer import BPE_PATTERN, CHARACTER_PATTERN

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
GPT2_STEP = BYTE_LEVEL | {"use_regex": True}  # also splits by GPT2_PATTERN
# Byte-level BPE writes each byte as a printable character, and unprintable bytes as the characters from U+0100.
UNPRINTABLE = [*range(33), *range(127, 161), 173]
TO_PRINTABLE = {byte: 256 + i for i, byte in enumerate(UNPRINTABLE)}
FROM_PRINTABLE = {character: byte for byte, character in TO_PRINTABLE.items()}


def to_printable(token: bytes) -> str:
    """A token as byte-level BPE writes it: a space becomes Ġ."""
    return token.decode("latin-1").translate(TO_PRINTABLE)


def list_merges(tokens: list[bytes]) -> list[list[str]]:
    """All pairs of tokens whose concatenation is a token, in the order of its id."""
    ranks, merges = {token: rank for rank, token in enumerate(tokens)}, []
    for token in tokens:
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return [[to_printable(left), to_printable(right)] for left, right in merges]


def to_onig(pattern: str) -> str:
    """A pattern of tiktoken for `tokenizers`, where {1,2}+ repeats. In these patterns, {1,2} matches the same."""
    return pattern.replace("}+", "}").replace(CHARACTER_PATTERN, r"[\s\S]")


def list_steps(regex: str, is_char: bool) -> list[dict[str, Any]]:
    """The pre-tokenizers: split a text by the regex, then write bytes as printable characters."""
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return [split] if is_char else [split, BYTE_LEVEL]


def to_tokenizer_json(spec: dict) -> dict[str, Any]:
    """The content of tokenizer.json for the spec of a tokenizer."""
    tokens, is_char = [base64.b64decode(token) for token in spec["tokens"]], spec["name"] == "char"
    vocab = {
        token.decode() if is_char else to_printable(token): rank
        for rank, token in enumerate(tokens)
    }
    model: dict[str, Any] = {"type": "WordLevel", "vocab": vocab | spec["special"], "unk_token": ""}
    if not is_char:
        merges = [] if spec["name"] == "byte" else list_merges(tokens)
        # ignore_merges: like tiktoken, look up complete pieces first
        model = {
            "type": "BPE",
            "vocab": vocab | spec["special"],
            "merges": merges,
            "ignore_merges": True,
        }
    flags = {
        "special": True,
        "normalized": False,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
    }
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": content, **flags} for content, i in spec["special"].items()
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": list_steps(to_onig(spec["pattern"]), is_char),
        },
        "post_processor": None,
        "decoder": {"type": "Fuse"} if is_char else GPT2_STEP,
        "model": model,
    }


def from_tokenizer_json(content: dict[str, Any], path: str) -> dict:
    """Convert a tokenizer.json to a tokenizer spec. Raises UserError for unsupported tokenizers. path: for messages."""
    only = "but only byte-level BPE with one pattern can be imported; set another folder"
    try:
        model, normalizer = content["model"], content["normalizer"]
        special = {token["content"]: token["id"] for token in content["added_tokens"]}
        is_char = model["type"] == "WordLevel"
        ids = {token: i for token, i in model["vocab"].items() if token not in special}
        strings = sorted(ids, key=ids.__getitem__)
        tokens = [
            t.encode() if is_char else t.translate(FROM_PRINTABLE).encode("latin-1")
            for t in strings
        ]
        merges = [
            merge.split(" ") if isinstance(merge, str) else merge
            for merge in model.get("merges", [])
        ]
        merged_ids = [ids[left + right] for left, right in merges]
        has_low_special = any(i < len(ids) for i in special.values())
        steps = content["pre_tokenizer"].get("pretokenizers", [content["pre_tokenizer"]])
        if GPT2_STEP | steps[0] == GPT2_STEP:
            steps = list_steps(to_onig(GPT2_PATTERN), is_char) + steps[1:]
        regex = steps[0]["pattern"]["Regex"]
        post_processor = content["post_processor"] or BYTE_LEVEL
        post_processors = post_processor.get("processors", [post_processor])
        adds_tokens = any(
            step["type"] != "ByteLevel" and step.get("special_tokens") != {}
            for step in post_processors
        )
    except (KeyError, TypeError, ValueError, AttributeError):  # other tokenizers have other keys
        raise UserError(f"{path} has another kind of tokenizer, {only}") from None
    if normalizer is not None:
        raise UserError(f"{path} has a normalizer, which changes the text, {only}")
    if adds_tokens:
        raise UserError(f"{path} has a post_processor that adds tokens to each text, {only}")
    if not regex or steps != list_steps(regex, is_char):  # an empty regex would match everywhere
        raise UserError(f"{path} has a pre_tokenizer with other steps, {only}")
    if merged_ids != sorted(merged_ids):  # tiktoken merges the lowest id first
        raise UserError(f"{path} has merges in another order than the token ids, {only}")
    if has_low_special or [ids[token] for token in strings] != list(range(len(ids))):
        raise UserError(f"{path} has token ids with gaps, or special tokens before others, {only}")
    all_bytes = [bytes([byte]) for byte in range(256)]
    if not is_char and not set(all_bytes) <= set(tokens):
        raise UserError(f"{path} has no token for some bytes, {only}")
    known = {
        to_onig(pattern): pattern for pattern in (CHARACTER_PATTERN, BPE_PATTERN, GPT2_PATTERN)
    }
    pattern = known.get(regex, regex)
    name = (
        "char"
        if is_char
        else "byte"
        if tokens == all_bytes and pattern == CHARACTER_PATTERN
        else "bpe"
    )
    encoded = [base64.b64encode(token).decode() for token in tokens]
    return {"name": name, "pattern": pattern, "tokens": encoded, "special": special}
