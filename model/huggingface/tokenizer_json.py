"""tokenizer.json, the tokenizer format of Hugging Face's `tokenizers`: converted from and to a tokenizer spec.

The spec is that of data/tokenizer.py. The three kinds of tokenizers become:

    char        WordLevel: a table of characters
    byte        BPE without merges
    all others  byte-level BPE. tiktoken merges any two neighbours whose concatenation is a token, lowest id first. The
                merges are therefore all splits of each token into two tokens, in the order of the token ids.

Special tokens are also in the vocabulary: `tokenizers` gives ids in sequence to special tokens that it does not know.
"""

import base64
from typing import Any

from common.errors import UserError
from data.tokenizer import BPE_PATTERN, CHARACTER_PATTERN, from_spec

GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"


def _bytes_to_unicode() -> dict[int, str]:
    """GPT-2's printable character for each byte: itself, or for the others the characters from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


CHARACTER_OF_BYTE = _bytes_to_unicode()
BYTE_OF_CHARACTER = {character: byte for byte, character in CHARACTER_OF_BYTE.items()}


def to_printable(token: bytes) -> str:
    """A token as byte-level BPE writes it: a space becomes Ġ."""
    return "".join(CHARACTER_OF_BYTE[byte] for byte in token)


def list_merges(tokens: list[bytes]) -> list[tuple[bytes, bytes]]:
    """All pairs of tokens whose concatenation is a token, in the order of its id."""
    ranks = {token: rank for rank, token in enumerate(tokens)}
    merges = []
    for token in tokens:
        pairs = [(token[:i], token[i:]) for i in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        merges += sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return merges


def to_tokenizer_json(spec: dict) -> dict:
    """The content of tokenizer.json for the spec of a tokenizer."""
    tokens = [base64.b64decode(token) for token in spec["tokens"]]
    if spec["name"] == "char":
        vocab = {token.decode(): rank for rank, token in enumerate(tokens)}
        model: dict[str, Any] = {"type": "WordLevel", "vocab": vocab | spec["special"], "unk_token": ""}
        splitter, decoder = [], {"type": "Fuse"}
    else:
        merges = [] if spec["name"] == "byte" else list_merges(tokens)
        vocab = {to_printable(token): rank for rank, token in enumerate(tokens)}
        model = {
            "type": "BPE", "vocab": vocab | spec["special"], "dropout": None, "unk_token": None,
            "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
            "ignore_merges": True,  # like tiktoken, look up complete pieces first
            "merges": [[to_printable(left), to_printable(right)] for left, right in merges],
        }  # fmt: skip
        splitter = [{"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]
        decoder = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    split = {"type": "Split", "pattern": {"Regex": to_onig(spec["pattern"])}, "behavior": "Isolated", "invert": False}
    special = [
        {"id": i, "content": content, "special": True, "normalized": False, "single_word": False, "lstrip": False,
         "rstrip": False}
        for content, i in spec["special"].items()
    ]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, *splitter]}, "post_processor": None,
        "decoder": decoder, "model": model,
    }  # fmt: skip


def to_onig(pattern: str) -> str:
    """A pattern of tiktoken in the syntax of `tokenizers`, which uses the regex library Oniguruma.

    There, {1,2}+ is a repetition of {1,2}, and not possessive. Where these patterns use it, greedy means the same.
    (?s). is [\\s\\S].
    """
    return pattern.replace("}+", "}").replace(CHARACTER_PATTERN, r"[\s\S]")


def from_tokenizer_json(content: dict, path: str) -> dict:
    """The spec of the tokenizer in a tokenizer.json. path: of the file, for messages.

    Raises UserError if it is neither a byte-level BPE tokenizer nor one that export.py writes.
    """
    try:
        model, special = content["model"], {token["content"]: token["id"] for token in content["added_tokens"]}
        ids = {token: i for token, i in model["vocab"].items() if token not in special}
        is_char, strings = model["type"] == "WordLevel", sorted(ids, key=ids.__getitem__)
        tokens = [token.encode() if is_char else bytes(BYTE_OF_CHARACTER[c] for c in token) for token in strings]
        all_bytes = [bytes([byte]) for byte in range(256)]
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges", [])]
        merged_ids = [ids[left + right] for left, right in merges]
        is_supported = (
            content["normalizer"] is None
            and (content.get("post_processor") or {"type": "ByteLevel"})["type"] == "ByteLevel"  # others add tokens
            and all(type(i) is int for i in special.values())
            and len(tokens) > 0
            and merged_ids == sorted(merged_ids)  # tiktoken merges the lowest id first
            and [ids[token] for token in strings] == list(range(len(ids)))
            and (is_char or set(all_bytes) <= set(tokens))
        )
        pattern = _read_pattern(content["pre_tokenizer"])
        name = "char" if is_char else "byte" if tokens == all_bytes and pattern == CHARACTER_PATTERN else "bpe"
        encoded = [base64.b64encode(token).decode() for token in tokens]
        spec = {"name": name, "pattern": pattern, "tokens": encoded, "special": special}
        from_spec(spec)
    except (KeyError, TypeError, ValueError, AttributeError):  # other kinds of tokenizers have other keys
        is_supported = False
    if not is_supported:
        raise UserError(
            f"{path} is not a byte-level BPE tokenizer that tiktoken can reproduce, which has no normalizer, adds no "
            "tokens to a text, has one pattern, and has ids in the order of its merges; set another folder"
        )
    return spec


def _read_pattern(pre_tokenizer: dict) -> str:
    """The pattern that splits text before BPE. Raises KeyError or ValueError if there is none, or more than one."""
    if pre_tokenizer["type"] == "ByteLevel" and pre_tokenizer.get("use_regex", True):
        steps, split = [pre_tokenizer], GPT2_PATTERN
    else:
        split_step, *steps = pre_tokenizer["pretokenizers"]
        split = split_step["pattern"]["Regex"]
        if split_step["behavior"] != "Isolated" or split_step["invert"] or any(step["use_regex"] for step in steps):
            raise ValueError
    if any(step["type"] != "ByteLevel" or step["add_prefix_space"] for step in steps):
        raise ValueError
    known = {to_onig(pattern): pattern for pattern in (CHARACTER_PATTERN, BPE_PATTERN, GPT2_PATTERN)}
    return known.get(split, split)
