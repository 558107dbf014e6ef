"""Atomic writes, tables as CSV, and files that can be damaged."""

import csv
import errno
import io
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from filelock import FileLock

from common.errors import UserError


@contextmanager
def atomic_writer(path: Path) -> Iterator[IO[bytes]]:
    """Context manager: a binary file that replaces `path` on success.

    After a crash, `path` is the old file or the new one.
    """
    # A unique name: two processes may write `path`.
    partial = path.with_name(f"{path.name}.{uuid4().hex}.partial")
    try:
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except OSError as error:
        if error.filename in (None, str(partial)):  # None if the disk is full
            error.filename = str(path)
        raise
    finally:
        partial.unlink(missing_ok=True)
    if os.name == "posix":  # Windows cannot open a folder
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)


def atomic_write(path: Path, content: bytes | str) -> None:
    """Write a complete file or none.

    Text is encoded as UTF-8. Bytes of a file name that are not UTF-8 are escaped.
    """
    if isinstance(content, str):
        content = content.encode(errors="backslashreplace")
    with atomic_writer(path) as file:
        file.write(content)


def check_output(out: str | None) -> Path | None:
    """The path of the new file `out`. Raises UserError if it exists, or if its folder does not."""
    if out is None:
        return None
    path = Path(os.path.expanduser(out))
    if path.exists() or not path.parent.is_dir():
        raise UserError(
            f"out={out} exists, or its folder does not; set a new file in a folder that exists"
        )
    return path


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Context manager: an empty folder that becomes `path` on success.

    `path` is complete or absent.

    Only one process at a time writes `path`; others wait for it. The next one removes what a
    killed process has left. Raises FileExistsError if `path` exists, perhaps after waiting.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    # The kernel releases the lock when the process ends, even after kill -9.
    with FileLock(f"{unfinished}.lock") as lock:  # also makes the parent folder
        try:
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            yield unfinished
            os.replace(unfinished, path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
            with suppress(OSError):  # Windows does not remove an open file
                os.unlink(lock.lock_file)


def read_file(
    path: Path, parse: Callable[[bytes], Any], advice: str = "restore it, or use another run"
) -> Any:
    """Read and parse a file.

    Raises UserError if it is missing or damaged: a parser can raise anything.
    """
    try:
        return parse(path.read_bytes())
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path} cannot be read ({reason}); {advice}") from None


def read_text(path: str) -> str:
    """Read a text file in UTF-8, without its byte order mark. Line ends do not change.

    Raises UserError.
    """
    return read_file(
        Path(os.path.expanduser(path)),
        lambda content: content.decode("utf-8-sig"),
        "set a text file in UTF-8",
    )


def read_json(path: Path) -> dict:
    """Read an object from a JSON file, or {} if the file does not exist.

    Raises UserError if it is damaged.
    """
    if not path.exists():
        return {}
    return read_file(path, lambda content: {**json.loads(content)}, "restore it, or remove it")


def write_json(path: Path, content: dict) -> None:
    """Write an object as JSON, atomically."""
    atomic_write(path, json.dumps(content, indent=2) + "\n")


def write_csv(rows: list[dict], path: Path) -> None:
    """Write rows with the same keys, which are the columns. None is an empty cell."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    atomic_write(path, file.getvalue())
