"""Validation loss of a model."""

from math import log

import tiktoken
import torch

from data import tokenizer
from data.loader import Loader
from training.device import autocast
from training.distributed import Dist


@torch.no_grad()
def evaluate(
    forward, loader: Loader, encoding: tiktoken.Encoding, windows: int, size: int, dtype: torch.dtype, dist: Dist
) -> dict:
    """Mean loss per token in nats, and in bits per byte of text, over validation windows, `size` at a time.

    Over all of them, each token of the text counts exactly once. The processes take turns.
    """
    device = loader.device
    windows = min(windows, loader.val_windows)
    stride = loader.val_windows // windows  # spread over all of the text
    token_bytes = torch.from_numpy(tokenizer.token_bytes(encoding)).to(device)
    nats, tokens, text_bytes = [], 0, torch.zeros((), dtype=torch.int64, device=device)
    forward.eval()
    for first in range(dist.rank * size, windows, dist.world_size * size):
        x, y, doc_ids = loader.batch("val", first * stride, min(size, windows - first), stride)
        with autocast(device, dtype):
            nats.append(forward(x, y, doc_ids=doc_ids, reduction="sum"))
        counted = y[y >= 0]
        tokens += counted.numel()
        text_bytes += token_bytes[counted].sum()
    forward.train()
    # In float64, and all at once, behind the last window.
    total, tokens, text_bytes = dist.sum(sum(each.item() for each in nats), tokens, int(text_bytes))
    return {"val/loss": total / tokens, "val/bpb": total / log(2) / max(1, text_bytes)}
