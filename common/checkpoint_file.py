"""Checkpoint files: one file of tensors and plain values, written atomically and checked when read.

The tensors of a sharded checkpoint are in a folder beside its file: one file per process, with the rows that the
process had. The checkpoint file names this folder. It is written last, so that a checkpoint is complete if it exists.
"""

import math
import shutil
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from common.files import atomic_writer

FORMAT = 4  # of the content; increased when old checkpoints can no longer be read


def save_checkpoint(path: Path, content: dict) -> None:
    """Write a checkpoint atomically: after a crash, `path` is the previous checkpoint or the new one."""
    with atomic_writer(path) as file:
        try:
            torch.save(content | {"format": FORMAT}, file)
        except RuntimeError as error:  # torch cannot complete the file, and hides the cause: a full disk, or a signal
            cause = error.__context__
            raise (cause if isinstance(cause, OSError | KeyboardInterrupt) else error) from None


def load_checkpoint(path: Path) -> dict:
    """Read a checkpoint, with tensors on the CPU. Raises UserError if it is missing, damaged or of an unknown format.

    If a training process replaces the file during the read, the new file is read.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist; train first, or set a run that has a checkpoint")
    while True:
        version, content, error = _file_version(path), {}, None
        try:
            content = _read(path)
        except UserError as user_error:
            error = user_error
        if _file_version(path) == version:  # not replaced while torch.load opened it and its shards several times
            break
    if error is not None:
        raise error
    return content


def _read(path: Path) -> dict:
    """The content of a checkpoint file and its shards. Raises UserError."""
    content = _read_file(path, "copy the run's other checkpoint over it, or set another name")
    if "shards" not in content:
        return content
    shards = []
    for rank in range(content["world_size"]):
        file = path.parent / content["shards"] / f"rank-{rank}.pt"
        advice = f"copy it again from the machine that wrote it, or use another checkpoint than {path}"
        shard = _read_file(file, advice)
        if (shard["step"], shard.get("rank", rank)) != (content["step"], rank):  # older shards have no rank
            raise UserError(f"{file} is not the shard of rank {rank} at step {content['step']}; {advice}")
        shards.append(shard)
    return {**JoinedShards(shards), **content}


class JoinedShards(Mapping):
    """Nested dicts of tensors from several files. A tensor is joined when it is read, so that few are in memory."""

    def __init__(self, shards: list[dict]):
        self.shards = shards

    def __getitem__(self, key: str) -> Any:
        values = [shard[key] for shard in self.shards]
        if isinstance(values[0], dict):
            return JoinedShards(values)
        return torch.cat(values) if isinstance(values[0], torch.Tensor) and values[0].ndim > 0 else values[0]

    def __iter__(self) -> Iterator[str]:
        return iter(self.shards[0])

    def __len__(self) -> int:
        return len(self.shards[0])


def remove_unused_shards(folder: Path) -> None:
    """Remove the folders of shards that no checkpoint in `folder` names."""
    folders = list(folder.glob("shards-*"))
    used = {_read_value(path, "shards") for path in folder.glob("*.pt")} if folders else set()
    for shards in folders:
        if shards.name not in used:
            shutil.rmtree(shards, ignore_errors=True)  # a file can be in use on another machine; the next save retries


def read_step(path: Path) -> float:
    """The step of a checkpoint, without reading its tensors; infinite if the file is damaged."""
    step = _read_value(path, "step")
    return math.inf if step is None else step


def _read_value(path: Path, key: str) -> Any:
    """One value of a checkpoint file, without reading its tensors; None if it is missing, or the file is damaged."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True).get(key)
    except Exception:  # a damaged file can raise anything in torch
        return None


def _read_file(path: Path, advice: str) -> dict:
    """The content of one file. Raises UserError with `advice` if it is missing or damaged."""
    content = None
    try:
        with zipfile.ZipFile(path) as archive:
            damage = archive.testzip()  # torch.load does not detect a flipped bit
        if damage is None:
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except FileNotFoundError:
        raise UserError(f"{path} is missing; {advice}") from None
    except Exception as error:  # a damaged file can raise anything in zipfile and torch
        damage = type(error).__name__
    if damage is not None:
        raise UserError(f"{path} is damaged ({damage}); {advice}")
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT or "step" not in content:
        raise UserError(f"{path} has checkpoint format {found}, but this version reads {FORMAT}; set another run")
    return content


def _file_version(path: Path) -> tuple[int, int, int]:
    """Inode, modification time and size: they change when the file is replaced."""
    stat = path.stat()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
