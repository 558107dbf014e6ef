"""KV cache: stores each layer's keys and values, so that decoding feeds one new token at a time.

A layer's cache is a ring buffer. Its size is the layer's window, or block_size. Position p is in slot p % size, so a
new token replaces the token that leaves the window. Therefore decoding needs no window mask, and a sample with rotary
positions can be longer than block_size. A layer with linear attention has a state of constant size instead.

B batch, T time, C channels, G key/value heads, D head dimension.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from model.attention.linear import linear_attention_state, linear_attention_step
from model.gpt import GPT


class LayerKVCache:
    """Ring buffer of one layer's keys and values, (num_rows, G, size, D) each. One row per sequence."""

    def __init__(self, num_rows: int, G: int, size: int, D: int):
        self.shape, self.size = (num_rows, G, size, D), size
        self.k = self.v = torch.empty(
            0
        )  # allocated by the first prefill, when dtype and device are known

    def prefill(
        self, first_row: int, last_positions: Tensor, attend: Callable, *qkv: Tensor
    ) -> Tensor:
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

    def decode(
        self,
        positions: Tensor,
        shared_position: int | None,
        num_slots: int,
        attend: Callable,
        *qkv: Tensor,
    ):
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
        k, v = (
            cache[:B, :, : min(num_slots, self.size)].transpose(1, 2) for cache in (self.k, self.v)
        )
        return attend(q, k, v, positions=query_positions)

    def copy_row(self, source: int, target: int) -> None:
        self.k[target], self.v[target] = self.k[source], self.v[source]


class LinearAttentionState:
    """State of one layer with linear attention, (num_rows, G, D, Dv + 1). One row per sequence. See LayerKVCache."""

    def __init__(self, num_rows: int, device: torch.device, G: int, D: int, dtype: torch.dtype):
        self.state = torch.zeros(
            num_rows, G, D, D + 1, device=device, dtype=torch.promote_types(dtype, torch.float32)
        )

    def prefill(
        self, first_row: int, last_positions: Tensor, attend: Callable, *qkv: Tensor
    ) -> Tensor:
        self.state[first_row : first_row + len(last_positions)] = linear_attention_state(
            *qkv[1:], last_positions + 1
        )
        return attend(*qkv)

    def decode(
        self,
        positions: Tensor,
        shared_position: int | None,
        num_slots: int,
        attend: Callable,
        *qkv: Tensor,
    ):
        return linear_attention_step(self.state[: len(positions)], *qkv)

    def copy_row(self, source: int, target: int) -> None:
        self.state[target] = self.state[source]


class KVCache:
    """The caches of all layers, for up to `num_rows` sequences of at most `max_length` tokens.

    It is the model's `kv_cache` argument. method, arguments: what `attend` calls in the current forward pass.
    """

    method: str  # "prefill" or "decode"
    arguments: tuple[Any, ...]
    previous_tokens: Tensor | None

    def __init__(self, model: GPT, num_rows: int, max_length: int):
        self.model, self.device, config = model, model.wte.weight.device, model.config
        G, D = config.kv_heads, config.head_dim
        self.layers = [
            LinearAttentionState(num_rows, self.device, G, D, model.wte.weight.dtype)
            if attention_type == "linear"
            else LayerKVCache(num_rows, G, min(window or config.block_size, max_length), D)
            for attention_type, window in zip(config.attention_types, config.windows, strict=True)
        ]

    def attend(self, layer: int, attend: Callable, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return getattr(self.layers[layer], self.method)(*self.arguments, attend, q, k, v)

    def prefill(self, first_row: int, prompts: Sequence[Sequence[int]]) -> None:
        """Read prompts of at most block_size tokens, and store them in the rows from `first_row` on."""
        longest = max(1, *map(len, prompts))
        # pad on the right: causal attention hides the padding
        tokens = torch.tensor(
            [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=self.device
        )
        last_positions = torch.tensor([[len(prompt) - 1] for prompt in prompts], device=self.device)
        self.method, self.arguments, self.previous_tokens = (
            "prefill",
            (first_row, last_positions),
            None,
        )
        self.model.backbone(tokens, kv_cache=self)

    def decode_step(self, last_tokens: Tensor, positions: list[int]) -> Tensor:
        """Read one new token of each of the first B rows. Returns hidden states (B, C).

        last_tokens (B, max_ngram): last tokens of each sequence; the new token is last. -1 is padding.
        positions: position of each new token.
        """
        longest, index = max(positions), torch.tensor(positions, device=self.device)
        shared_position = longest if min(positions) == longest else None
        self.method, self.arguments = "decode", (index, shared_position, longest + 1)
        self.previous_tokens = last_tokens[:, :-1]
        return self.model.backbone(
            last_tokens[:, -1:], positions=index.unsqueeze(1), kv_cache=self
        )[:, 0]
