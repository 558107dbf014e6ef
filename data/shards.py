"""Token ids on disk: train.bin and, above a set size, train-00001.bin and so on; val.bin likewise.

Each is an array of little-endian uint16 (uint32 above 65,536 tokens) and nothing else, and all but the last of a split
have the same length.
"""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from threading import Lock

import numpy as np

from common.files import name_file_in_errors

SHARD = 2**26  # tokens, half a minute's work for two cores


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin" if number else f"{split}.bin"


class ShardedTokens:
    """The ids of a split. tokens[a:b] reads them from the files into memory.

    Read, not mapped: pages of a mapped file count as this process's memory, until all of the file does.
    """

    def __init__(self, folder: Path, split: str, length: int, shard: int, dtype: str):
        self.length, self.shard, self.dtype = length, shard, np.dtype(dtype)
        self.paths = [folder / shard_name(split, number) for number in range(max(1, -(-length // shard)))]
        self.files = {}
        self.lock = Lock()  # a file has one position, and threads may share it

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, part: slice) -> np.ndarray:
        at, stop, _ = part.indices(self.length)
        ids = np.empty(max(0, stop - at), dtype=self.dtype)
        raw, done = memoryview(ids).cast("B"), 0
        while at < stop:
            number, offset = divmod(at, self.shard)
            count = min(stop - at, self.shard - offset)
            size = count * self.dtype.itemsize
            self._read(number, offset * self.dtype.itemsize, raw[done : done + size])
            at, done = at + count, done + size
        return ids

    def _read(self, number: int, offset: int, into: memoryview) -> None:
        with self.lock:
            if number not in self.files:
                self.files[number] = open(self.paths[number], "rb", buffering=0)  # noqa: SIM115 (as long as this)
            self.files[number].seek(offset)
            while into:
                count = self.files[number].readinto(into)
                if not count:
                    raise OSError(f"{self.paths[number]} ends early: it was cut short while it was in use")
                into = into[count:]


class ShardWriter:
    """Writes the ids of a split in shards of the same length.

    finished: {file name: {"tokens": how many, "sha256": of its bytes}}; others in the folder are begun anew.
    """

    def __init__(self, folder: Path, split: str, dtype: str, shard: int, finished: dict[str, dict]):
        self.folder, self.split, self.dtype, self.shard, self.finished = folder, split, np.dtype(dtype), shard, finished
        self.file, self.count, self.sha256 = None, 0, None

    def add(self, ids: np.ndarray) -> Iterator[int]:
        """Writes them. Each time a shard is full, how many of them have been written by then."""
        done = 0
        while done < len(ids):
            if self.file is None:
                self.path = self.folder / shard_name(self.split, len(self.finished))
                self.file, self.count, self.sha256 = open(self.path, "wb"), 0, hashlib.sha256()  # noqa: SIM115
            part = np.ascontiguousarray(ids[done : done + self.shard - self.count], dtype=self.dtype)
            with name_file_in_errors(self.path):
                self.file.write(part)
            self.sha256.update(part)
            self.count, done = self.count + len(part), done + len(part)
            if self.count == self.shard:
                self.finish()
                yield done

    def finish(self) -> None:
        """What was written is whole, and on the disk."""
        if self.file is not None:
            with name_file_in_errors(self.path), self.file:
                self.file.flush()
                os.fsync(self.file.fileno())
            self.finished[self.path.name] = {"tokens": self.count, "sha256": self.sha256.hexdigest()}
            self.file = None
