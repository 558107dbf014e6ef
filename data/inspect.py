"""Readable summary of prepared data: sizes, and a few samples of tokenized text (prepare.py inspect=true)."""

import numpy as np

from common.console import format_si, pluralize
from data.shards import PreparedData
from data.tokenizer import end_of_text, token_strings

SAMPLE_TOKENS = 24  # tokens per sample
NUM_SAMPLES = 3


def summary_line(prepared: PreparedData) -> str:
    """One line: folder, tokens, vocabulary and documents."""
    meta = prepared.meta
    return (
        f"{prepared.folder}: {meta['tokens']['train']:,} tokens to train on and {meta['tokens']['val']:,} to validate, "
        f"{meta['tokenizer']['name']} vocabulary of {meta['vocab_size']:,}, "
        f"{pluralize(meta['source']['documents'], 'document')}"
    )


def inspect(prepared: PreparedData) -> str:
    """Sizes of the vocabulary, the splits and the sources of a mix, and samples of tokenized text."""
    meta, tokenizer = prepared.meta, prepared.tokenizer
    bytes_per_token = sum(meta["bytes"].values()) / sum(meta["tokens"].values())
    lines = [
        f"folder      {prepared.folder}",
        f"vocabulary  {meta['tokenizer']['name']} of {meta['vocab_size']:,}, {bytes_per_token:.2f} bytes per token",
        f"documents   {meta['source']['documents']:,}",
    ]
    for split in ("train", "val"):
        files = sum(name.startswith(split) for name in meta["files"])
        lines.append(
            f"{split:<11} {meta['tokens'][split]:,} tokens, {format_si(meta['bytes'][split], 'B')} of text, "
            f"{pluralize(meta['documents'][split], 'document')}, {pluralize(files, 'file')}"
        )
    if len(meta["mix"]) > 1:
        for source, weight in zip(meta["mix"], prepared.weights, strict=True):
            share = weight / sum(prepared.weights)
            lines.append(f"  {source['name']:<9} {source['train']:,} training tokens, {share:.1%} of the windows")
    tokens, end = prepared.tokens("train"), end_of_text(tokenizer)
    for start in np.linspace(0, max(0, len(tokens) - SAMPLE_TOKENS), NUM_SAMPLES).astype(int).tolist():
        ids = [max(i, ~i) for i in tokens[start : start + SAMPLE_TOKENS].tolist()]  # ~id: see data/shards.py
        strings = zip(ids, token_strings(tokenizer, ids), strict=True)
        sample = "│".join(_escape(tokenizer.decode([i]) if i == end else string) for i, string in strings)
        lines += ["", f"tokens from {start:,}", f"  {sample}", f"  {' '.join(map(str, ids))}"]
    return "\n".join(lines)


def _escape(text: str) -> str:
    """Write control characters as Python escapes, so that a sample stays on one line."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
