"""Atomic writes and JSON files."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from uuid import uuid4

from common.errors import UserError


@contextmanager
def atomic_writer(path: Path) -> Iterator[IO[bytes]]:
    """Context manager: a binary file that replaces `path` on success. After a crash, `path` is the old or the new file.

    The temporary file has a unique name, because two processes may write `path`. An error removes it.
    """
    partial = path.with_name(f"{path.name}.{uuid4().hex}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError):  # of a full disk, it is None
            error.filename = str(path)
        raise
    if os.name == "posix":  # Windows cannot open a folder
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def atomic_write(path: Path, content: bytes | str) -> None:
    """Write a complete file or none. Text is encoded as UTF-8."""
    with atomic_writer(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def read_json(path: Path) -> dict:
    """Read an object from a JSON file, or {} if the file does not exist. Raises UserError if the file is damaged."""
    try:
        return json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); remove it, and run the same command again") from None


def write_json(path: Path, content: dict) -> None:
    """Write an object as JSON, atomically."""
    atomic_write(path, json.dumps(content, indent=2) + "\n")
