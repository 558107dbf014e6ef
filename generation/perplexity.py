"""Loss, perplexity and bits per byte of documents.

Long documents are scored in windows of block_size tokens. Each document is scored after the token
with which samples begin (Tokenizer.start_token), so that all of its tokens count.
"""

from collections.abc import Iterable, Iterator
from itertools import islice
from math import exp, log
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from common.console import ProgressBar, pluralize
from data.readers import Piece
from data.tokenizer import Tokenizer, encode, token_bytes
from model.gpt import GPT

SORTED_BATCHES = 64  # the windows of this number of batches are in memory, sorted by length
BEGINNING_CHARS = 20  # of a document, in the table


class Window(NamedTuple):
    """Tokens of document number `index`. The last `num_targets` of them are scored."""

    index: int
    tokens: np.ndarray
    num_targets: int


def cut_into_windows(
    index: int, tokens: np.ndarray, num_targets: int, block_size: int
) -> Iterator[Window]:
    """Yield windows of up to block_size + 1 tokens that score each target of a document once.

    num_targets: number of targets, which are the last tokens.
    The last window may overlap the one before.
    """
    last = len(tokens) - 1
    first = last - num_targets  # the targets follow this token
    for start in range(0, last, block_size):
        end = min(start + block_size, last)
        num_new = end - max(start, first)
        if num_new > 0:
            yield Window(index, tokens[max(0, end - block_size) : end + 1], num_new)


@torch.no_grad()
def score_windows(
    model: GPT, windows: Iterator[Window], batch_size: int
) -> Iterator[tuple[Window, float]]:
    """Yield each window, and the sum of the cross entropy over its targets, in nats.

    Windows of similar length are scored together, which needs little padding.
    """
    device = model.wte.weight.device
    while pool := list(islice(windows, SORTED_BATCHES * batch_size)):
        # the longest first, because they show whether memory suffices
        pool.sort(key=lambda window: -len(window.tokens))
        for first in range(0, len(pool), batch_size):
            batch = pool[first : first + batch_size]
            inputs = pad_sequence(
                [torch.from_numpy(window.tokens[:-1]) for window in batch], batch_first=True
            )
            # padding at the end has no effect
            hidden = model.backbone(inputs.to(device))  # (B, T, C)
            for window, x in zip(batch, hidden, strict=True):
                end = len(window.tokens) - 1
                targets = torch.from_numpy(window.tokens[-window.num_targets :]).to(device)
                logits = model.logits(x[end - window.num_targets : end]).float()  # (targets, V)
                nats = F.cross_entropy(logits, targets, reduction="sum").item()
                yield window, nats


def score_documents(
    model: GPT,
    tokenizer: Tokenizer,
    documents: Iterable[list[Piece]],
    batch_size: int,
    total_bytes: int | None = None,
) -> list[dict[str, Any]]:
    """Score documents. Returns a row of figures for each document, and one for all.

    documents: the pieces of each document. Prompts are inputs, and not scored.
    total_bytes: approximate size of all targets, for the progress bar.
    Raises UserError if a character has no token.
    """
    rows: list[dict[str, Any]] = []
    total = make_row("all", "")
    bytes_of_token = token_bytes(tokenizer)

    def iter_windows() -> Iterator[Window]:
        for index, document in enumerate(documents):
            tokens, num_targets = encode_document(tokenizer, document, f"document {index + 1}")
            rows.append(make_row(index + 1, find_beginning(document)))
            yield from cut_into_windows(index, tokens, num_targets, model.config.block_size)

    with ProgressBar(total_bytes, stderr=True) as bar:
        for window, nats in score_windows(model, iter_windows(), batch_size):
            num_bytes = int(bytes_of_token[window.tokens[-window.num_targets :]].sum())
            for row in (rows[window.index], total):
                row["tokens"] += window.num_targets
                row["bytes"] += num_bytes
                row["nats"] += nats
            bar.show(
                total["bytes"],
                f"{total['bytes']:,} bytes of {pluralize(len(rows), 'document')}",
            )
    rows.append(total)
    for row in rows:
        add_means(row)
    return rows


def encode_document(
    tokenizer: Tokenizer, document: list[Piece], name: str
) -> tuple[np.ndarray, int]:
    """The start token and the tokens of a document, int64, and the number of its targets."""
    parts = [np.array([tokenizer.start_token])]
    num_targets = 0
    for piece in document:
        parts.append(encode(tokenizer, piece.text, name))
        if not piece.is_prompt:
            num_targets += len(parts[-1])
    return np.concatenate(parts), num_targets


def find_beginning(document: list[Piece]) -> str:
    """The first BEGINNING_CHARS characters of a document, in one line."""
    text = "".join(piece.text[:80] for piece in document)
    line = " ".join(text.split())
    if len(line) > BEGINNING_CHARS:
        return line[: BEGINNING_CHARS - 1] + "…"
    return line


def make_row(document: int | str, beginning: str) -> dict[str, Any]:
    """A row of the table, before its targets are scored. nats: sum of their cross entropy."""
    return {"document": document, "beginning": beginning, "tokens": 0, "bytes": 0, "nats": 0.0}


def add_means(row: dict[str, Any]) -> None:
    """Replace the sum by the loss in nats per token, perplexity and bits per byte."""
    nats = row.pop("nats")
    row |= {"loss": None, "perplexity": None, "bits_per_byte": None}
    if row["tokens"] > 0:
        row["loss"] = nats / row["tokens"]
        row["perplexity"] = exp(min(row["loss"], 700.0))  # exp of more than 709 overflows
        row["bits_per_byte"] = nats / log(2) / row["bytes"]
