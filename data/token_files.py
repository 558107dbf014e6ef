"""Token files: NAME.bin in a prepared folder has the token ids of a text, little-endian.

A value has 16 bits, or 32 bits for a vocabulary of more than 65,536 tokens. With prompts, values
are signed: the token i of a prompt is stored as ~i = -1 - i, because the model reads it, but it is
never a target. data/encode.py writes these files.
"""

from pathlib import Path

import numpy as np

from common.errors import TrainingFailed


def to_token_ids(values: np.ndarray) -> np.ndarray:
    """Convert values of a token file to token ids, int64, of prompts too."""
    ids = values.astype(np.int64)
    return np.where(ids < 0, ~ids, ids)


class Tokens:
    """Values of a split in a token file. tokens[a:b] reads them from the disk.

    The file is not memory-mapped, because mapped pages count as memory of this process.
    """

    def __init__(self, folder: Path, meta: dict, split: str):
        (part,) = meta[split]
        self.path = folder / part["file"]
        self.start = part["start"]
        self.count = part["tokens"]
        self.dtype = np.dtype(meta["dtype"])
        self.vocab_size = meta["vocab_size"]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: slice) -> np.ndarray:
        """Read a slice that is not empty. Raises TrainingFailed if the file is damaged."""
        start, stop, _ = index.indices(len(self))
        offset = (self.start + start) * self.dtype.itemsize
        values = np.fromfile(self.path, self.dtype, stop - start, offset=offset)
        if (
            len(values) < stop - start
            or values.max() >= self.vocab_size
            or values.min() < ~(self.vocab_size - 1)  # of a prompt
        ):
            raise TrainingFailed(
                f"{self.path} is damaged; remove its folder, and run the same command again"
            )
        return values

    def read_ring(self, start: int, count: int) -> np.ndarray:
        """Read `count` values from `start`. The first value follows the last one."""
        start %= len(self)
        values = self[start : start + count]
        while len(values) < count:
            values = np.concatenate([values, self[: count - len(values)]])
        return values
