"""Loss, perplexity and bits per byte of documents, which may be longer than the memory.

Long documents are scored in windows of block_size tokens. Each document is scored after the token
with which samples begin (Tokenizer.start_token), so that all of its tokens count.
"""

from collections.abc import Iterable, Iterator
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


class Window(NamedTuple):
    """Tokens of the text with the number `text`. The last `num_targets` of them are scored."""

    text: int
    tokens: np.ndarray
    num_targets: int


class Score(NamedTuple):
    """Summed cross entropy of scored tokens in nats, and whether greedy decoding generates them."""

    nats: float
    is_greedy: bool


def cut_into_windows(
    text: int, parts: Iterable[tuple[np.ndarray, bool]], block_size: int
) -> Iterator[Window]:
    """Yield windows of up to block_size + 1 tokens that score each target of a text once.

    The last window may overlap the one before.

    text: its number.
    parts: its token ids, and whether these are targets. Parts that are not come first, with at
        least one token.
    """
    tokens = np.empty(0, np.int64)
    first_target = 0  # index in `tokens`
    start = 0  # index in `tokens` of the first token of the next window
    for ids, is_target in parts:
        tokens = np.concatenate([tokens, ids])
        if not is_target:
            first_target += len(ids)
        while len(tokens) > start + block_size:
            end = start + block_size
            num_targets = end - max(start, first_target - 1)
            if num_targets > 0:
                yield Window(text, tokens[start : end + 1], num_targets)
            start = end
        num_read = max(0, start - block_size)  # the last window may need the tokens after these
        tokens = tokens[num_read:]
        start -= num_read
        first_target -= num_read
    end = len(tokens) - 1
    num_targets = end - max(start, first_target - 1)
    if num_targets > 0:
        yield Window(text, tokens[max(0, end - block_size) :], num_targets)


@torch.no_grad()
def score_windows(
    model: GPT, windows: Iterable[Window], batch_size: int
) -> Iterator[tuple[Window, Score]]:
    """Yield windows with their scores.

    Windows of similar length are scored together, which needs little padding.
    """
    device = model.wte.weight.device
    windows = iter(windows)
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
                yield window, Score(nats, bool((logits.argmax(-1) == targets).all()))


def score_texts(model: GPT, texts: list[tuple[list[int], int]], batch_size: int) -> list[Score]:
    """Score texts.

    texts: the token ids of each, and the index of its first target, which is 1 or more.
    """
    windows: list[Window] = []
    for number, (tokens, first_target) in enumerate(texts):
        ids = np.array(tokens, np.int64)
        parts = [(ids[:first_target], False), (ids[first_target:], True)]
        windows += cut_into_windows(number, parts, model.config.block_size)
    scores = [Score(0.0, True)] * len(texts)
    with ProgressBar(len(windows), stderr=True) as bar:
        for done, (window, score) in enumerate(score_windows(model, windows, batch_size), start=1):
            nats, is_greedy = scores[window.text]
            scores[window.text] = Score(nats + score.nats, is_greedy and score.is_greedy)
            bar.show(done, f"{done:,} of {len(windows):,} windows")
    return scores


@dataclass
class DocumentScore:
    """Figures of a document. beginning: of its text, as a label."""

    beginning: str = ""
    tokens: int = 0
    bytes: int = 0
    nats: float = 0.0

    def row(self, document: int | str) -> dict[str, Any]:
        """A row of the table. The loss is in nats per token."""
        label = " ".join(self.beginning.split())
        if len(label) > BEGINNING_CHARS:
            label = label[: BEGINNING_CHARS - 1] + "…"
        loss = self.nats / self.tokens if self.tokens else None
        return {
            "document": document,
            "beginning": label,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "loss": loss,
            "perplexity": None
            if loss is None
            else exp(min(loss, 700.0)),  # exp of more than 709 overflows
            "bits_per_byte": self.nats / log(2) / self.bytes if self.bytes else None,
        }


def score_documents(
    model: GPT,
    tokenizer: Tokenizer,
    documents: Iterable[Iterable[Piece]],
    batch_size: int,
    text_bytes: int | None,
) -> list[dict[str, Any]]:
    """Score documents. Returns a row of figures for each document, and one for all.

    documents: the pieces of each document. Prompts are inputs, and not scored.
    text_bytes: approximate size of all documents, for the progress bar.
    Raises UserError if a character has no token.
    """
    scores: list[DocumentScore] = []
    total = DocumentScore()
    bytes_of_token = token_bytes(tokenizer)
    windows = _iter_windows(documents, scores, tokenizer, model.config.block_size)
    with ProgressBar(text_bytes, stderr=True) as bar:
        for window, score in score_windows(model, windows, batch_size):
            num_bytes = int(bytes_of_token[window.tokens[-window.num_targets :]].sum())
            for sums in (scores[window.text], total):
                sums.tokens += window.num_targets
                sums.bytes += num_bytes
                sums.nats += score.nats
            bar.show(total.bytes, f"{total.bytes:,} bytes of {pluralize(len(scores), 'document')}")
    return [*(score.row(number) for number, score in enumerate(scores, start=1)), total.row("all")]


def _iter_windows(
    documents: Iterable[Iterable[Piece]],
    scores: list[DocumentScore],
    tokenizer: Tokenizer,
    block_size: int,
) -> Iterator[Window]:
    """Yield the windows of all documents, and append a score for each document."""
    for number, document in enumerate(documents):
        score = DocumentScore()
        scores.append(score)
        yield from cut_into_windows(
            number, _encode_document(number, document, score, tokenizer), block_size
        )


def _encode_document(
    number: int, document: Iterable[Piece], score: DocumentScore, tokenizer: Tokenizer
) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield the start token and the tokens of a document, and whether they are targets."""
    yield np.array([tokenizer.start_token]), False
    for piece in document:
        if len(score.beginning) < 80:
            score.beginning += piece.text[:80]
        yield encode(tokenizer, piece.text, f"document {number + 1}"), not piece.is_prompt
