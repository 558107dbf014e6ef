"""What a text's tokens leave behind in each layer, so that a new token alone goes through the model.

A layer's keys and values lie in a ring of as many slots as a query sees, W: position p in slot p % W. What a new token
overwrites is what it no longer sees, so that a window needs no mask, and a text may go on beyond block_size. A ring
stands in for its layer's `attend` (model/attention/) and hands what it holds to that very function.

n rows (texts), T time, H query heads, G key/value heads, D head size, W slots.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from model.gpt import GPT, CausalSelfAttention

PREFILL = 4096  # tokens at a time, which bounds the memory that prompts take


class LayerKVCache:
    """One layer's keys and values, head by head, as they are read fastest: (rows, G, W, D) each."""

    def __init__(self, layer: CausalSelfAttention, rows: int, W: int):
        self.own, self.shape, self.W = layer.attend, (rows, layer.G, W, layer.D), W
        self.k = self.v = None  # made with the first key, whose dtype they take

    def _make(self, k: Tensor) -> None:
        if self.k is None:  # zeros: what nobody sees counts 0 times, and must not be NaN
            self.k, self.v = (torch.zeros(self.shape, dtype=k.dtype, device=k.device) for _ in "kv")

    def begin(self, rows: range, last: Tensor):
        """The attend for texts that begin, in `rows`; last (n, 1): the position of each one's last token."""

        def attend(q, k, v, **how) -> Tensor:
            self._make(k)
            slot = torch.arange(min(k.shape[1], self.W), device=k.device)
            newest = (last - (last - slot) % self.W).clamp(min=0)  # position in each slot; 0 where there is none yet
            text = torch.arange(len(rows), device=k.device).unsqueeze(1)
            kept = slice(rows.start, rows.stop), slice(None), slice(len(slot))
            self.k[kept], self.v[kept] = (each[text, newest].transpose(1, 2) for each in (k, v))
            return self.own(q, k, v, **how)

        return attend

    def go_on(self, at: Tensor, common: int | None, reach: int):
        """The attend for a token more of the first n texts, at positions `at` (n). For common and reach see Cache."""

        def attend(q, k, v, **_) -> Tensor:  # the ring is the window, and dropout is off
            self._make(k)
            n, seen = len(at), min(reach, self.W)
            if common is not None:
                rows, slot, positions = slice(n), common % self.W, None
            else:
                rows, slot = torch.arange(n, device=k.device), at % self.W
                positions = at.clamp(max=self.W - 1).unsqueeze(1)
            self.k[rows, :, slot], self.v[rows, :, slot] = k[:, 0], v[:, 0]
            k, v = (each[:n, :, :seen].transpose(1, 2) for each in (self.k, self.v))  # (n, seen, G, D)
            return self.own(q, k, v, positions=positions)

        return attend


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
            self.model.backbone(padded, attends=[ring.begin(into, last) for ring in self.rings])

    def go_on(self, recent: Tensor, at: Tensor, common: int | None, reach: int) -> Tensor:
        """A token more for the first n texts -> what their next is predicted from, (n, C).

        recent (n, model.max_ngram): the last tokens of each, the new one included, -1 where there are none. at (n): the
        new position. common: that position where it is the same for all, which needs no mask; else None. reach: at
        least as many slots as any of them has filled, with the new one.
        """
        before, new = recent[:, :-1], recent[:, -1:]
        attends = [ring.go_on(at, common, reach) for ring in self.rings]
        return self.model.backbone(new, at=at.unsqueeze(1), before=before, attends=attends)[:, 0]

    def move(self, source: int, to: int) -> None:
        """Row `source` takes the place of row `to`."""
        for ring in self.rings:
            if ring.k is not None:
                ring.k[to], ring.v[to] = ring.k[source], ring.v[source]
