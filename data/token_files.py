"""Token files: SOURCE.bin in a prepared folder has the token ids of a source, little-endian.

A value has 16 bits, or 32 bits for a vocabulary of more than 65,536 tokens. With prompts, values
are signed: the token i of a prompt is stored as ~i = -1 - i, because the model reads it, but it is
never a target. data/encode.py writes these files.
"""

from itertools import accumulate
from pathlib import Path

import numpy as np

from common.errors import TrainingFailed


def to_token_ids(values: np.ndarray) -> np.ndarray:
    """Convert values of a token file to token ids, int64, of prompts too."""
    ids = values.astype(np.int64)
    return np.where(ids < 0, ~ids, ids)


class Tokens:
    """Values in parts of token files. tokens[a:b] reads them from the disk.

    The files are not memory-mapped, because mapped pages count as memory of this process.
    """

    def __init__(self, folder: Path, meta: dict, parts: list[dict]):
        self.folder = folder
        self.dtype = np.dtype(meta["dtype"])
        self.vocab_size = meta["vocab_size"]
        self.parts = parts
        # index of the first token of each part, and the number of all tokens
        self.starts = [0, *accumulate(part["tokens"] for part in parts)]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: slice) -> np.ndarray:
        start, stop, _ = index.indices(len(self))
        pieces = [np.empty(0, self.dtype)]
        for part, part_start in zip(self.parts, self.starts, strict=False):
            first = max(0, start - part_start)
            last = min(part["tokens"], stop - part_start)
            if first < last:
                pieces.append(self._read(part, first, last - first))
        return np.concatenate(pieces)

    def _read(self, part: dict, first: int, count: int) -> np.ndarray:
        """Read `count` values of a part. Raises TrainingFailed if the file is damaged."""
        path = self.folder / part["file"]
        offset = (part["start"] + first) * self.dtype.itemsize
        values = np.fromfile(path, self.dtype, count, offset=offset)
        if (
            len(values) < count
            or values.max() >= self.vocab_size
            or values.min() < ~(self.vocab_size - 1)  # of a prompt
        ):
            raise TrainingFailed(
                f"{path} is damaged; remove its folder, and run the same command again"
            )
        return values

    def read_ring(self, start: int, count: int) -> np.ndarray:
        """Read `count` values from `start`. The first value follows the last one."""
        start %= len(self)
        values = self[start : start + count]
        while len(values) < count:
            values = np.concatenate([values, self[: count - len(values)]])
        return values
