"""Batches of token windows, without state: a batch is a pure function of (split, first, count).

Training: the n tokens of a source form a ring. An epoch cuts the ring at a random phase into ceil(n / T) windows and
shuffles them, so that each token is a target once (a few twice, where the last window overlaps the first). Sequence i
depends only on the seed and i: resuming needs only its number, and any number of processes sees the same batches. The
sources of a mix take turns by weight, each with its own epochs. T is block_size.

Validation: windows are consecutive. The last one ends with the text; its targets that the previous window also has are
masked, so that every target counts once.

Document ids increase at each end-of-text token, which belongs to the next document: the first token of a document is
predicted from the end-of-text token alone, as in unconditional sampling. Prompts are inputs, but no targets.
"""

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from data.prepare import PreparedData
from data.tokenizer import END_OF_TEXT, end_of_text
from model.loss import IGNORE_INDEX


class Loader:
    """Reads batches of prepared data. document_mask: add document ids, which need an end-of-text token (UserError)."""

    def __init__(
        self,
        data: PreparedData,
        block_size: int,
        seed: int,
        device="cpu",
        document_mask: bool = False,
    ):
        self.train, self.val, self.weights = data.train, data.val, data.weights
        self.T, self.seed, self.device = block_size, seed, torch.device(device)
        self.windows = [
            -(-len(tokens) // self.T) for tokens in self.train
        ]  # per epoch of each source
        self.val_T = min(self.T, len(self.val) - 1)
        self.val_windows = -(-(len(self.val) - 1) // self.val_T)
        self.has_prompts = self.val.dtype == np.int32
        self._shuffle_epoch = lru_cache(maxsize=2 * len(self.train))(
            self._shuffle_epoch
        )  # a batch may span two
        self.end_of_text = end_of_text(data.tokenizer) if document_mask else None
        if document_mask and self.end_of_text is None:
            fix = (
                "set it to false, or use a text of several documents and a tokenizer built from it"
            )
            raise UserError(
                f"data.document_mask=true needs the {END_OF_TEXT} token, which the tokenizer lacks; {fix}"
            )

    def batch(
        self, split: str, first: int, count: int, stride: float = 1
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Read inputs, targets and document ids (None without document_mask), (count, T) int64 each.

        Row j holds sequence int((first + j) * stride). Validation has `val_windows` sequences; later rows are omitted.
        """
        sequences = [int(i * stride) for i in range(first, first + count)]
        x, y = self._train_batch(sequences) if split == "train" else self._val_batch(sequences)
        if (
            self.device.type == "cuda"
        ):  # from pinned memory, so that the host does not wait for the copy
            x, y = x.pin_memory(), y.pin_memory()
        x, y = x.to(self.device, non_blocking=True), y.to(self.device, non_blocking=True)
        return x, y, (x == self.end_of_text).cumsum(dim=1) if self.end_of_text is not None else None

    def count_targets(self, first: int, count: int) -> int:
        """Number of targets in training sequences `first` to first + count - 1, but at least 1, to divide by it."""
        if not self.has_prompts:
            return count * self.T
        _, y = self._train_batch(list(range(first, first + count)))
        return max(1, int((y != IGNORE_INDEX).sum()))

    def _shuffle_epoch(self, source: int, epoch: int) -> tuple[int, np.ndarray]:
        """Phase and order of the windows of an epoch."""
        rng = np.random.default_rng((self.seed, epoch, source) if source else (self.seed, epoch))
        return int(rng.integers(self.T)), rng.permutation(self.windows[source])

    def _find_source(self, sequence: int) -> tuple[int, int]:
        """The source of a training sequence, and the number of earlier sequences of this source."""
        # Of n sequences, n x weight / total weight are from the first source, rounded. The others are divided likewise.
        remaining_weight = sum(self.weights)
        for source, weight in enumerate(self.weights[:-1]):
            earlier, following = (
                int(n * weight / remaining_weight + 0.5) for n in (sequence, sequence + 1)
            )
            if following > earlier:
                return source, earlier
            sequence, remaining_weight = sequence - earlier, remaining_weight - weight
        return len(self.weights) - 1, sequence

    def _train_batch(self, sequences: list[int]) -> tuple[Tensor, Tensor]:
        rows = []
        for sequence in sequences:
            source, index = self._find_source(sequence)
            epoch, window = divmod(index, self.windows[source])
            phase, order = self._shuffle_epoch(source, epoch)
            rows.append(
                self.train[source].read_ring(phase + int(order[window]) * self.T, self.T + 1)
            )
        return self._make_batch(rows)

    def _val_batch(self, sequences: list[int]) -> tuple[Tensor, Tensor]:
        T = self.val_T
        first_targets = np.array(
            [i * T for i in sequences if i < self.val_windows], dtype=np.int64
        ).reshape(-1, 1)
        starts = np.minimum(first_targets, len(self.val) - 1 - T)
        x, y = self._make_batch(
            [self.val[start : start + T + 1] for start in starts[:, 0].tolist()]
        )
        is_repeated = torch.from_numpy(starts + np.arange(T) < first_targets)
        return x, y.masked_fill(is_repeated, IGNORE_INDEX)

    def _make_batch(self, rows: list[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Inputs and targets (B, T) of windows of T + 1 stored tokens. A prompt's token is an input, but no target."""
        windows = torch.from_numpy(np.stack(rows).astype(np.int64))
        x, y = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        return (
            (torch.maximum(x, ~x), y.masked_fill(y < 0, IGNORE_INDEX))
            if self.has_prompts
            else (x, y)
        )
