"""Batches of token windows. A batch is a pure function of (split, first, count), and of an order.

Training: the n tokens of the split form a ring. An epoch cuts the ring at a random phase into
ceil(n / T) windows, so that each token is a target once (a few twice, where the last window
overlaps the first). T is block_size. All epochs read the windows in the same random order, so that
a token returns after a complete epoch. With a new order in each epoch, many would return early,
while the model still remembers them: the validation loss rose at the start of each epoch
(docs/experiments/text-sizes.md). If a run trains several models, each has its own order.

Sequence i depends only on the seed, the order and i: resuming needs only these numbers, and any
number of processes sees the same batches.

Validation: windows are consecutive. The last one ends with the text; its targets that the previous
window also has are masked, so that every target counts once.

Document ids increase at each end-of-text token, which belongs to the next document: the first token
of a document is predicted from the end-of-text token alone, as in unconditional sampling. Prompts
are inputs, but no targets.
"""

import math

import numpy as np
import torch
from torch import Tensor

from common.errors import UserError
from data.prepare import PreparedData
from data.token_files import to_token_ids
from data.tokenizer import END_OF_TEXT, end_of_text
from model.loss import IGNORE_INDEX


class Loader:
    """Reads batches of prepared data.

    document_mask: also return document ids. They need an end-of-text token (UserError).
    """

    def __init__(
        self,
        data: PreparedData,
        block_size: int,
        seed: int,
        device="cpu",
        document_mask: bool = False,
    ):
        self.T = block_size
        self.seed = seed
        self.device = torch.device(device)
        self.tokenizer = data.tokenizer
        self.train = data.train
        self.windows_per_epoch = math.ceil(len(self.train) / block_size)
        self.order_number: int | None = None
        self.select_order(0)
        self.val = data.val
        self.val_T = min(block_size, len(self.val) - 1)
        self.val_windows = math.ceil((len(self.val) - 1) / self.val_T)
        self.end_of_text = end_of_text(self.tokenizer) if document_mask else None
        if document_mask and self.end_of_text is None:
            raise UserError(
                f"data.document_mask=true needs the {END_OF_TEXT} token, which the tokenizer "
                "lacks; set it to false, or use a text of several documents and a tokenizer "
                "built from it"
            )

    def select_order(self, number: int) -> None:
        """Read the training windows in one of many random orders, with its own phases."""
        if number == self.order_number:
            return
        self.order_number = number
        rng = self._random(epoch=0)
        self.phases = {0: int(rng.integers(self.T))}  # by epoch: where its windows begin
        # of the windows, in the smallest dtype that has their numbers
        self.order = np.arange(
            self.windows_per_epoch, dtype=np.min_scalar_type(self.windows_per_epoch)
        )
        rng.shuffle(self.order)

    def batch(
        self, split: str, first: int, count: int, stride: float = 1
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Read inputs, targets and document ids, (count, T) int64 each.

        The document ids are None without document_mask. Row j holds sequence
        int((first + j) * stride). Validation has `val_windows` sequences; later rows are omitted.
        """
        sequences = [int(i * stride) for i in range(first, first + count)]
        if split == "train":
            x, y = self._train_batch(sequences)
        else:
            x, y = self._val_batch(sequences)
        if self.device.type == "cuda":
            # from pinned memory, so that the host does not wait for the copy
            x = x.pin_memory()
            y = y.pin_memory()
        x = x.to(self.device, non_blocking=True)
        y = y.to(self.device, non_blocking=True)
        if self.end_of_text is None:
            return x, y, None
        return x, y, (x == self.end_of_text).cumsum(dim=1)

    def count_targets(self, first: int, count: int) -> int:
        """Number of targets in training sequences `first` to first + count - 1.

        At least 1, because the loss is divided by it. Each process counts the complete step, so
        that none waits for the others before its backward pass.
        """
        if self.train.dtype != np.int32:  # there are no prompts
            return count * self.T
        _, y = self._train_batch(list(range(first, first + count)))
        return max(1, int((y != IGNORE_INDEX).sum()))

    def _train_batch(self, sequences: list[int]) -> tuple[Tensor, Tensor]:
        rows = []
        for sequence in sequences:
            epoch, window = divmod(sequence, self.windows_per_epoch)
            if epoch not in self.phases:
                self.phases[epoch] = int(self._random(epoch).integers(self.T))
            start = self.phases[epoch] + int(self.order[window]) * self.T
            # one token more than inputs: targets are the inputs shifted by one
            rows.append(self.train.read_ring(start, self.T + 1))
        return self._make_batch(rows)

    def _random(self, epoch: int) -> np.random.Generator:
        """The random numbers of an epoch in the current order."""
        # for NumPy, (seed, epoch, 0) is the seed (seed, epoch) of earlier versions
        return np.random.default_rng((self.seed, epoch, self.order_number))

    def _val_batch(self, sequences: list[int]) -> tuple[Tensor, Tensor]:
        T = self.val_T
        last = self.val_windows - 1
        last_start = len(self.val) - 1 - T
        starts = [min(i * T, last_start) for i in sequences if i <= last]
        x, y = self._make_batch([self.val[start : start + T + 1] for start in starts])
        if last in sequences:
            # the first targets of the last window, which the previous window also has
            y[-1, : last * T - last_start] = IGNORE_INDEX
        return x, y

    def _make_batch(self, rows: list[np.ndarray]) -> tuple[Tensor, Tensor]:
        """Inputs and targets, (B, T) each, of windows of T + 1 values of token files."""
        values = np.stack(rows)
        x = torch.from_numpy(to_token_ids(values[:, :-1]))
        y = torch.from_numpy(values[:, 1:].astype(np.int64))
        # the tokens of prompts, which are negative, are inputs, but no targets
        return x, y.masked_fill(y < 0, IGNORE_INDEX)
