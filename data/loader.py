"""Tokens to batches, without state: a batch is a pure function of (split, first, count).

Training text is a ring of n tokens (in a mix, each text is one). An epoch cuts it, from a random phase, into
ceil(n / T) windows of T tokens and their successors, and shows them in a random order: every token is a target once
an epoch (a few twice, where the last window meets the first), and long runs see all offsets. Sequence i of the endless
sequence of epochs depends on the seed and i alone, so resuming needs only a number, and any number of processes sees
the same batches.

Texts are mixed by weight: of every MIXED sequences each text has its share, in a random order. Where one is at its
end it begins its next epoch, whatever the others do.

Validation lays windows end to end; the last is aligned to the end of the text, and targets that it repeats do not
count, so that every target counts exactly once.

With document_mask a batch tells which document each token is of: an end-of-text token begins the next one, which is
then predicted from it alone, as sampling from nothing does.

B sequences, T = block_size.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from data import tokenizer
from data.prepared import Prepared

MIX_BLOCK = 10_000  # sequences among which weights are kept, as nearly as whole numbers can
IGNORE_INDEX = -100  # cross_entropy's own mark for a target that does not count


class Loader:
    """Raises UserError where documents are to be kept apart in a text that has no end-of-text tokens."""

    def __init__(
        self, prepared: Prepared, block_size: int, seed: int, device: torch.device | str = "cpu",
        document_mask: bool = False,
    ):  # fmt: skip
        self.tokens = {split: prepared.tokens(split) for split in ("train", "val")}
        self.T, self.seed, self.device = block_size, seed, torch.device(device)
        self.rings, self.weights = prepared.train_parts, prepared.weights
        self.epoch_windows = sum(-(-n // self.T) for _, n in self.rings)
        self.val_T = min(self.T, len(self.tokens["val"]) - 1)
        self.val_windows = -(-(len(self.tokens["val"]) - 1) // self.val_T)
        self._epoch = lru_cache(maxsize=2 * len(self.rings))(self._epoch)  # a batch may straddle two
        self._mixed = lru_cache(maxsize=2)(self._mixed)
        self.shares = _shares(self.weights, MIX_BLOCK)
        self.end = tokenizer.end_of_text(prepared.encoding) if document_mask else None
        if document_mask and self.end is None:
            raise UserError(
                f"data.document_mask=true keeps documents apart at {tokenizer.END_OF_TEXT}, which the tokenizer of a "
                "single text lacks; set data.document_mask=false, or use a text of several documents and a tokenizer "
                "made of it"
            )

    def batch(self, split: str, first: int, count: int, stride: int = 1) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs, targets and documents, each (count, T) int64 on the device, of sequences first, first + stride, ...

        Training is endless; validation has `val_windows` sequences, and those beyond are left out. The documents are
        None unless they are to be kept apart.
        """
        sequences = range(first, first + count * stride, stride)
        x, y = self._train(sequences) if split == "train" else self._val(sequences)
        if self.device.type == "cuda":  # from pinned memory, which the host need not wait for
            x, y = (t.pin_memory().to(self.device, non_blocking=True) for t in (x, y))
        else:
            x, y = x.to(self.device), y.to(self.device)
        return x, y, (x == self.end).cumsum(dim=1) if self.end is not None else None

    def _epoch(self, ring: int, epoch: int) -> tuple[int, np.ndarray]:
        random = np.random.default_rng((self.seed, epoch, ring) if ring else (self.seed, epoch))
        return int(random.integers(self.T)), random.permutation(-(-self.rings[ring][1] // self.T))

    def _mixed(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Of each sequence of a block of MIXED: its ring, and how many of that ring are before it in the block."""
        ring = np.repeat(np.arange(len(self.rings)), self.shares)
        np.random.default_rng((self.seed, block, len(self.rings))).shuffle(ring)
        before = np.empty_like(ring)
        for each, share in enumerate(self.shares):
            before[ring == each] = np.arange(share)
        return ring, before

    def _ring_of(self, sequence: int) -> tuple[int, int]:
        """Which text a training sequence is of, and its number among that text's."""
        if len(self.rings) == 1:
            return 0, sequence
        block, at = divmod(sequence, MIX_BLOCK)
        ring, before = self._mixed(block)
        return int(ring[at]), block * self.shares[ring[at]] + int(before[at])

    def _train(self, sequences: range) -> tuple[Tensor, Tensor]:
        window = np.empty((len(sequences), self.T + 1), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            ring, number = self._ring_of(sequence)
            first, n = self.rings[ring]
            epoch, index = divmod(number, -(-n // self.T))
            phase, order = self._epoch(ring, epoch)
            self._read_ring(first, n, (phase + int(order[index]) * self.T) % n, window[row])
        # Copied by NumPy: in a thread of its own, torch would start a second team of threads beside the step's.
        return tuple(torch.from_numpy(np.ascontiguousarray(part)) for part in (window[:, :-1], window[:, 1:]))

    def _read_ring(self, first: int, n: int, start: int, into: np.ndarray) -> None:
        """The tokens from `start` on of the ring of n tokens that begins at `first`."""
        done = 0
        while done < len(into):
            count = min(len(into) - done, n - start)
            into[done : done + count] = self.tokens["train"][first + start : first + start + count]
            done, start = done + count, 0

    def _val(self, sequences: range) -> tuple[Tensor, Tensor]:
        begin = np.array([i * self.val_T for i in sequences if i < self.val_windows], dtype=np.int64).reshape(-1, 1)
        tokens = self.tokens["val"]
        start = np.minimum(begin, len(tokens) - 1 - self.val_T)
        at = start + np.arange(self.val_T + 1)
        rows = [tokens[int(first) : int(first) + self.val_T + 1] for first in start[:, 0]]
        window = torch.from_numpy(np.array(rows, dtype=np.int64).reshape(-1, self.val_T + 1))
        counted = torch.from_numpy(at[:, :-1] >= begin)
        return window[:, :-1].contiguous(), window[:, 1:].masked_fill(~counted, IGNORE_INDEX)


def _shares(weights: Sequence[float], of: int) -> list[int]:
    """`of` things, divided by weight: what is left over by rounding down goes to the largest remainders.

    Raises UserError for a weight that gets none.
    """
    exact = [of * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: of - sum(shares)]:
        shares[i] += 1
    if not all(shares):
        raise UserError(f"a weight of {min(weights):g} in data.mix is less than one in {of:,}; set a larger one")
    return shares


def prefetch(loader: Loader, starts: Iterable[int], count: int) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
    """The training batches of `count` sequences from each of `starts` on.

    On CUDA each is made before it is asked for: while one is used, a thread makes the next. What goes wrong in it is
    raised here, when that batch is asked for. On a CPU that thread would take a core from the step, all of whose
    others wait for it: steps took a fifth longer.
    """
    if loader.device.type != "cuda":
        yield from (loader.batch("train", first, count) for first in starts)
        return
    with ThreadPoolExecutor(1, "batches", set_thread_device, (loader.device,)) as thread:
        made = None
        for first in starts:
            following = thread.submit(loader.batch, "train", first, count)
            if made is not None:
                yield made.result()
            made = following
        if made is not None:
            yield made.result()


def set_thread_device(device: torch.device) -> None:
    """A new thread is on the first GPU, and would pin memory for it whichever this process computes on."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
