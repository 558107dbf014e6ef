"""Checkpoint files: one file of tensors and plain values, written atomically and checked when read."""

import zipfile
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError
from common.files import atomic_writer

FORMAT = 4


def save_checkpoint(path: Path, content: dict) -> None:
    """Write a checkpoint atomically: after a crash, `path` is the previous checkpoint or the new one."""
    with atomic_writer(path) as file:
        torch.save(content | {"format": FORMAT}, file)


def load_checkpoint(path: Path) -> dict:
    """The content of a checkpoint, tensors on the CPU. Raises UserError where it is missing, damaged or unknown.

    One that is replaced meanwhile is read whole, as it was or as it is then.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist; train first, or name a run that has a checkpoint")
    while True:
        file = _which(path)
        content, damaged = _read(path)
        if _which(path) == file:  # else torch, which opens it more than once, may have read half of each
            break
    if damaged is not None:
        raise UserError(
            f"{path} is damaged ({damaged}); copy the run's other checkpoint over it, or remove both to start anew"
        )
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT or "step" not in content:
        raise UserError(f"{path} has checkpoint format {found}, and this version reads {FORMAT}; name another run")
    return content


def _read(path: Path) -> tuple[Any, str | None]:
    """The content, and what is damaged; None: nothing."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load itself does not notice a flipped bit
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True) if damaged is None else None
    except Exception as error:  # a flipped bit can make anything of a file, and torch and zipfile any exception of it
        return None, type(error).__name__
    return content, damaged


def _which(path: Path) -> tuple[int, int, int]:
    """Another after the file was replaced."""
    found = path.stat()
    return found.st_ino, found.st_mtime_ns, found.st_size
