"""What a model makes of texts: how many nats each costs it, document by document."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import exp, log

import tiktoken
import torch
import torch.nn.functional as F

from data import tokenizer
from data.loader import IGNORE_INDEX
from model.gpt import GPT

LOGITS = 2**25  # at a time: 128 MiB in float32


@dataclass(frozen=True)
class TextLoss:
    """nats: the sum of the cross entropies of so many tokens, which stand for so many bytes of text."""

    nats: float = 0.0
    tokens: int = 0
    bytes: int = 0

    def __add__(self, other: "TextLoss") -> "TextLoss":
        return TextLoss(self.nats + other.nats, self.tokens + other.tokens, self.bytes + other.bytes)

    def numbers(self) -> dict[str, float | int | None]:
        """loss in nats per token, its exponential, and bits per byte; None where no token was predicted."""
        loss = self.nats / self.tokens if self.tokens else None
        return {
            "tokens": self.tokens,
            "bytes": self.bytes,
            "loss": loss,
            "perplexity": None if loss is None else exp(min(loss, 700)),
            "bits_per_byte": self.nats / log(2) / self.bytes if self.bytes else None,
        }


@torch.no_grad()
def iter_losses(model: GPT, encoding: tiktoken.Encoding, documents: Sequence[str]) -> Iterator[tuple[TextLoss, int]]:
    """(score, tokens still to come) of each document, by itself, in parts of which the last has 0 to come.

    Every token counts exactly once. As in validation windows of block_size lie end to end, the last aligned to the end.
    The first token is predicted from an end of text; where the tokenizer has none, from nothing can nothing be
    predicted, and it does not count. Raises UserError for a text that the tokenizer cannot take.
    """
    end, device, T = tokenizer.end_of_text(encoding), model.wte.weight.device, model.config.block_size
    token_bytes = torch.from_numpy(tokenizer.token_bytes(encoding))
    several = max(1, LOGITS // (T * model.vocab_size))
    for number, document in enumerate(documents, start=1):
        encoded = torch.from_numpy(tokenizer.encode(encoding, document, f"document {number}").astype("int64"))
        tokens = encoded if end is None else torch.cat((torch.tensor([end]), encoded))
        n = len(tokens) - 1
        if n < 1:
            yield TextLoss(), 0
            continue
        width = min(T, n)
        for first in range(0, n, several * width):
            begins = range(first, min(first + several * width, n), width)
            starts = [min(begin, n - width) for begin in begins]
            x = torch.stack([tokens[start : start + width] for start in starts])
            y = torch.stack([tokens[start + 1 : start + 1 + width] for start in starts])
            for row, (begin, start) in enumerate(zip(begins, starts, strict=True)):
                y[row, : begin - start] = IGNORE_INDEX  # the window before has them
            logits = model(x.to(device)).float()
            nats = F.cross_entropy(logits.flatten(0, 1), y.flatten().to(device), reduction="sum").item()
            counted = y[y != IGNORE_INDEX]
            yield TextLoss(nats, len(counted), int(token_bytes[counted].sum())), n - min(first + several * width, n)
