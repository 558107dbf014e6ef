"""KV cache: stores each layer's keys and values, so that decoding feeds one new token at a time.

A layer's cache is a ring buffer. Its size is the layer's window, or block_size. Position p is in slot p % size, so a
new token replaces the token that leaves the window. Therefore decoding needs no window mask, and a sample with rotary
positions can be longer than block_size. A layer with linear attention has a state of constant size instead.

B batch, T time, C channels, G key/value heads, D head dimension.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model.attention.linear import linear_attention_state, linear_attention_step
from model.gpt import GPT

Attend = Callable[..., Tensor]  # of q, k, v and positions
PREFILL_TOKENS = 4096  # tokens per forward pass, at most, to limit the memory for activations


class LayerKVCache:
    """Ring buffer of one layer's keys and values, (num_rows, G, size, D) each. One row per sequence."""

    def __init__(self, num_rows: int, G: int, size: int, D: int):
        self.shape, self.size = (num_rows, G, size, D), size
        self.k = self.v = torch.empty(0)  # allocated by the first prefill, when dtype and device are known

    def prefill(self, first_row: int, last_positions: Tensor, attend: Attend, *qkv: Tensor) -> Tensor:
        """Store prompts, padded on the right, in consecutive rows, and attend within each prompt. qkv (B, T, heads, D).

        last_positions (B, 1): position of the last token of each prompt.
        """
        _, k, v = qkv
        if self.k.numel() == 0:  # zeros, because NaN in a masked slot would spread: 0 x NaN is NaN
            self.k, self.v = k.new_zeros(self.shape), k.new_zeros(self.shape)
        B, T = k.shape[:2]
        slots = torch.arange(min(T, self.size), device=k.device)
        # the last position that belongs in each slot; negative: the slot stays empty, and is masked
        positions = (last_positions - (last_positions - slots) % self.size).clamp(min=0)
        rows, batch = slice(first_row, first_row + B), torch.arange(B, device=k.device).unsqueeze(1)
        self.k[rows, :, : len(slots)] = k[batch, positions].transpose(1, 2)  # (B, G, slots, D)
        self.v[rows, :, : len(slots)] = v[batch, positions].transpose(1, 2)
        return attend(*qkv)

    def decode(self, positions: Tensor, shared_position: int | None, num_slots: int, attend: Attend, *qkv: Tensor):
        """Store one token of each of the first B rows, and attend to all tokens of these rows.

        positions (B): position of each token.
        shared_position: the position, if it is the same in all rows. Attention then needs no mask.
        num_slots: number of slots in use, which may exceed the size of the buffer.
        """
        B, (q, k, v) = len(positions), qkv
        rows, slots, query_positions = slice(B), shared_position, None
        if shared_position is None:
            rows, slots = torch.arange(B, device=k.device), positions
            query_positions = positions.clamp(max=self.size - 1).unsqueeze(1)
        self.k[rows, :, slots % self.size], self.v[rows, :, slots % self.size] = k[:, 0], v[:, 0]
        k, v = (cache[:B, :, : min(num_slots, self.size)].transpose(1, 2) for cache in (self.k, self.v))
        return attend(q, k, v, positions=query_positions)

    def copy_row(self, source: int, target: int) -> None:
        self.k[target], self.v[target] = self.k[source], self.v[source]


class LinearAttentionState:
    """State of one layer with linear attention, (num_rows, G, D, Dv + 1). One row per sequence. See LayerKVCache."""

    def __init__(self, num_rows: int, device: torch.device, G: int, D: int, dtype: torch.dtype):
        self.state = torch.zeros(num_rows, G, D, D + 1, device=device, dtype=torch.promote_types(dtype, torch.float32))

    def prefill(self, first_row: int, last_positions: Tensor, attend: Attend, *qkv: Tensor) -> Tensor:
        self.state[first_row : first_row + len(last_positions)] = linear_attention_state(*qkv[1:], last_positions + 1)
        return attend(*qkv)

    def decode(self, positions: Tensor, shared_position: int | None, num_slots: int, attend: Attend, *qkv: Tensor):
        return linear_attention_step(self.state[: len(positions)], *qkv)

    def copy_row(self, source: int, target: int) -> None:
        self.state[target] = self.state[source]


@dataclass
class CacheStep:
    """The model's `kv_cache` argument in one forward pass. Calls `method` of each layer's cache with `arguments`."""

    layers: list[LayerKVCache | LinearAttentionState]
    method: str  # "prefill" or "decode"
    arguments: tuple[Any, ...]
    previous_tokens: Tensor | None = None

    def attend(self, layer: int, attend: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return getattr(self.layers[layer], self.method)(*self.arguments, attend, q, k, v)


class KVCache:
    """The caches of all layers, for up to `num_rows` sequences of at most `max_length` tokens."""

    def __init__(self, model: GPT, num_rows: int, max_length: int):
        self.model, self.device, config = model, model.wte.weight.device, model.config
        G, D = config.kv_heads, config.head_dim
        self.layers = [
            LinearAttentionState(num_rows, self.device, G, D, model.wte.weight.dtype)
            if attention_type == "linear"
            else LayerKVCache(num_rows, G, min(window or config.block_size, max_length), D)
            for attention_type, window in zip(config.attention_types, config.windows, strict=True)
        ]

    def prefill(self, first_row: int, prompts: Sequence[Sequence[int]]) -> None:
        """Read prompts of at most block_size tokens, and store them in the rows from `first_row` on."""
        prompts_per_forward = max(1, PREFILL_TOKENS // max(1, *map(len, prompts)))
        for start in range(0, len(prompts), prompts_per_forward):
            batch = prompts[start : start + prompts_per_forward]
            longest = max(1, *map(len, batch))
            # pad on the right: causal attention hides the padding
            tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in batch], device=self.device)
            last_positions = torch.tensor([[len(prompt) - 1] for prompt in batch], device=self.device)
            self.model.backbone(tokens, kv_cache=CacheStep(self.layers, "prefill", (first_row + start, last_positions)))

    def decode_step(self, last_tokens: Tensor, positions: list[int]) -> Tensor:
        """Read one new token of each of the first B rows. Returns hidden states (B, C).

        last_tokens (B, max_ngram): last tokens of each sequence; the new token is last. -1 is padding.
        positions: position of each new token.
        """
        longest, index = max(positions), torch.tensor(positions, device=self.device)
        shared_position = longest if min(positions) == longest else None
        step = CacheStep(self.layers, "decode", (index, shared_position, longest + 1), last_tokens[:, :-1])
        return self.model.backbone(last_tokens[:, -1:], positions=index.unsqueeze(1), kv_cache=step)[:, 0]
