"""Atomic writes, and errors that name their file."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """An error of the operating system inside is of this file, which a full disk, for one, does not say."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def atomic_write(path: Path, content: bytes) -> None:
    """Under another name, onto the disk, and renamed: whatever happens, `path` is whole."""
    partial = path.with_suffix(".partial")
    with name_file_in_errors(path), open(partial, "wb") as f:
        f.write(content)
        f.flush()
        os.fsync(f.fileno())
    os.replace(partial, path)
