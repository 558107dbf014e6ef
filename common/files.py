"""Atomic writes and JSON files."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO
from uuid import uuid4


@contextmanager
def atomic_writer(path: Path) -> Iterator[IO[bytes]]:
    """Context manager: a binary file that replaces `path` on success. After a crash, `path` is the old or new file."""
    partial = path.with_name(f"{path.name}.{uuid4().hex}.partial")  # unique: two processes may write `path`
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        error.filename = str(path)  # of a full disk, it is None
        raise
    finally:
        partial.unlink(missing_ok=True)
    if os.name == "posix":  # Windows cannot open a folder
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def atomic_write(path: Path, content: bytes | str) -> None:
    """Write a complete file or none. Text is encoded as UTF-8."""
    with atomic_writer(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def read_json(path: Path) -> dict:
    """Read an object from a JSON file, or {} if the file does not exist."""
    return json.loads(path.read_text()) if path.exists() else {}


def write_json(path: Path, content: dict) -> None:
    """Write an object as JSON, atomically."""
    atomic_write(path, json.dumps(content, indent=2) + "\n")
