"""What prepared data looks like, for a person: python prepare.py inspect=true."""

import numpy as np

from common.console import format_bytes
from data import tokenizer
from data.prepared import Prepared

SHOWN = 24  # tokens of each sample


def headline(prepared: Prepared) -> str:
    """One line: where it is, and how much."""
    meta = prepared.meta
    return (
        f"{prepared.folder}: {meta['tokens']['train']:,} tokens to train on and {meta['tokens']['val']:,} to validate, "
        f"{meta['tokenizer']['name']} vocabulary of {meta['vocab_size']:,}, "
        f"{_counted(meta['source']['documents'], 'document')}"
    )


def inspect(prepared: Prepared) -> str:
    """Sizes of the vocabulary, of the splits and of the longest document, and how a few pieces of text are encoded."""
    meta, encoding = prepared.meta, prepared.encoding
    per_token = sum(meta["bytes"].values()) / sum(meta["tokens"].values())
    lines = [
        f"folder      {prepared.folder}",
        f"vocabulary  {meta['tokenizer']['name']} of {meta['vocab_size']:,}, {per_token:.2f} bytes a token",
        f"documents   {meta['source']['documents']:,}, the longest of {meta['longest']:,} tokens",
    ]
    for split in ("train", "val"):
        files = sum(name.startswith(split) for name in meta["files"])
        lines.append(
            f"{split:<11} {meta['tokens'][split]:,} tokens, {format_bytes(meta['bytes'][split])} of text, "
            f"{_counted(meta['documents'][split], 'document')}, {_counted(files, 'file')}"
        )
    if len(meta["parts"]) > 1:
        for part, weight in zip(meta["parts"], prepared.weights, strict=True):
            share = weight / sum(prepared.weights)
            lines.append(f"  {part['name']:<9} {part['train'][1]:,} tokens to train on, {share:.1%} of the windows")
    tokens = prepared.tokens("train")
    for at in np.linspace(0, max(0, len(tokens) - SHOWN), 3).astype(int).tolist():
        ids = tokens[at : at + SHOWN].tolist()
        words = [encoding.decode([i]) if i == tokenizer.end_of_text(encoding) else word
                 for i, word in zip(ids, tokenizer.token_strings(encoding, ids), strict=True)]  # fmt: skip
        shown = "│".join(_visible(word) for word in words)
        lines += ["", f"tokens from {at:,} on", f"  {shown}", f"  {' '.join(map(str, ids))}"]
    return "\n".join(lines)


def _visible(text: str) -> str:
    """Control characters as they are written in Python, so that a line stays a line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'s' * (count != 1)}"
