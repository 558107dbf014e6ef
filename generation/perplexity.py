"""Loss, perplexity and bits per byte of texts.

Long texts are scored in windows of block_size tokens. Each document is scored after the token with
which samples begin (Tokenizer.start_token), so that all of its tokens count.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
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

# token ids, and the number of targets, which are the last ones
Text = tuple[Sequence[int] | np.ndarray, int]


class Window(NamedTuple):
    """Tokens of text number `index`. The last `num_targets` of them are scored."""

    index: int
    tokens: np.ndarray
    num_targets: int


@dataclass
class Score:
    """Sums over the targets of a text."""

    tokens: int = 0
    bytes: int = 0
    nats: float = 0.0  # cross entropy


def cut_into_windows(index: int, text: Text, block_size: int) -> Iterator[Window]:
    """Yield windows of up to block_size + 1 tokens that score each target of a text once.

    The last window may overlap the one before.
    """
    tokens = np.asarray(text[0], np.int64)
    last = len(tokens) - 1
    for start in range(0, last, block_size):
        end = min(start + block_size, last)
        num_new = min(end - start, text[1] - (last - end))
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


def score_texts(
    model: GPT,
    tokenizer: Tokenizer,
    texts: Iterable[Text],
    batch_size: int,
    total_bytes: int | None = None,
) -> tuple[list[Score], Score]:
    """Score texts, and return the score of each, and their sum.

    total_bytes: approximate size of all targets, for the progress bar.
    """
    scores: list[Score] = []
    total = Score()
    bytes_of_token = token_bytes(tokenizer)

    def iter_windows() -> Iterator[Window]:
        for index, text in enumerate(texts):
            scores.append(Score())
            yield from cut_into_windows(index, text, model.config.block_size)

    with ProgressBar(total_bytes, stderr=True) as bar:
        for window, nats in score_windows(model, iter_windows(), batch_size):
            num_bytes = int(bytes_of_token[window.tokens[-window.num_targets :]].sum())
            for score in (scores[window.index], total):
                score.tokens += window.num_targets
                score.bytes += num_bytes
                score.nats += nats
            bar.show(total.bytes, f"{total.bytes:,} bytes of {pluralize(len(scores), 'text')}")
    return scores, total


def score_documents(
    model: GPT,
    tokenizer: Tokenizer,
    documents: Iterable[list[Piece]],
    batch_size: int,
    total_bytes: int | None = None,
) -> list[dict[str, Any]]:
    """Score documents. Returns a row of figures for each document, and one for all.

    documents: the pieces of each document. Prompts are inputs, and not scored.
    total_bytes: see score_texts.
    Raises UserError if a character has no token.
    """
    beginnings: list[str] = []

    def iter_texts() -> Iterator[Text]:
        for number, document in enumerate(documents, start=1):
            beginning = "".join(piece.text[:80] for piece in document)
            label = " ".join(beginning.split())
            if len(label) > BEGINNING_CHARS:
                label = label[: BEGINNING_CHARS - 1] + "…"
            beginnings.append(label)
            parts = [np.array([tokenizer.start_token])]
            num_targets = 0
            for piece in document:
                parts.append(encode(tokenizer, piece.text, f"document {number}"))
                if not piece.is_prompt:
                    num_targets += len(parts[-1])
            yield np.concatenate(parts), num_targets

    scores, total = score_texts(model, tokenizer, iter_texts(), batch_size, total_bytes)
    rows = []
    for number, (beginning, score) in enumerate(zip(beginnings, scores, strict=True), start=1):
        rows.append(make_row(number, beginning, score))
    return [*rows, make_row("all", "", total)]


def make_row(document: int | str, beginning: str, score: Score) -> dict[str, Any]:
    """A row of the table. The loss is in nats per token."""
    row = {
        "document": document,
        "beginning": beginning,
        "tokens": score.tokens,
        "bytes": score.bytes,
        "loss": None,
        "perplexity": None,
        "bits_per_byte": None,
    }
    if score.tokens > 0:
        row["loss"] = score.nats / score.tokens
        row["perplexity"] = exp(min(row["loss"], 700.0))  # exp of more than 709 overflows
        row["bits_per_byte"] = score.nats / log(2) / score.bytes
    return row
