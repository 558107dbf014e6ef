"""Tokens to batches, without state: a batch is a pure function of (split, first, count).

Training text is a ring of n tokens. An epoch cuts it, from a random phase, into ceil(n / T) windows of T tokens
and their successors, and shows them in a random order: every token is a target once an epoch (a few twice, where
the last window meets the first), and long runs see all offsets. Sequence i of the endless sequence of epochs
depends on the seed and i alone, so resuming needs only a number, and any number of processes sees the same batches.

Validation lays windows end to end; the last is aligned to the end of the text, and targets that it repeats do not
count, so that every target counts exactly once.

B sequences, T = block_size.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from data.prepare import Prepared

IGNORE = -100  # cross_entropy's own mark for a target that does not count


class Loader:
    def __init__(self, prepared: Prepared, block_size: int, seed: int, device: torch.device | str = "cpu"):
        self.tokens = {split: prepared.tokens(split) for split in ("train", "val")}
        self.T, self.seed, self.device = block_size, seed, torch.device(device)
        self.epoch_windows = -(-len(self.tokens["train"]) // self.T)
        self.val_T = min(self.T, len(self.tokens["val"]) - 1)
        self.val_windows = -(-(len(self.tokens["val"]) - 1) // self.val_T)
        self._epoch = lru_cache(maxsize=2)(self._epoch)  # a batch may straddle two

    def batch(self, split: str, first: int, count: int, stride: int = 1) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (count, T) int64 on the device, of the sequences first, first + stride, ...

        Training is endless; validation has `val_windows` sequences, and those beyond are left out.
        """
        sequences = range(first, first + count * stride, stride)
        x, y = self._train(sequences) if split == "train" else self._val(sequences)
        if self.device.type == "cuda":  # pinned memory is copied while the device computes
            return tuple(t.pin_memory().to(self.device, non_blocking=True) for t in (x, y))
        return x.to(self.device), y.to(self.device)

    def _epoch(self, epoch: int) -> tuple[int, np.ndarray]:
        random = np.random.default_rng((self.seed, epoch))
        return int(random.integers(self.T)), random.permutation(self.epoch_windows)

    def _train(self, sequences: range) -> tuple[Tensor, Tensor]:
        starts = np.empty((len(sequences), 1), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            epoch, index = divmod(sequence, self.epoch_windows)
            phase, order = self._epoch(epoch)
            starts[row] = phase + order[index] * self.T
        tokens = self.tokens["train"]
        window = torch.from_numpy(tokens[(starts + np.arange(self.T + 1)) % len(tokens)].astype(np.int64))
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def _val(self, sequences: range) -> tuple[Tensor, Tensor]:
        begin = np.array([i * self.val_T for i in sequences if i < self.val_windows], dtype=np.int64).reshape(-1, 1)
        tokens = self.tokens["val"]
        start = np.minimum(begin, len(tokens) - 1 - self.val_T)
        at = start + np.arange(self.val_T + 1)
        window = torch.from_numpy(tokens[at].astype(np.int64))
        counted = torch.from_numpy(at[:, :-1] >= begin)
        return window[:, :-1].contiguous(), window[:, 1:].masked_fill(~counted, IGNORE)
