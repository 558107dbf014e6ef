"""Loss, perplexity and bits per byte of documents. Long documents are scored in windows of block_size tokens."""

from collections.abc import Iterator
from itertools import pairwise
from math import exp, log
from typing import Any

import numpy as np
import tiktoken
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from common.console import ProgressBar
from data.readers import Document
from data.tokenizer import encode, end_of_text, token_bytes
from model.gpt import GPT


def split_into_windows(tokens: Tensor, n: int, block_size: int) -> Iterator[tuple[Tensor, int]]:
    """Yield windows of up to block_size + 1 tokens that score each of the last n tokens once. The last may overlap."""
    last = len(tokens) - 1
    for start, end in pairwise([*range(0, last, block_size), last]):
        if end > last - n:
            yield tokens[max(0, end - block_size) : end + 1], end - max(start, last - n)


@torch.no_grad()
def score_texts(model: GPT, texts: list[tuple[Tensor, int]], batch_size: int) -> list[tuple[float, bool]]:
    """For each text: summed cross entropy of its scored tokens in nats, and whether greedy decoding generates them.

    texts: token ids, and the number of tokens at their end that are scored.
    """
    device, nats, is_greedy = model.wte.weight.device, [0.0] * len(texts), [True] * len(texts)
    windows, T = [], model.config.block_size
    for index, text in enumerate(texts):
        windows += [(index, *window) for window in split_into_windows(*text, T)]
    # Windows of similar length need little padding. The longest windows show first whether memory suffices.
    windows.sort(key=lambda window: -len(window[1]))
    with ProgressBar(len(windows), stderr=True) as bar:
        for first in range(0, len(windows), batch_size):
            batch = windows[first : first + batch_size]
            inputs = pad_sequence([tokens[:-1] for _, tokens, _ in batch], batch_first=True)
            hidden = model.backbone(inputs.to(device))  # (B, T, C); padding at the end has no effect
            for (index, tokens, n), x in zip(batch, hidden, strict=True):
                end, targets = len(tokens) - 1, tokens[len(tokens) - n :].to(device)
                logits = model.logits(x[end - n : end]).float()  # (n, V)
                nats[index] += F.cross_entropy(logits, targets, reduction="sum").item()
                is_greedy[index] &= bool((logits.argmax(-1) == targets).all())
            bar.show(first + len(batch), f"{first + len(batch):,} of {len(windows):,} windows")
    return list(zip(nats, is_greedy, strict=True))


def score_documents(
    model: GPT, tokenizer: tiktoken.Encoding, documents: list[Document], batch_size: int
) -> list[dict[str, Any]]:
    """Score documents. Returns a row of figures for each document, and one for all. The loss is in nats per token.

    An end-of-text token precedes each document, if the tokenizer has one. Prompts are inputs, and not scored.
    Raises UserError if a character has no token.
    """
    end, bytes_of_token, texts, rows = end_of_text(tokenizer), token_bytes(tokenizer), [], []
    for number, document in enumerate(documents, start=1):
        prompt, text = (encode(tokenizer, part, f"document {number}") for part in document)
        tokens = np.concatenate(([] if end is None else [end], prompt, text)).astype(np.int64)
        n = min(len(text), max(0, len(tokens) - 1))  # the very first token is not predicted
        texts.append((torch.from_numpy(tokens), n))
        beginning = " ".join("".join(document)[:80].split())
        beginning = beginning if len(beginning) <= 20 else beginning[:19] + "…"
        num_bytes = int(bytes_of_token[tokens[len(tokens) - n :]].sum())
        rows.append({"document": number, "beginning": beginning, "tokens": n, "bytes": num_bytes})
    nats = [score for score, _ in score_texts(model, texts, batch_size)]
    total = {key: sum(row[key] for row in rows) for key in ("tokens", "bytes")}
    rows.append({"document": "all", "beginning": ""} | total)
    for row, score in zip(rows, [*nats, sum(nats)], strict=True):
        row["loss"] = score / row["tokens"] if row["tokens"] else None
        row["perplexity"] = exp(min(row["loss"], 700.0)) if row["tokens"] else None  # exp of more than 709 overflows
        row["bits_per_byte"] = score / log(2) / row["bytes"] if row["bytes"] else None
    return rows
