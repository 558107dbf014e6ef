"""Where text comes from: the files of a source, and a hash of their content.

A file is a path, a URL, or hub:REPO:SPLIT. data/readers.py reads the documents in it. A new source
is a function in SOURCES that returns the files to read, and a YAML file in configs/data/ that sets
`source` to its name (docs/data.md).
"""

import csv
import difflib
import glob
import hashlib
import json
import os
import re
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.settings import unknown_value
from data.config import DataConfig

# Options of csv.reader. In a .tsv file, a quote is an ordinary character.
CSV_OPTIONS = {".csv": {}, ".tsv": {"delimiter": "\t", "quoting": csv.QUOTE_NONE}}
FOLDER_TABLES = (".parquet", ".jsonl", ".ndjson", ".jsonlines", *CSV_OPTIONS)
# A .json file has one object per line. It is not read from a folder, where other .json files are
# common.
TABLES = (*FOLDER_TABLES, ".json")
# Read from a folder. A file that data.path names may have any suffix.
FOLDER_SUFFIXES = (".txt", ".md", *FOLDER_TABLES)
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}  # Arrow's names by the last suffix
COMPRESSION_RATIOS = {".gz": 3, ".zst": 3}  # typical of prose and code, to choose a preset
OUTPUT_FOLDERS = ("runs", "data/prepared")  # below the current folder; never read as input
MAX_HASHED_BYTES = 2**26  # larger files: only one megabyte at the start, middle and end is hashed
# Keys that determine which documents are read from the files, and which are held out. In the order
# in which they are hashed.
READING_KEYS = (
    "config",
    "revision",
    "text_column",
    "prompt_column",
    "row_is_document",
    "max_documents",
    "val_documents",
    "val_fraction",
)
STDLIB_EXCLUDED = {
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "encodings",
    "site-packages",
    "dist-packages",
}


def is_remote(file: str) -> bool:
    """Whether a file is on the Hugging Face hub or a URL."""
    return file.startswith(("hub:", "http://", "https://"))


def without_query(file: str) -> str:
    """A URL without its query, as in ?download. Names of local files may have question marks."""
    return file.partition("?")[0] if is_remote(file) else file


def suffix(file: str) -> str:
    """The lower-case suffix without compression and query.

    .jsonl for a.jsonl, a.JSONL.gz and https://b.c/a.jsonl?download.
    """
    return Path(re.sub(r"(\.gz|\.zst)$", "", without_query(file).lower())).suffix


def is_table(file: str) -> bool:
    """Whether a file has rows and columns. Other files are text."""
    return file.startswith("hub:") or suffix(file) in TABLES


@dataclass(frozen=True)
class Source:
    """The files of a text, and how to read them."""

    config: DataConfig
    files: list[str]
    val_files: list[str]  # separate files for validation; empty: a part of `files` is held out

    @property
    def has_several_documents(self) -> bool:
        """Whether the source can have several documents. A text file is one document."""
        return (
            len(self.files + self.val_files) > 1
            or self.config.separator is not None
            or (is_table(self.files[0]) and self.config.row_is_document)
        )

    @property
    def text_bytes(self) -> int | None:
        """Size of `files`, or data.text_bytes if they are not on this machine. None: unknown.

        The size of a compressed file is an estimate.
        """
        if any(map(is_remote, self.files)):
            return self.config.text_bytes
        return sum(
            os.path.getsize(file) * COMPRESSION_RATIOS.get(Path(file).suffix.lower(), 1)
            for file in self.files
        )


def python_stdlib(config: DataConfig) -> list[str]:
    """Source code of the interpreter's standard library.

    Files are sorted by a hash of their names, so that the last ones, which are held out, are a fair
    sample.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for parent, folders, files in os.walk(root):
        folders[:] = set(folders) - STDLIB_EXCLUDED
        paths += [Path(parent, file) for file in files if file.endswith(".py")]
    paths.sort(key=lambda path: hashlib.sha256(str(path.relative_to(root)).encode()).digest())
    return list(map(str, paths))


def text(config: DataConfig) -> list[str]:
    """The files of data.path."""
    return find_files(config.path, "data.path")


def hub(config: DataConfig) -> list[str]:
    """The splits of a data set of the Hugging Face hub. data.split: such as train+test[:10%]."""
    return [f"hub:{config.repo}:{split}" for split in str(config.split).split("+")]


SOURCES: dict[str, Callable[[DataConfig], list[str]]] = {
    "python_stdlib": python_stdlib,
    "text": text,
    "hub": hub,
}


def resolve_source(config: DataConfig) -> Source:
    """Find the files of a config.

    Raises UserError if there is none, or if a file would be used for both training and validation.
    """
    if config.source not in SOURCES:
        raise unknown_value("data.source", config.source, SOURCES)
    files = text(config) if config.path is not None else SOURCES[config.source](config)
    val_files = []
    if config.val_path is not None:
        val_files = find_files(config.val_path, "data.val_path")
    elif config.val_split and config.path is None:
        val_files = hub(replace(config, split=config.val_split))
    if config.prompt_column is not None and not all(map(is_table, files + val_files)):
        raise UserError("data.prompt_column is for tables, not for text files; set null")
    if config.separator is not None and all(map(is_table, files + val_files)):
        raise UserError("data.separator is for text files, not for tables; set null")
    shared = set(map(_identify, files)) & set(map(_identify, val_files))
    if shared:
        raise UserError(
            f"{min(shared)} would be used for both training and validation; remove it from one of "
            "them, or hold out a part of it with data.val_fraction or data.val_documents"
        )
    return Source(config, files, val_files)


def _identify(file: str) -> str:
    """Equal for files with common text: the real path, or a split of the hub without its slice."""
    return file.split("[")[0] if is_remote(file) else os.path.realpath(file)


def find_files(paths: str | list[str], key: str) -> list[str]:
    """List the files of a path, folder, pattern or URL, or of a list of them, each file once.

    key: the config key, for UserErrors.
    """
    if not isinstance(paths, list) or not paths:  # an empty list finds no file
        paths = [paths]
    unique: dict[str, str] = {}  # by real path
    for path in paths:
        path = os.path.expanduser(str(path))
        found = _list_files(path)
        if not found:
            folder, name = os.path.split(path)
            others = set(glob.glob("*", root_dir=folder)) - {name}
            similar = difflib.get_close_matches(name, others, n=1)
            hint = f" (did you mean {os.path.join(folder, similar[0])}?)" if similar else ""
            raise UserError(
                f"{key}={path} has no file to read in {Path.cwd()}{hint}; set a file, a "
                f"folder with {', '.join(FOLDER_SUFFIXES)} files, a pattern such as texts/*.py, or "
                """a list such as '["a.txt", "b.txt"]'"""
            )
        for file in found:
            unique.setdefault(os.path.realpath(file), file)
    return list(unique.values())


def _list_files(path: str) -> list[str]:
    """List the files of a path, folder, pattern or URL. Empty if there are none."""
    if is_remote(path) or os.path.isfile(path):
        return [path]
    if os.path.isdir(path):
        found = [
            str(file)
            for file in Path(path).rglob("*")  # does not follow linked folders
            if (suffix(file.name) in FOLDER_SUFFIXES or file.is_dir())
            and "/." not in f"/{file.relative_to(path)}"
        ]
    else:
        found = [file for file in glob.glob(path, recursive=True) if not os.path.isdir(file)]
    outputs = tuple(f"{os.path.realpath(folder)}/" for folder in OUTPUT_FOLDERS)
    found = [file for file in found if not os.path.realpath(file).startswith(outputs)]
    for file in found:
        if not os.access(file, os.R_OK):
            raise UserError(
                f"{file} cannot be read; change its permissions, restore the file that it links "
                "to, or set a pattern without it"
            )
    return sorted(filter(os.path.isfile, found), key=_split_numbers)


def _split_numbers(file: str) -> tuple[list[str | int], str]:
    """Sort key: part-9 is before part-10, and part-09 before part-9."""
    parts = re.split(r"(\d+)", file)  # text and numbers take turns
    return [int(part) if part.isdecimal() else part for part in parts], file


def hash_source(source: Source) -> str:
    """SHA-256 of everything that determines the documents of both splits.

    This is the content of local files, the names of all others, and READING_KEYS.
    """
    config = source.config
    values = [config.name, *(getattr(config, key) for key in READING_KEYS)]
    if config.separator is not None:  # otherwise, the hash equals the one of earlier versions
        values.append(config.separator)
    total = hashlib.sha256(json.dumps(values).encode())
    for file in [*source.files, "validation", *source.val_files]:
        if os.path.isfile(file):
            _hash_file(file, total)
        else:
            total.update(file.encode())
    return total.hexdigest()


def _hash_file(file: str, total: Any) -> None:
    """Add the suffix, size and content of a file to a hash, or of a large file a sample of it."""
    size = os.path.getsize(file)
    total.update(f"{suffix(file)} {size}".encode())
    with open(file, "rb") as stream:
        if size <= MAX_HASHED_BYTES:
            total.update(stream.read(size))
            return
        for start in (0, (size - 2**20) // 2, size - 2**20):
            stream.seek(start)
            total.update(stream.read(2**20))
