"""KV cache: stores each layer's keys and values, so that decoding feeds one new token at a time.

Who calls what:

1. The engine calls KVCache.prefill with new prompts, then KVCache.decode_step once per new token.
2. Both set `KVCache.step` to a PrefillStep or DecodeStep, and call
   model.backbone(kv_cache=cache).
3. In each layer, CausalSelfAttention calls KVCache.update with the new keys and values, and attends
   to the keys and values that it returns. With a key offset, it calls KVCache.shift_keys before.

The cache of a layer is a ring buffer. Its size is the layer's window, or block_size. Position p is
in slot p % size, so a new token replaces the token that leaves the window. Therefore decoding needs
no window mask, and a sample with rotary positions can be longer than block_size. Keys are stored
after their rotation, so attention does not depend on the order of the slots.

B sequences (rows), T tokens, S slots, G key/value heads, D head dimension.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

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
    """Ring buffer of one layer's keys and values, with one row per sequence.

    The first prefill allocates the tensors, with the dtype and the device of its arguments.
    """

    def __init__(self, num_rows: int, size: int):
        self.num_rows = num_rows
        self.size = size
        # empty until the first prefill, then (num_rows, G, size, D)
        self.k = torch.empty(num_rows, 0)
        self.v = torch.empty(num_rows, 0)
        # (num_rows, 1, G, ...): the newest key of each row, for a key offset
        self.last_key = torch.empty(num_rows, 0)

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

    def append(
        self, k: Tensor, v: Tensor, step: DecodeStep
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store one new token of each row: k and v (B, 1, G, D). Returns as KVCache.update."""
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
            # As positions of the queries, they mask the empty slots. A full buffer has none.
            last_slots = step.positions.clamp(max=self.size - 1).unsqueeze(1)  # (B, 1)
        S = min(step.max_tokens, self.size)
        keys = self.k[:B, :, :S].transpose(1, 2)  # (B, S, G, D)
        values = self.v[:B, :, :S].transpose(1, 2)
        return keys, values, last_slots

    def shift_keys(self, k: Tensor, step: PrefillStep | DecodeStep) -> Tensor:
        """Shift keys by one token, and store the newest key of each row: see KVCache.shift_keys."""
        B = len(k)
        if isinstance(step, DecodeStep):
            previous = self.last_key[:B].clone()
            self.last_key[:B] = k
            return previous
        k = F.pad(k, (0, 0, 0, 0, 1, 0))  # (B, T + 1, G, ...): before the first token, it is zero
        if self.last_key.numel() == 0:
            self.last_key = k.new_zeros(self.num_rows, 1, *k.shape[2:])
        batch = torch.arange(B, device=k.device).unsqueeze(1)
        # index `length` is the last token, or the zero of an empty prompt
        self.last_key[step.first_row : step.first_row + B] = k[batch, step.lengths]
        return k[:, :-1]


class KVCache:
    """The caches of all layers. It is the model's argument `kv_cache`.

    num_rows: largest number of sequences that are decoded together.
    max_length: tokens of the longest sequence. No layer has more slots.
    """

    step: PrefillStep | DecodeStep  # describes the current forward pass
    # (B, max_ngram - 1): the tokens before the new one, for n-gram embeddings; None in a prefill
    previous_tokens: Tensor | None

    def __init__(self, model: GPT, num_rows: int, max_length: int):
        self.model = model
        self.device = model.wte.weight.device
        self.layers = [
            LayerKVCache(num_rows, min(window or model.config.block_size, max_length))
            for window in model.config.windows
        ]

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
        x = self.model.backbone(  # (B, 1, C)
            last_tokens[:, -1:], positions=position_ids.unsqueeze(1), kv_cache=self
        )
        return x[:, 0]

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """Store a layer's keys and values of new tokens: k and v (B, T, G, D).

        Returns the keys and values that the new tokens attend to, and the `positions` for attend.
        The position of a key is its slot. There are at most as many slots as keys in the window, so
        the window masks none.
        """
        cache = self.layers[layer]
        if isinstance(self.step, DecodeStep):
            return cache.append(k, v, self.step)
        cache.write_prompts(k, v, self.step)
        return k, v, None

    def shift_keys(self, layer: int, k: Tensor) -> Tensor:
        """The key of the token before each new one: k (B, T, G, ...), some channels of the keys.

        Before the first token, it is zero.
        """
        return self.layers[layer].shift_keys(k, self.step)

    def copy_row(self, source: int, target: int) -> None:
        """Copy a sequence to another row."""
        for cache in self.layers:
            for tensor in (cache.k, cache.v, cache.last_key):
                tensor[target] = tensor[source]
