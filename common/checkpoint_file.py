"""Checkpoint files: tensors and plain values, written atomically and checked when read."""

import zipfile
from pathlib import Path

import torch

from common.errors import UserError
from common.files import atomic_writer

FORMAT = 5  # increased when old checkpoints can no longer be read


def save_checkpoint(path: Path, content: dict) -> None:
    """Write a checkpoint atomically.

    After a crash, `path` is the previous checkpoint or the new one.
    """
    with atomic_writer(path) as file:
        try:
            torch.save(content | {"format": FORMAT}, file)
        except RuntimeError as error:
            # torch cannot complete the file, and hides the cause: a full disk, or a signal.
            raise (error.__context__ or error) from None


def load_checkpoint(path: Path) -> dict:
    """Read a checkpoint to the CPU, without executing code in it.

    Raises UserError if the file is damaged, or of another format.
    """
    modified = path.stat().st_mtime_ns
    content = {}
    try:
        with zipfile.ZipFile(path) as archive:
            damage = archive.testzip()  # torch.load does not detect a flipped bit
        if damage is None:
            content |= torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # a damaged file can raise anything in zipfile and torch
        damage = type(error).__name__
    if path.stat().st_mtime_ns != modified:
        # A training process has replaced the file, which torch.load opens several times.
        return load_checkpoint(path)
    if damage is not None:
        raise UserError(f"{path} is damaged ({damage}); restore it, or set another name")
    if content.get("format") != FORMAT:
        raise UserError(
            f"{path} has checkpoint format {content.get('format')}, but this version reads "
            f"{FORMAT}; set another run"
        )
    return content
