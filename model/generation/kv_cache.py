"""What a text's tokens leave behind in each layer, so that a new token alone goes through the model.

A layer's keys and values lie in a ring of as many slots as a query sees, W: position p in slot p % W. What a new token
overwrites is what it no longer sees, so that a window needs no mask, and a text may go on beyond block_size.

n rows (texts), T time, H query heads, G key/value heads, D head size, W slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.gpt import GPT, CausalSelfAttention

PREFILL = 4096  # tokens at a time, which bounds the memory that prompts take


class LayerKVCache:
    """One layer's keys and values, head by head, as they are read fastest: (rows, G, W, D) each."""

    def __init__(self, layer: CausalSelfAttention, rows: int, W: int):
        self.shape, self.W = (rows, layer.n_kv_head, W, layer.head_dim), W
        self.k = self.v = None  # made with the first key, whose dtype they take

    def _make(self, k: Tensor) -> None:
        if self.k is None:  # zeros: what nobody sees counts 0 times, and must not be NaN
            self.k, self.v = (torch.zeros(self.shape, dtype=k.dtype, device=k.device) for _ in "kv")

    def prefill(self, rows: range, last: Tensor, k: Tensor, v: Tensor) -> None:
        """Store the prompts of `rows`: k, v (n, T, G, D); last (n, 1): the position of each prompt's last token."""
        self._make(k)
        slot = torch.arange(min(k.shape[1], self.W), device=k.device)
        newest = (last - (last - slot) % self.W).clamp(min=0)  # position in each slot; 0 where there is none yet
        text = torch.arange(len(rows), device=k.device).unsqueeze(1)
        kept = slice(rows.start, rows.stop), slice(None), slice(len(slot))
        self.k[kept], self.v[kept] = k[text, newest].transpose(1, 2), v[text, newest].transpose(1, 2)

    def append(self, at: Tensor, common: int | None, reach: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store one token of each of the first n texts, and return the keys and values that it sees, (n, seen, G, D).

        k, v (n, 1, G, D); at (n): its position. For common and reach see KVCache.go_on.
        """
        self._make(k)
        n, seen = len(at), min(reach, self.W)
        if common is not None:
            rows, slot = slice(n), common % self.W
        else:
            rows, slot = torch.arange(n, device=k.device), at % self.W
        self.k[rows, :, slot], self.v[rows, :, slot] = k[:, 0], v[:, 0]
        return self.k[:n, :, :seen].transpose(1, 2), self.v[:n, :, :seen].transpose(1, 2)


@dataclass
class Prefill:
    """The model's kv_cache while it reads prompts: their tokens attend to each other."""

    layers: list[LayerKVCache]
    rows: range
    last: Tensor
    previous_tokens = None

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.layers[layer].prefill(self.rows, self.last, k, v)
        return k, v

    def query_positions(self, layer: int) -> None:
        return None


@dataclass
class DecodeStep:
    """The model's kv_cache while it adds a token to each text: new tokens attend to those in the cache."""

    layers: list[LayerKVCache]
    at: Tensor
    common: int | None
    reach: int
    previous_tokens: Tensor

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers[layer].append(self.at, self.common, self.reach, k, v)

    def query_positions(self, layer: int) -> Tensor | None:
        return None if self.common is not None else self.at.clamp(max=self.layers[layer].W - 1).unsqueeze(1)


class KVCache:
    """The rings of all layers. rows: as many texts as may grow side by side; longest: positions that one may have."""

    def __init__(self, model: GPT, rows: int, longest: int):
        self.model = model
        self.device = model.wte.weight.device
        sees = [model.config.block_size if window is None else window for window in model.config.windows]
        self.rings = [
            LayerKVCache(block.attn, rows, min(W, longest)) for block, W in zip(model.blocks, sees, strict=True)
        ]  # fmt: skip

    def begin(self, rows: range, texts: Sequence[Sequence[int]]) -> None:
        """Put the tokens of texts, at most block_size of each, into `rows`, in place of what was there."""
        several = max(1, PREFILL // max(map(len, texts)))
        for first in range(0, len(texts), several):
            part = texts[first : first + several]
            longest = max(1, *map(len, part))
            last = torch.tensor([[len(text) - 1] for text in part], device=self.device)
            # Shorter ones are filled up at the end: no token sees what comes after it.
            padded = torch.tensor([[*text, *[0] * (longest - len(text))] for text in part], device=self.device)
            into = rows[first : first + several]
            self.model.backbone(padded, kv_cache=Prefill(self.rings, into, last))

    def go_on(self, recent: Tensor, at: Tensor, common: int | None, reach: int) -> Tensor:
        """A token more for the first n texts -> what their next is predicted from, (n, C).

        recent (n, model.max_ngram): the last tokens of each, the new one included, -1 where there are none. at (n): the
        new position. common: that position where it is the same for all, which needs no mask; else None. reach: at
        least as many slots as any of them has filled, with the new one.
        """
        before, new = recent[:, :-1], recent[:, -1:]
        step = DecodeStep(self.rings, at, common, reach, previous_tokens=before)
        return self.model.backbone(new, positions=at.unsqueeze(1), kv_cache=step)[:, 0]

    def move(self, source: int, to: int) -> None:
        """Row `source` takes the place of row `to`."""
        for ring in self.rings:
            if ring.k is not None:
                ring.k[to], ring.v[to] = ring.k[source], ring.v[source]
