"""Loss, perplexity and bits per byte of documents, which can be longer than block_size.

A text is cut into windows of block_size tokens. Each document is scored after the token from which
samples start (Tokenizer.start_token), so that all of its tokens count.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import exp, log
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from common.console import ProgressBar
from data.readers import Piece
from data.tokenizer import Tokenizer, encode, token_bytes
from model.gpt import GPT

LABEL_CHARS = 20  # of the beginning of a document, in the table


@dataclass
class Text:
    """Token ids of a text (int64). The tokens from `first_target` (1 or more) on are scored."""

    tokens: np.ndarray
    first_target: int
    label: str = ""  # the beginning of a document
    # Set by score_texts:
    nats: float = 0.0  # summed cross entropy of the scored tokens
    is_greedy: bool = True  # whether greedy decoding generates the scored tokens


class Window(NamedTuple):
    """Tokens of a text, at most block_size + 1. The last `num_targets` of them are scored."""

    text: Text
    tokens: np.ndarray
    num_targets: int


def cut_into_windows(text: Text, block_size: int) -> Iterator[Window]:
    """Yield windows that score each target of a text once.

    The last window starts earlier than its targets need, so that they have a full context.
    """
    num_inputs = len(text.tokens) - 1
    for start in range(0, num_inputs, block_size):
        end = min(start + block_size, num_inputs)
        num_targets = end - max(start, text.first_target - 1)
        if num_targets > 0:
            yield Window(text, text.tokens[max(0, end - block_size) : end + 1], num_targets)


@torch.no_grad()
def score_texts(model: GPT, texts: list[Text], batch_size: int) -> None:
    """Score texts, batch_size windows at a time. Sets `nats` and `is_greedy` of each text.

    Windows of similar length are scored together, which needs little padding.
    """
    device = model.wte.weight.device
    windows: list[Window] = []
    for text in texts:
        windows += cut_into_windows(text, model.config.block_size)
    # The longest are first, so that too little memory is noticed early.
    windows.sort(key=lambda window: len(window.tokens), reverse=True)
    with ProgressBar(len(windows), stderr=True) as bar:
        for first in range(0, len(windows), batch_size):
            batch = windows[first : first + batch_size]
            inputs = [torch.from_numpy(window.tokens[:-1]) for window in batch]
            # Padding on the right has no effect on the tokens before it.
            hidden = model.backbone(pad_sequence(inputs, batch_first=True).to(device))  # (B, T, C)
            for (text, tokens, num_targets), x in zip(batch, hidden, strict=True):
                end = len(tokens) - 1
                logits = model.logits(x[end - num_targets : end]).float()  # (targets, V)
                targets = torch.from_numpy(tokens[-num_targets:]).to(device)
                text.nats += F.cross_entropy(logits, targets, reduction="sum").item()
                text.is_greedy &= bool((logits.argmax(-1) == targets).all())
            bar.show(first, f"{first:,} of {len(windows):,} windows")


def score_documents(
    model: GPT, tokenizer: Tokenizer, documents: Iterable[Iterable[Piece]], batch_size: int
) -> list[dict[str, Any]]:
    """Score documents. Returns a row of the table for each document, and a last row for all.

    documents: the pieces of each document. Prompts are read, but not scored.
    Raises UserError if a character has no token.
    """
    texts = []
    for number, pieces in enumerate(documents, start=1):
        texts.append(encode_document(tokenizer, pieces, f"document {number}"))
    score_texts(model, texts, batch_size)
    bytes_of_token = token_bytes(tokenizer)
    rows = []
    for number, text in enumerate(texts, start=1):
        targets = text.tokens[text.first_target :]
        num_bytes = int(bytes_of_token[targets].sum())
        rows.append(make_row(number, text.label, len(targets), num_bytes, text.nats))
    num_tokens = sum(row["tokens"] for row in rows)
    num_bytes = sum(row["bytes"] for row in rows)
    nats = sum(text.nats for text in texts)
    return [*rows, make_row("all", "", num_tokens, num_bytes, nats)]


def encode_document(tokenizer: Tokenizer, pieces: Iterable[Piece], name: str) -> Text:
    """The tokens of a document, after the start token. name: of the document, for UserErrors."""
    ids = [np.array([tokenizer.start_token])]
    first_target = 1
    beginning = ""
    for piece in pieces:
        ids.append(encode(tokenizer, piece.text, name))
        if piece.is_prompt:
            first_target += len(ids[-1])
        beginning += piece.text[: 4 * LABEL_CHARS]  # enough, also with much white space
    label = " ".join(beginning.split())
    if len(label) > LABEL_CHARS:
        label = label[: LABEL_CHARS - 1] + "…"
    return Text(np.concatenate(ids), first_target, label)


def make_row(
    document: int | str, beginning: str, num_tokens: int, num_bytes: int, nats: float
) -> dict[str, Any]:
    """A row of the table. The loss is in nats per token; None if no token was scored."""
    row = {"document": document, "beginning": beginning, "tokens": num_tokens, "bytes": num_bytes}
    if num_tokens == 0:
        return row | {"loss": None, "perplexity": None, "bits_per_byte": None}
    loss = nats / num_tokens
    return row | {"loss": loss, "perplexity": exp(loss), "bits_per_byte": nats / log(2) / num_bytes}
