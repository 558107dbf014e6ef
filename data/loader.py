"""Batches of token windows, without state: a batch is a pure function of (split, first, count).

Training: the n tokens of a source form a ring. Each epoch cuts the ring at a random phase into ceil(n / T) windows and
shuffles them. In every epoch each token is a target once (a few twice, where the last window overlaps the first), and
long runs see all offsets. Sequence i depends only on the seed and i. Resuming therefore needs only the number of the
next sequence, and any number of processes sees the same batches.

Mixing: every MIX_BLOCK sequences contain each source's share by weight, in random order. Each source has its own
epochs: after its last window it starts the next epoch, independently of the other sources.

Validation: windows are consecutive. The last window ends with the text. Its targets that the previous window also has
are masked, so that every target counts exactly once.

Document mask: a batch includes document ids, which increase at each end-of-text token. That token belongs to the next
document: the document's first token is predicted from the end-of-text token alone, as in unconditional sampling.

Prompts (data.prompt_column): their tokens are inputs, but their targets are IGNORE_INDEX.

B sequences, T = block_size.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from data.shards import PreparedData
from data.tokenizer import END_OF_TEXT, end_of_text

MIX_BLOCK = 10_000  # sequences within which the shares of a mix are exact, up to rounding
IGNORE_INDEX = -100  # target that cross_entropy ignores

Batch = tuple[Tensor, Tensor, Tensor | None]


class Loader:
    """Reads batches of prepared data.

    document_mask: add document ids to the batches. Raises UserError if the tokenizer has no end-of-text token.
    """

    def __init__(
        self,
        prepared: PreparedData,
        block_size: int,
        seed: int,
        device: torch.device | str = "cpu",
        document_mask: bool = False,
    ):
        self.tokens = {split: prepared.tokens(split) for split in ("train", "val")}
        self.T, self.seed, self.device = block_size, seed, torch.device(device)
        self.has_prompts = self.tokens["train"].dtype == np.int32  # see data/shards.py
        self.ranges = prepared.train_ranges  # (first token, number of tokens) of each source
        self.shares = _divide_by_weight(MIX_BLOCK, prepared.weights)
        self.epoch_windows = sum(self._windows(source) for source in range(len(self.ranges)))
        self.val_T = min(self.T, len(self.tokens["val"]) - 1)
        self.val_windows = -(-(len(self.tokens["val"]) - 1) // self.val_T)
        self._shuffle_epoch = lru_cache(maxsize=2 * len(self.ranges))(self._shuffle_epoch)  # a batch may span two
        self._shuffle_mix = lru_cache(maxsize=2)(self._shuffle_mix)
        self.end_of_text = end_of_text(prepared.tokenizer) if document_mask else None
        if document_mask and self.end_of_text is None:
            raise UserError(
                f"data.document_mask=true needs the {END_OF_TEXT} token, which the tokenizer of a single document "
                "lacks; set data.document_mask=false, or use a text of several documents and a tokenizer built from it"
            )

    def batch(self, split: str, first: int, count: int, stride: float = 1) -> Batch:
        """Read inputs, targets and document ids, (count, T) int64 each. Without document_mask, document ids are None.

        Row j holds sequence int((first + j) * stride). Training has no last sequence. Validation has `val_windows`
        sequences, and a batch omits rows after the last one.
        """
        sequences = [int(i * stride) for i in range(first, first + count)]
        x, y = self._train_batch(sequences) if split == "train" else self._val_batch(sequences)
        if self.device.type == "cuda":  # from pinned memory, so that the host does not wait for the copy
            x, y = (t.pin_memory().to(self.device, non_blocking=True) for t in (x, y))
        else:
            x, y = x.to(self.device), y.to(self.device)
        return x, y, (x == self.end_of_text).cumsum(dim=1) if self.end_of_text is not None else None

    def count_targets(self, first: int, count: int) -> int:
        """Number of targets in training sequences `first` to first + count - 1, but at least 1, to divide by it."""
        if not self.has_prompts:
            return count * self.T
        _, y = self._train_batch(list(range(first, first + count)))
        return max(1, int((y != IGNORE_INDEX).sum()))

    def _windows(self, source: int) -> int:
        """Number of windows per epoch of a source."""
        return -(-self.ranges[source][1] // self.T)

    def _shuffle_epoch(self, source: int, epoch: int) -> tuple[int, np.ndarray]:
        """Phase and order of the windows of an epoch."""
        rng = np.random.default_rng((self.seed, epoch, source) if source else (self.seed, epoch))
        return int(rng.integers(self.T)), rng.permutation(self._windows(source))

    def _shuffle_mix(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """For each sequence of a block: its source, and the number of earlier sequences of that source in the block."""
        sources = np.repeat(np.arange(len(self.ranges)), self.shares)
        np.random.default_rng((self.seed, block, len(self.ranges))).shuffle(sources)
        earlier = np.empty_like(sources)
        for source, share in enumerate(self.shares):
            earlier[sources == source] = np.arange(share)
        return sources, earlier

    def _find_source(self, sequence: int) -> tuple[int, int]:
        """The source of a training sequence, and the sequence's index among all sequences of that source."""
        if len(self.ranges) == 1:
            return 0, sequence
        block, offset = divmod(sequence, MIX_BLOCK)
        sources, earlier = self._shuffle_mix(block)
        source = int(sources[offset])
        return source, block * self.shares[source] + int(earlier[offset])

    def _train_batch(self, sequences: list[int]) -> tuple[Tensor, Tensor]:
        windows = np.empty((len(sequences), self.T + 1), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            source, index = self._find_source(sequence)
            epoch, window = divmod(index, self._windows(source))
            phase, order = self._shuffle_epoch(source, epoch)
            self._read_ring(source, phase + int(order[window]) * self.T, windows[row])
        return self._make_batch(windows)

    def _make_batch(self, windows: np.ndarray) -> tuple[Tensor, Tensor]:
        """Inputs and targets of windows (B, T + 1) of stored tokens. A prompt's token is an input, but no target."""
        x, y = windows[:, :-1], windows[:, 1:]
        if self.has_prompts:
            x, y = np.maximum(x, ~x), np.where(y < 0, IGNORE_INDEX, y)
        # Copy with NumPy: in the prefetch thread, torch would start a second thread pool.
        return torch.from_numpy(np.ascontiguousarray(x)), torch.from_numpy(np.ascontiguousarray(y))

    def _read_ring(self, source: int, start: int, out: np.ndarray) -> None:
        """Fill `out` with the tokens of a source from `start`. After the last token, continue at the first."""
        first, n = self.ranges[source]
        start, done = start % n, 0
        while done < len(out):
            count = min(len(out) - done, n - start)
            out[done : done + count] = self.tokens["train"][first + start : first + start + count]
            done, start = done + count, 0

    def _val_batch(self, sequences: list[int]) -> tuple[Tensor, Tensor]:
        tokens, T = self.tokens["val"], self.val_T
        first_targets = np.array([i * T for i in sequences if i < self.val_windows], dtype=np.int64).reshape(-1, 1)
        starts = np.minimum(first_targets, len(tokens) - 1 - T)
        rows = [tokens[start : start + T + 1] for start in starts[:, 0].tolist()]
        x, y = self._make_batch(np.array(rows, dtype=np.int64).reshape(-1, T + 1))
        is_repeated = torch.from_numpy(starts + np.arange(T) < first_targets)
        return x, y.masked_fill(is_repeated, IGNORE_INDEX)


def _divide_by_weight(total: int, weights: Sequence[float]) -> list[int]:
    """Divide `total` into whole shares by weight (largest remainder method). Raises UserError if a share is zero."""
    exact = [total * weight / sum(weights) for weight in weights]
    shares = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: shares[i] - exact[i])
    for i in by_remainder[: total - sum(shares)]:
        shares[i] += 1
    if not all(shares):
        raise UserError(
            f"weight={min(weights):g} in data.mix is less than 1/{total:,} of all weights together; set a larger one"
        )
    return shares


def micro_batch_starts(
    step: int, batch_size: int, micro_batch_size: int, rank: int = 0, world_size: int = 1
) -> Iterator[int]:
    """Yield the first sequence of each micro batch of a process, beginning with `step`, without end."""
    share = batch_size // world_size  # sequences of a step that this process trains on
    for current_step in itertools.count(step):
        first = current_step * batch_size + rank * share
        yield from range(first, first + share, micro_batch_size)


def prefetch(loader: Loader, starts: Iterable[int], count: int) -> Iterator[Batch]:
    """Yield training batches of `count` sequences, one batch for each first sequence in `starts`.

    On CUDA, a thread makes the next batch while the current one is used; its exceptions are raised here. On a CPU,
    the thread would slow down the training step by a fifth.
    """
    if loader.device.type != "cuda":
        yield from (loader.batch("train", first, count) for first in starts)
        return
    with ThreadPoolExecutor(1, "batches", set_thread_device, (loader.device,)) as thread:
        current = None
        for first in starts:
            following = thread.submit(loader.batch, "train", first, count)
            if current is not None:
                yield current.result()
            current = following
        if current is not None:
            yield current.result()


def set_thread_device(device: torch.device) -> None:
    """Select the GPU for a new thread, which otherwise uses the first GPU."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
