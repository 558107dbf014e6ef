"""KV cache: stores each layer's keys and values, so that decoding feeds one new token at a time.

A layer's cache is a ring buffer. Its size is the layer's window, or block_size. Position p is in slot p % size, so a
new token replaces the token that leaves the window. Therefore decoding needs no window mask, and a sample with rotary
positions can be longer than block_size.

B batch, T time, C channels, G key/value heads, D head dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from model.gpt import GPT

PREFILL_TOKENS = 4096  # tokens per forward pass, at most, to limit the memory for activations


class LayerKVCache:
    """Ring buffer of one layer's keys and values, (num_rows, G, size, D) each. One row per sequence."""

    def __init__(self, num_rows: int, G: int, size: int, D: int):
        self.shape, self.size = (num_rows, G, size, D), size
        self.k = self.v = torch.empty(0)  # allocated by the first write, when dtype and device are known

    def _allocate(self, k: Tensor) -> None:
        if self.k.numel() == 0:  # zeros, because NaN in a masked slot would spread: 0 x NaN is NaN
            self.k, self.v = k.new_zeros(self.shape), k.new_zeros(self.shape)

    def write_prompts(self, first_row: int, last_positions: Tensor, k: Tensor, v: Tensor) -> None:
        """Store prompts in consecutive rows. k, v (B, T, G, D), padded on the right.

        last_positions (B, 1): position of the last token of each prompt.
        """
        self._allocate(k)
        B, T = k.shape[:2]
        slots = torch.arange(min(T, self.size), device=k.device)
        # the last position that belongs in each slot; negative: the slot stays empty, and is masked
        positions = (last_positions - (last_positions - slots) % self.size).clamp(min=0)
        batch = torch.arange(B, device=k.device).unsqueeze(1)
        rows = slice(first_row, first_row + B)
        self.k[rows, :, : len(slots)] = k[batch, positions].transpose(1, 2)  # (B, G, slots, D)
        self.v[rows, :, : len(slots)] = v[batch, positions].transpose(1, 2)

    def write_token(
        self, positions: Tensor, shared_position: int | None, num_slots: int, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Store one token of each of the first B rows -> the keys and values that it sees, (B, num_slots, G, D).

        k, v (B, 1, G, D). For the other arguments see KVCache.decode_step.
        """
        self._allocate(k)
        B, num_slots = len(positions), min(num_slots, self.size)
        if shared_position is not None:
            self.k[:B, :, shared_position % self.size] = k[:, 0]
            self.v[:B, :, shared_position % self.size] = v[:, 0]
        else:
            rows = torch.arange(B, device=k.device)
            self.k[rows, :, positions % self.size] = k[:, 0]
            self.v[rows, :, positions % self.size] = v[:, 0]
        return self.k[:B, :, :num_slots].transpose(1, 2), self.v[:B, :, :num_slots].transpose(1, 2)

    def copy_row(self, source: int, target: int) -> None:
        if self.k.numel() > 0:
            self.k[target], self.v[target] = self.k[source], self.v[source]


@dataclass
class PrefillStep:
    """The model's `kv_cache` argument while it reads prompts: tokens attend to earlier tokens of their prompt."""

    layers: list[LayerKVCache]
    first_row: int
    last_positions: Tensor
    previous_tokens: Tensor | None = None

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self.layers[layer].write_prompts(self.first_row, self.last_positions, k, v)
        return k, v

    def query_positions(self, layer: int) -> Tensor | None:
        return None


@dataclass
class DecodeStep:
    """The model's `kv_cache` argument while it reads one token per sequence: the token attends to all cached tokens."""

    layers: list[LayerKVCache]
    positions: Tensor
    shared_position: int | None
    num_slots: int
    previous_tokens: Tensor | None

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers[layer].write_token(self.positions, self.shared_position, self.num_slots, k, v)

    def query_positions(self, layer: int) -> Tensor | None:
        if self.shared_position is not None:
            return None
        return self.positions.clamp(max=self.layers[layer].size - 1).unsqueeze(1)


class KVCache:
    """The caches of all layers, for up to `num_rows` sequences of at most `max_length` tokens."""

    def __init__(self, model: GPT, num_rows: int, max_length: int):
        self.model, config = model, model.config
        self.device = model.wte.weight.device
        sizes = [min(window or config.block_size, max_length) for window in config.windows]
        self.layers = [LayerKVCache(num_rows, config.kv_heads, size, config.head_dim) for size in sizes]

    def prefill(self, first_row: int, prompts: Sequence[Sequence[int]]) -> None:
        """Read prompts of at most block_size tokens, and store them in the rows from `first_row` on."""
        prompts_per_forward = max(1, PREFILL_TOKENS // max(map(len, prompts)))
        for start in range(0, len(prompts), prompts_per_forward):
            batch = prompts[start : start + prompts_per_forward]
            longest = max(1, *map(len, batch))
            # pad on the right: causal attention hides the padding
            tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in batch], device=self.device)
            last_positions = torch.tensor([[len(prompt) - 1] for prompt in batch], device=self.device)
            self.model.backbone(tokens, kv_cache=PrefillStep(self.layers, first_row + start, last_positions))

    def decode_step(
        self, last_tokens: Tensor, positions: Tensor, shared_position: int | None, num_slots: int
    ) -> Tensor:
        """Read one new token of each of the first B rows -> hidden states (B, C).

        last_tokens (B, max_ngram): the last tokens of each sequence, including the new one; -1 where there is none.
        positions (B): position of the new token.
        shared_position: the position, if it is the same for all sequences, so that no mask is needed; else None.
        num_slots: number of slots to read, at least as many as any sequence has filled, including the new token.
        """
        step = DecodeStep(self.layers, positions, shared_position, num_slots, previous_tokens=last_tokens[:, :-1])
        return self.model.backbone(last_tokens[:, -1:], positions=positions.unsqueeze(1), kv_cache=step)[:, 0]

    def copy_row(self, source: int, target: int) -> None:
        """Copy the sequence of row `source` to row `target`."""
        for layer in self.layers:
            layer.copy_row(source, target)
