"""Atomic writes, text of users, and files that can be damaged: JSON and YAML."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

import yaml

from common.errors import UserError

MARKS = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
MIN_NUL_SHARE = 0.1  # of every second byte; in UTF-16, spaces and line ends alone have more
MIN_NUL_SAMPLE = 64  # groups of 4 bytes; shorter samples prove nothing


@contextmanager
def atomic_writer(path: Path) -> Iterator[IO[bytes]]:
    """Context manager: a binary file that replaces `path` on success. After a crash, `path` is the old or new file."""
    partial = path.with_name(
        f"{path.name}.{uuid4().hex}.partial"
    )  # unique: two processes may write `path`
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
    """Write a complete file or none. Text is encoded as UTF-8; bytes of a file name that are not UTF-8 are escaped."""
    with atomic_writer(path) as file:
        file.write(
            content.encode(errors="backslashreplace") if isinstance(content, str) else content
        )


def read_file(
    path: Path, parse: Callable[[bytes], Any], advice: str = "restore it, or set another name"
) -> Any:
    """Read and parse a file. Raises UserError if it is missing or damaged: a parser can raise anything."""
    try:
        return parse(path.read_bytes())
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path} cannot be read ({reason}); {advice}") from None


def read_text(path: str, name: str) -> str:
    """Read a text file in UTF-8. See decode_text. name: of the setting, for messages. Raises UserError."""
    if (
        not Path(path).exists() or Path(path).is_char_device()
    ):  # such as /dev/zero, which has no end
        raise UserError(f"{name} does not exist or is a device; set a text file")
    content = read_file(Path(path), bytes, "set a text file")
    refuse_utf16(content[: 2**16], path)
    return decode_text(content, name)


def refuse_utf16(start: bytes, name: str) -> None:
    """Raise UserError if a file starts like UTF-16 or UTF-32. start: its first bytes. name: for the message."""
    encoding = guess_encoding(start)
    if encoding != "UTF-8":
        advice = f"convert it to UTF-8, for example with iconv -f {encoding} -t UTF-8"
        raise UserError(f"{name} is {encoding}, not UTF-8; {advice}")


def guess_encoding(start: bytes) -> str:
    """The encoding of a text by its mark, or by the bytes of its characters that are NUL. start: its first bytes."""
    marked = [encoding for mark, encoding in MARKS.items() if start.startswith(mark)]
    count = len(start) // 4
    if marked or count < MIN_NUL_SAMPLE:
        return (marked or ["UTF-8"])[0]
    shares = [
        start[i : 4 * count : 4].count(0) / count for i in range(4)
    ]  # of NULs, by position in 4 bytes
    even = shares[0] + shares[2]
    odd = shares[1] + shares[3]
    is_encoding = {
        "UTF-32LE": min(shares[2:]) > 0.9,
        "UTF-32BE": min(shares[:2]) > 0.9,
        "UTF-16LE": odd > MIN_NUL_SHARE and even < odd / 10,
        "UTF-16BE": even > MIN_NUL_SHARE and odd < even / 10,
    }
    return next((encoding for encoding, matches in is_encoding.items() if matches), "UTF-8")


def decode_text(content: bytes, name: str) -> str:
    """Decode UTF-8 without its byte order mark. Line ends do not change. Raises UserError. name: for the message."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is {describe_decode_error(error)}") from None


def describe_decode_error(error: UnicodeDecodeError) -> str:
    """Where a text stops being UTF-8, with up to 20 bytes before that place, and what to do."""
    before = error.object[max(0, error.start - 20) : error.start]
    place = f" after {before!r}" if before else ""
    return f"not UTF-8: byte 0x{error.object[error.start]:02x}{place}; convert it with iconv"


def read_json(path: Path) -> dict:
    """Read an object from a JSON file, or {} if the file does not exist. Raises UserError if it is damaged."""
    return (
        read_file(path, lambda text: {**json.loads(text)}, "restore it, or remove it")
        if path.exists()
        else {}
    )


def parse_yaml(content: bytes, loader: type = yaml.SafeLoader) -> Any:
    """Parse YAML with at most 20 aliases (*name): a few more can stand for billions of values."""
    if (
        sum(isinstance(event, yaml.AliasEvent) for event in yaml.parse(content, yaml.SafeLoader))
        > 20
    ):
        raise yaml.YAMLError("it has more than 20 aliases (*name)")
    return yaml.load(content, loader)


def write_json(path: Path, content: dict) -> None:
    """Write an object as JSON, atomically."""
    atomic_write(path, json.dumps(content, indent=2) + "\n")
