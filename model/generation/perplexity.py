"""Loss, perplexity and bits per byte of documents under a trained model."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import exp, log

import tiktoken
import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor

from common.console import make_table
from data.loader import IGNORE_INDEX
from data.readers import Document
from data.tokenizer import encode, end_of_text
from model.gpt import GPT

LOGITS_PER_FORWARD = 2**25  # 128 MiB in float32
MAX_TABLE_ROWS = 20
MAX_EXPONENT = 700.0  # exp of more than 709 overflows


@dataclass(frozen=True)
class TextLoss:
    """Cross entropy in nats, summed over `tokens` predicted tokens. bytes: UTF-8 length of these tokens."""

    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0

    def __add__(self, other: "TextLoss") -> "TextLoss":
        return TextLoss(self.nats + other.nats, self.tokens + other.tokens, self.bytes + other.bytes)

    def metrics(self) -> dict[str, float | int | None]:
        """loss in nats per token, perplexity, and bits per byte; None if no token was predicted."""
        loss = self.nats / self.tokens if self.tokens else None
        return {
            "tokens": self.tokens,
            "bytes": self.bytes,
            "loss": loss,
            "perplexity": None if loss is None else exp(min(loss, MAX_EXPONENT)),
            "bits_per_byte": self.nats / log(2) / self.bytes if self.bytes else None,
        }


def encode_document(tokenizer: tiktoken.Encoding, document: Document, name: str) -> Tensor:
    """Token ids (n,) of a document, int64, after an end-of-text token if the tokenizer has one. ~id for its prompt.

    Raises UserError, with the document's name, if a character has no token.
    """
    prompt, text = (torch.from_numpy(encode(tokenizer, part, name).astype("int64")) for part in document)
    end = end_of_text(tokenizer)
    return torch.cat((torch.tensor([] if end is None else [end], dtype=torch.int64), ~prompt, text))


@torch.no_grad()
def iter_losses(model: GPT, tokens: Tensor, token_bytes: Tensor) -> Iterator[TextLoss]:
    """Yield the loss of tokens[1:], in parts, without a prompt's tokens. tokens (n,): see encode_document.

    token_bytes (V,): UTF-8 length of each token. Every token counts once. As in validation, windows of block_size
    tokens follow each other. The last window ends with the document, and may overlap with the one before it.
    """
    device, n = model.wte.weight.device, len(tokens) - 1
    width = min(model.config.block_size, n)
    windows_per_forward = max(1, LOGITS_PER_FORWARD // (model.config.block_size * model.vocab_size))
    window_starts = range(0, n, max(1, width))
    for first in range(0, len(window_starts), windows_per_forward):
        inputs, targets = [], []
        for window_start in window_starts[first : first + windows_per_forward]:
            start = min(window_start, n - width)
            window = tokens[start : start + width]
            inputs.append(window.maximum(~window))
            target = tokens[start + 1 : start + 1 + width].clone()
            target[: window_start - start] = IGNORE_INDEX  # these tokens count in the previous window
            target[target < 0] = IGNORE_INDEX
            targets.append(target)
        y = torch.stack(targets).flatten()
        logits = model(torch.stack(inputs).to(device)).float()
        nats = F.cross_entropy(logits.flatten(0, 1), y.to(device), reduction="sum").item()
        counted = y[y != IGNORE_INDEX]
        yield TextLoss(nats, len(counted), int(token_bytes[counted].sum()))


def loss_table(documents: list[Document], losses: list[TextLoss]) -> Table:
    """A table with one row for each of the first MAX_TABLE_ROWS documents, and one row for all documents."""
    table = make_table("document", "begins with", "tokens", "loss", "perplexity", "bits/byte", left=2)
    if len(losses) > 1:
        for number, document in enumerate(documents[:MAX_TABLE_ROWS], start=1):
            beginning = " ".join("".join(document)[:80].split())
            beginning = beginning if len(beginning) <= 20 else beginning[:19] + "…"
            table.add_row(f"{number:,}", beginning, *_format_cells(losses[number - 1]))
        if len(losses) > MAX_TABLE_ROWS:
            table.add_row("...", f"{len(losses) - MAX_TABLE_ROWS:,} more")
        table.add_section()
    table.add_row("all", "", *_format_cells(sum(losses, TextLoss())))
    return table


def _format_cells(loss: TextLoss) -> list[str]:
    formats = {"tokens": ",", "loss": ".4f", "perplexity": ",.2f", "bits_per_byte": ".4f"}
    metrics = loss.metrics()
    return ["-" if (value := metrics[key]) is None else format(value, form) for key, form in formats.items()]
