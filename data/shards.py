"""Prepared data on disk: token files (shards) and meta.json, in data/prepared/<name>-<fingerprint>/.

The training split is in train.bin and, if it is long, in train-00001.bin and so on; the validation split is in val.bin
likewise. Each file is an array of little-endian uint16 (uint32 for a vocabulary of more than 65,536 tokens) without a
header. If there are prompts, whose tokens are never targets, it is int32: a prompt's tokens are ~id, the others are id.
meta.json lists the files in order, with their number of tokens and SHA-256. data/prepare.py writes the folder.
"""

import hashlib
import json
import os
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import tiktoken

from common.errors import TrainingFailed, UserError
from data.sources import hash_file
from data.tokenizer import from_spec

FORMAT = 4  # of meta.json and of the fingerprint


class ShardedTokens:
    """The token ids of a split, in one or more files. tokens[a:b] reads them into memory.

    Files are read, not memory-mapped: pages of a mapped file would count as memory of this process.
    """

    def __init__(self, paths: list[Path], lengths: list[int], dtype: str, vocab_size: int):
        self.paths, self.dtype, self.vocab_size = paths, np.dtype(dtype), vocab_size
        self.starts = [0, *accumulate(lengths)]

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, part: slice) -> np.ndarray:
        position, stop, _ = part.indices(len(self))
        pieces = [np.empty(0, self.dtype)]
        while position < stop:
            number = bisect_right(self.starts, position) - 1
            count = min(stop, self.starts[number + 1]) - position
            offset = (position - self.starts[number]) * self.dtype.itemsize
            try:
                ids = np.fromfile(self.paths[number], self.dtype, count, offset=offset)
            except FileNotFoundError:
                ids = pieces[0]
            if len(ids) < count or ids.max() >= self.vocab_size or ids.min() < -self.vocab_size:
                raise TrainingFailed(
                    f"{self.paths[number]} was changed or removed while in use; run the same command again"
                )
            pieces.append(ids)
            position += count
        return np.concatenate(pieces)


class ShardWriter:
    """Writes one file of token ids and computes its SHA-256."""

    def __init__(self, path: Path, dtype: str):
        self.path, self.dtype = path, np.dtype(dtype)
        self.tokens, self._sha256 = 0, hashlib.sha256()
        self._file = open(path, "wb")  # noqa: SIM115 (closed by finish)

    def write(self, ids: np.ndarray) -> None:
        raw = np.ascontiguousarray(ids, dtype=self.dtype)
        self._file.write(raw)
        self._sha256.update(raw)
        self.tokens += len(ids)

    def finish(self) -> dict:
        """Flush the file to the disk. Returns its entry in meta.json: number of tokens and SHA-256."""
        with self._file:
            self._file.flush()
            os.fsync(self._file.fileno())
        return {"tokens": self.tokens, "sha256": self._sha256.hexdigest()}


def shard_name(split: str, number: int) -> str:
    return f"{split}-{number:05d}.bin" if number else f"{split}.bin"


@dataclass(frozen=True)
class PreparedData:
    """A prepared folder. meta: the content of meta.json. weights: the weight of each source in meta["mix"]."""

    folder: Path
    meta: dict
    weights: tuple[float, ...] = (1.0,)

    @property
    def tokenizer(self) -> tiktoken.Encoding:
        return from_spec(self.meta["tokenizer"])

    def tokens(self, split: str) -> ShardedTokens:
        """The token ids of "train" or "val"."""
        lengths = {name: f["tokens"] for name, f in self.meta["files"].items() if name.startswith(split)}
        paths = [self.folder / name for name in lengths]
        return ShardedTokens(paths, list(lengths.values()), self.meta["dtype"], self.meta["vocab_size"])

    @property
    def identity(self) -> str:
        """The folder, and a hash that differs if the tokens or the tokenizer do."""
        content = {key: value for key, value in self.meta.items() if key != "source"}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        return f"{self.folder} with SHA-256 {digest[:12]}"

    @property
    def train_ranges(self) -> list[tuple[int, int]]:
        """(first token, number of tokens) of each source in the training split."""
        starts = accumulate((source["train"] for source in self.meta["mix"]), initial=0)
        return [(start, stop - start) for start, stop in pairwise(starts)]


def read_meta(folder: Path) -> dict | None:
    """Read meta.json of a prepared folder. None if the folder is missing. Raises UserError if a file is damaged."""
    if not folder.exists():
        return None
    fix = f"remove the folder {folder}, and the next command prepares it again"
    try:
        meta = json.loads((folder / "meta.json").read_text())
        found = meta["format"]
        itemsize = np.dtype(meta["dtype"]).itemsize
        sizes = {folder / name: file["tokens"] * itemsize for name, file in meta["files"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        raise UserError(f"{folder / 'meta.json'} is missing or damaged; {fix}") from None
    if found != FORMAT:
        raise UserError(f"{folder / 'meta.json'} has format {found}, but this version reads {FORMAT}; {fix}")
    for path, size in sizes.items():
        actual = path.stat().st_size if path.exists() else 0
        if actual != size:
            raise UserError(f"{path} has {actual:,} bytes instead of {size:,}; {fix}")
    return meta


def verify(prepared: PreparedData, known: dict[str, str] | None = None) -> str:
    """Compare every token file with its SHA-256. Returns a line to print. Raises UserError for a changed file.

    known: hashes of unchanged files, see hash_file. By default, all files are hashed.
    """
    for name, file in prepared.meta["files"].items():
        if hash_file(prepared.folder / name, {} if known is None else known) != file["sha256"]:
            raise UserError(
                f"{prepared.folder / name} was changed after it was written (its SHA-256 differs); remove the "
                f"folder {prepared.folder}, and the next command prepares it again"
            )
    return f"verified: the SHA-256 of {', '.join(prepared.meta['files'])} is correct"


def check_length(tokens: dict[str, int], block_size: int) -> None:
    """Raise UserError if the training split is shorter than one window, or validation has nothing to predict."""
    if tokens["train"] < block_size + 1:
        shorter = f"set model.block_size={tokens['train'] - 1}, or " if tokens["train"] > 2 else ""
        raise UserError(
            f"the training text has {tokens['train']} tokens, but a window needs model.block_size + 1 = "
            f"{block_size + 1}; {shorter}use a longer text"
        )
    if tokens["val"] < 2:
        raise UserError(
            f"the validation text has {tokens['val']} tokens, too few to predict one; hold out a longer text "
            "(data.val_fraction, data.val_documents or data.val_path)"
        )
