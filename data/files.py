"""Which files a path names, what kind each is of, and a hash of what they hold."""

import glob
import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.errors import UserError

# What is looked for in a folder; a file that is named may be any, and is a text.
KINDS = {".txt": "text", ".md": "text", ".parquet": "parquet", ".jsonl": "json", ".csv": "csv"}
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
LARGE = 2**24  # bytes: a smaller file is hashed sooner than its hash is looked up


@dataclass(frozen=True)
class TextSource:
    """Something to read: address: a path, a URL, or the name of a data set of the hub, with its split.

    kind: text, or what reads a table: parquet, json, csv, hub.
    """

    address: str
    kind: str
    split: str | None = None

    @property
    def dedup_keys(self) -> set[str]:
        """The same for the same text, by whichever path it was found. Of a split's slices none is told from another."""
        where = self.address if self.is_remote else os.path.realpath(self.address)
        if self.split is None:
            return {where}
        return {f"{where}, split {part.split('[')[0].strip()}" for part in self.split.split("+")}

    @property
    def is_table(self) -> bool:
        return self.kind != "text"

    @property
    def is_compressed(self) -> bool:
        return Path(self.address).suffix.lower() in COMPRESSED

    @property
    def is_remote(self) -> bool:
        if self.kind == "hub":
            return not os.path.isdir(self.address)  # a hub's repository, fetched by other means
        return self.address.startswith(("http://", "https://"))


def place(address: str) -> TextSource:
    """The file at a path or URL, of the kind that its name says."""
    return TextSource(address, KINDS.get(_suffix(address), "text"))


def _suffix(address: str) -> str:
    """.jsonl of a.jsonl, of a.jsonl.gz and of a.JSONL."""
    path = Path(address.lower())
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def open_file(path: str, name: str) -> Any:
    """A file of bytes, decompressed where its name says that it is compressed. Raises OSError.

    By Arrow, which notices where a compressed file ends too early; Python's zstandard does not.
    """
    compression = COMPRESSED.get(Path(name).suffix.lower())
    if compression is None:
        return open(path, "rb")
    import pyarrow

    return pyarrow.input_stream(path, compression=compression)


def find(given: str | list[str], key: str) -> list[TextSource]:
    """The files that a path, or each of a list of them, names: itself, those below a folder, those of a pattern.

    In the order of the list, and of their names. Raises UserError, with the key, where there is nothing to read.
    """
    own, found = _own(), []
    for name in given if isinstance(given, list) else [given]:
        path = Path(os.path.expanduser(name))
        if name.startswith(("http://", "https://")):
            found.append(name)
        elif path.is_dir():
            found += _below(path, key)
        elif path.exists():
            if not path.is_file():
                raise UserError(f"{key}={name} is no file that could be read twice; write it into one and name that")
            found.append(str(path))
        elif name.startswith("[") and name.endswith("]"):
            raise UserError(f'{key}={name} does not exist; a list of files takes quotes: {key}=\'["a.txt", "b.txt"]\'')
        elif glob.has_magic(name):
            matches = [match for match in glob.iglob(str(path), recursive=True)
                       if os.path.isfile(match) and not _is_own(match, own)]  # fmt: skip
            if not matches:
                raise UserError(f"{key}={name} matches no file (relative to {Path.cwd()}); set another pattern")
            found += sorted(matches, key=_in_order)
        else:
            raise UserError(f"{key}={name} does not exist; set {key} to a file, a folder or a pattern "
                            f"(relative to {Path.cwd()})")  # fmt: skip
    once = {}  # each, or it would be both trained on and held out
    for file in found:
        once.setdefault(os.path.realpath(file), file)
    return [place(file) for file in once.values()]


def _below(folder: Path, key: str) -> list[str]:
    """The files in a folder whose names say that they are texts or tables, hidden ones left out."""
    own, files, seen = _own(), [], set()
    for where, folders, names in os.walk(folder, followlinks=True):
        if os.path.realpath(where) in seen:
            folders.clear()  # a link to what is there already
            continue
        seen.add(os.path.realpath(where))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files += [Path(where, name) for name in names if not name.startswith(".")]
    files = [path for path in files if path.is_file() and not _is_own(path, own)]
    texts = [str(path) for path in files if _suffix(path.name) in KINDS]
    if not texts:
        others = Counter(path.suffix or path.name for path in files).most_common(3)
        there = ", ".join(f"{count} {suffix}" for suffix, count in others)
        raise UserError(
            f"{key}={folder} has no file in {', '.join(KINDS)}, nor compressed as {' or '.join(COMPRESSED)} "
            f"({f'but {there}' if there else 'it is empty'}); for other texts set a pattern, as in "
            f"{key}='{folder}/**/*.py'"
        )
    return sorted(texts, key=_in_order)


def _own() -> list[Path]:
    """Where there is what was made from texts, and is none."""
    return [Path("runs").resolve(), Path("data/prepared").resolve()]


def _is_own(path: str | Path, own: list[Path]) -> bool:
    return any(Path(path).resolve().is_relative_to(each) for each in own)


def _in_order(name: str) -> list:
    """part-10 comes behind part-9."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def content_hash(places: Iterable[TextSource], cache: Path) -> str:
    """A hash of what the places hold. An address stands for itself: nothing is downloaded to see that it is the same.

    cache: a file that keeps the hashes of large files, by path, size and times.
    """
    known, new = _known(cache), {}
    whole = hashlib.sha256()
    for each in places:
        whole.update(json.dumps([each.kind, each.split]).encode())
        if each.is_remote:
            whole.update(each.address.encode())
            continue
        path = Path(each.address)
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if file.is_file():
                name = str(file.relative_to(path)) if path.is_dir() else ""  # which there decides the split
                whole.update((name + _hash(file, known, new)).encode())
    if new:
        with suppress(OSError):  # a disk that takes no more: the hash is made anew each time
            cache.parent.mkdir(parents=True, exist_ok=True)
            partial = cache.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps(known | new))
            os.replace(partial, cache)
    return whole.hexdigest()


def _known(cache: Path) -> dict[str, str]:
    with suppress(OSError, ValueError):
        known = json.loads(cache.read_text())
        return known if isinstance(known, dict) else {}
    return {}


def _hash(file: Path, known: dict[str, str], new: dict[str, str]) -> str:
    about = file.stat()
    key = f"{file.resolve()}:{about.st_size}:{about.st_mtime_ns}:{about.st_ctime_ns}:{about.st_ino}"
    found = known.get(key)
    if found is None:
        with open(file, "rb") as f:
            found = hashlib.file_digest(f, "sha256").hexdigest()
        # One that changed this moment may change again without another time.
        if about.st_size >= LARGE and time.time_ns() - about.st_mtime_ns > 2e9:
            new[key] = found
    return found
