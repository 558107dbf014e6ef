"""KV cache: stores each layer's keys and values, so that decoding feeds one new token at a time.

Who calls what:

1. The engine calls KVCache.prefill with new prompts, then KVCache.decode_step once per new token.
2. Both set `KVCache.step` to a PrefillStep or DecodeStep, and call
   model.backbone(kv_cache=cache).
3. In each layer, CausalSelfAttention calls KVCache.store_and_attend with the new queries, keys and
   values. With a key offset, it calls KVCache.shift_keys before.

The cache of a layer is a ring buffer. Its size is the layer's window, or block_size. Position p is
in slot p % size, so a new token replaces the token that leaves the window. Therefore decoding needs
no window mask, and a sample with rotary positions can be longer than block_size. Keys are stored
after their rotation, so attention does not depend on the order of the slots. A layer with linear
attention has a state of constant size instead (LinearAttentionState).

B sequences (rows), T tokens, S slots, H query heads, G key/value heads, D head dimension.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model.attention.linear import linear_attention_state, linear_attention_step
from model.attention.positions import previous_in_document
from model.config import GPTConfig
from model.gpt import GPT


@dataclass
class PrefillStep:
    """A forward pass over prompts, which are padded on the right to the same length T."""

    first_row: int  # the prompts are stored in this row and the rows after it
    lengths: Tensor  # (B, 1): number of tokens of each prompt, without padding


@dataclass
class DecodeStep:
    """A forward pass over one new token of each of the first B rows."""

    positions: Tensor  # (B): position of each new token
    # Python numbers, so that no layer waits for the device:
    shared_position: int | None  # the position, if it is the same in all rows
    max_tokens: int  # in the longest row, with the new one


class LayerKVCache:
    """Ring buffer of one layer's keys and values, (num_rows, G, size, D) each."""

    def __init__(self, num_rows: int, size: int):
        self.num_rows = num_rows
        self.size = size
        # write_prompts allocates these tensors, with the dtype and the device of its arguments.
        self.k = torch.empty(0)
        self.v = torch.empty(0)

    def write_prompts(self, k: Tensor, v: Tensor, step: PrefillStep) -> None:
        """Store the last `size` keys and values of each prompt: k and v (B, T, G, D)."""
        B, T, G, D = k.shape
        if self.k.numel() == 0:
            # Zeros, because a NaN in a masked slot would spread: 0 x NaN is NaN.
            self.k = k.new_zeros(self.num_rows, G, self.size, D)
            self.v = v.new_zeros(self.num_rows, G, self.size, D)
        S = min(T, self.size)
        slots = torch.arange(S, device=k.device)
        last_positions = step.lengths - 1  # (B, 1)
        # Slot s gets the newest position p with p % size == s. With 4 slots and the last position
        # 5, slots 0 to 3 get the positions 4, 5, 2 and 3.
        steps_back = (last_positions - slots) % self.size  # (B, S)
        # A short prompt has no position for some slots. Decoding masks what they contain.
        positions = (last_positions - steps_back).clamp(min=0)  # (B, S)
        batch = torch.arange(B, device=k.device).unsqueeze(1)
        rows = slice(step.first_row, step.first_row + B)
        self.k[rows, :, :S] = k[batch, positions].transpose(1, 2)  # (B, G, S, D)
        self.v[rows, :, :S] = v[batch, positions].transpose(1, 2)

    def store_and_attend_token(
        self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, step: DecodeStep
    ) -> Tensor:
        """Store one new token of each row, and attend to all stored tokens of the row.

        q (B, 1, H, D), k and v (B, 1, G, D) -> y (B, 1, H, D)
        """
        B = len(k)
        if step.shared_position is not None:
            slot = step.shared_position % self.size
            self.k[:B, :, slot] = k[:, 0]
            self.v[:B, :, slot] = v[:, 0]
            last_slots = None  # no mask: every row has the same S tokens
        else:
            row_ids = torch.arange(B, device=k.device)
            slots = step.positions % self.size
            self.k[row_ids, :, slots] = k[:, 0]  # (B, G, D): one slot of each row
            self.v[row_ids, :, slots] = v[:, 0]
            # The last slot that a row attends to: the last of all if its buffer is full
            last_slots = step.positions.clamp(max=self.size - 1).unsqueeze(1)  # (B, 1)
        S = min(step.max_tokens, self.size)
        keys = self.k[:B, :, :S].transpose(1, 2)  # (B, S, G, D)
        values = self.v[:B, :, :S].transpose(1, 2)
        # To `attend`, a slot is the position of its key. S is at most the window, which masks none.
        return attend(q, keys, values, positions=last_slots)

    def copy_row(self, source: int, target: int) -> None:
        self.k[target] = self.k[source]
        self.v[target] = self.v[source]


class LinearAttentionState:
    """State of one layer with linear attention, (num_rows, G, D, D + 1). See LayerKVCache."""

    def __init__(self, num_rows: int):
        self.num_rows = num_rows
        self.state = torch.empty(0)

    def write_prompts(self, k: Tensor, v: Tensor, step: PrefillStep) -> None:
        states = linear_attention_state(k, v, step.lengths)  # (B, G, D, D + 1)
        if self.state.numel() == 0:
            self.state = states.new_zeros(self.num_rows, *states.shape[1:])
        self.state[step.first_row : step.first_row + len(states)] = states

    def store_and_attend_token(
        self, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, step: DecodeStep
    ) -> Tensor:
        return linear_attention_step(self.state[: len(k)], q, k, v)  # updates the state in place

    def copy_row(self, source: int, target: int) -> None:
        self.state[target] = self.state[source]


class KVCache:
    """The caches of all layers, with one row per sequence. It is the model's argument `kv_cache`.

    num_rows: largest number of sequences that are decoded together.
    max_length: tokens of the longest sequence. No layer has more slots.
    """

    step: PrefillStep | DecodeStep  # describes the current forward pass
    # (B, max_ngram - 1): the tokens before the new one, for n-gram embeddings; None in a prefill
    previous_tokens: Tensor | None

    def __init__(self, model: GPT, num_rows: int, max_length: int):
        config = model.config
        self.model = model
        self.device = model.wte.weight.device
        self.num_rows = num_rows
        self.states: dict[str, Tensor] = {}  # by name, (num_rows, 1, ...): see store_state
        self.layers: list[LayerKVCache | LinearAttentionState] = []
        for attention_type, window in zip(config.attention_types, config.windows, strict=True):
            if attention_type == "linear":
                self.layers.append(LinearAttentionState(num_rows))
            else:
                size = min(window or config.block_size, max_length)
                self.layers.append(LayerKVCache(num_rows, size))

    def prefill(self, first_row: int, prompts: list[list[int]]) -> None:
        """Store the keys and values of prompts, from row `first_row` on.

        prompts: at most block_size tokens each, without the newest one, which the next decode_step
            reads. A prompt can be empty.
        """
        T = max(1, *map(len, prompts))  # one column if all prompts are empty
        # Pad on the right: causal attention hides the padding from the prompt.
        padded = [prompt + [0] * (T - len(prompt)) for prompt in prompts]
        lengths = [[len(prompt)] for prompt in prompts]
        self.step = PrefillStep(first_row, torch.tensor(lengths, device=self.device))
        self.previous_tokens = None
        self.model.backbone(torch.tensor(padded, device=self.device), kv_cache=self)

    def decode_step(self, last_tokens: Tensor, positions: list[int]) -> Tensor:
        """Read one new token of each of the first B rows. Returns hidden states (B, C).

        last_tokens (B, max_ngram): the new token of each sequence is last, after the tokens before
            it, which n-gram embeddings need. -1 is padding.
        positions: position of each new token.
        """
        last_position = max(positions)
        shared_position = last_position if min(positions) == last_position else None
        position_ids = torch.tensor(positions, device=self.device)
        self.step = DecodeStep(position_ids, shared_position, max_tokens=last_position + 1)
        self.previous_tokens = last_tokens[:, :-1]
        new_tokens = last_tokens[:, -1:]  # (B, 1)
        x = self.model.backbone(new_tokens, positions=position_ids.unsqueeze(1), kv_cache=self)
        return x[:, 0]

    def store_and_attend(
        self, layer: int, attend: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor
    ) -> Tensor:
        """Store the keys and values of new tokens in a layer's cache, and attend to stored tokens.

        q (B, T, H, D), k and v (B, T, G, D) -> y (B, T, H, D)
        """
        cache = self.layers[layer]
        if isinstance(self.step, PrefillStep):
            cache.write_prompts(k, v, self.step)
            return attend(q, k, v)
        return cache.store_and_attend_token(attend, q, k, v, self.step)

    def shift_keys(self, layer: int, k: Tensor) -> Tensor:
        """Shift a layer's keys by one token, and store the last key of each row.

        k: some channels of the keys, (B, T, G, ...). Before the first token, they are zero.
        """
        name = f"key {layer}"
        if isinstance(self.step, DecodeStep):
            previous = self.states[name][: len(k)].clone()
        else:
            previous = previous_in_document(k, doc_ids=None)
        self.store_state(name, k)
        return previous

    def store_state(self, name: str, x: Tensor) -> None:
        """Store x (B, T, ...) of each row's last token for the next decode step.

        After an empty prompt, the state is zero.
        """
        if isinstance(self.step, DecodeStep):
            self.states[name][: len(x)] = x
            return
        zeros = torch.zeros_like(x[:, :1])
        if name not in self.states:
            self.states[name] = zeros.new_zeros(self.num_rows, *zeros.shape[1:])
        row_ids = torch.arange(len(x), device=x.device).unsqueeze(1)
        last = torch.cat((zeros, x), dim=1)[row_ids, self.step.lengths]
        self.states[name][self.step.first_row :][: len(x)] = last

    def copy_row(self, source: int, target: int) -> None:
        """Copy a sequence to another row."""
        for cache in self.layers:
            cache.copy_row(source, target)
        for state in self.states.values():
            state[target] = state[source]


def kv_cache_bytes_per_token(config: GPTConfig, dtype: torch.dtype) -> float:
    """Size of the KV cache of block_size tokens, divided by block_size.

    dtype: of keys and values. States of linear attention are float32. The half of a key that a
        key offset stores per layer is not counted.
    """
    G = config.kv_heads
    D = config.head_dim
    total = 0
    for attention_type, window in zip(config.attention_types, config.windows, strict=True):
        if attention_type == "linear":
            total += G * D * (D + 1) * torch.float32.itemsize
        else:
            total += 2 * G * D * (window or config.block_size) * dtype.itemsize
    return total / config.block_size
