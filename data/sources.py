"""Resolve the config to sources: which files to read, which to hold out, and a hash of their content.

A file is a path, a URL, or hub:REPO:SPLIT. A new source is a function in SOURCES that returns the files to read, and a
YAML file in configs/data/ that sets `source` to its name. See docs/data.md.
"""

import glob
import hashlib
import itertools
import json
import os
import re
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from common.errors import UserError
from common.settings import format_value
from data.config import DataConfig

CSV_DELIMITERS = {".csv": ",", ".tsv": "\t"}
FOLDER_TABLES = (".parquet", ".jsonl", ".ndjson", ".jsonlines", *CSV_DELIMITERS)
TABLES = (
    *FOLDER_TABLES,
    ".json",
)  # .json: JSON lines; other files of this name are common in folders
SUFFIXES = (
    ".txt",
    ".md",
    *FOLDER_TABLES,
)  # read from a folder; a file that data.path names may have any suffix
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
TYPICAL_COMPRESSION = 3  # bytes of text per byte of a compressed or .parquet file
OUTPUT_FOLDERS = ("runs", "data/prepared")  # below the current folder; never read as input
HASHED_BYTES = 2**26  # of a larger file, one megabyte at its start, middle and end is hashed
# Keys that determine which documents are read from the files, and which are held out.
READING_KEYS = (
    "config",
    "revision",
    "text_column",
    "prompt_column",
    "row_is_document",
    "max_documents",
)
READING_KEYS += ("val_documents", "val_fraction")
TABLE_KEYS = (
    "prompt_column",
    "text_column",
    "row_is_document",
)  # have no effect on files without columns
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
    return file.startswith(("hub:", "http://", "https://"))


def suffix(file: str) -> str:
    """The lower-case suffix without compression: .jsonl for a.jsonl, a.JSONL.gz and https://b.c/a.jsonl?download."""
    return Path(re.sub(r"(\.gz|\.zst)?(\?.*)?$", "", file.lower())).suffix


def is_table(file: str) -> bool:
    return file.startswith("hub:") or suffix(file) in TABLES


@dataclass(frozen=True)
class Source:
    """A source of text, alone or in a mix."""

    name: str
    config: DataConfig
    files: list[str]
    val_files: list[str]  # separate input for validation; empty: a part of `files` is held out
    has_several_documents: bool  # whether it can have several; a text file is one document
    text_bytes: (
        int | None
    )  # approximate size of the text in `files`; None: unknown, not on this machine


def python_stdlib(config: DataConfig) -> list[str]:
    """Source code of the interpreter's standard library, sorted by a hash: the last files are a fair sample."""
    root = Path(sysconfig.get_paths()["stdlib"])
    names = []
    for parent, folders, files in os.walk(root):
        folders[:] = set(folders) - STDLIB_EXCLUDED
        names += [Path(parent, file).relative_to(root) for file in files if file.endswith(".py")]
    return [
        str(root / name)
        for name in sorted(names, key=lambda name: hashlib.sha256(str(name).encode()).digest())
    ]


SOURCES: dict[str, Callable[[DataConfig], list[str]]] = {
    "python_stdlib": python_stdlib,
    "text": lambda config: find_files(config.path, "data.path"),
    "hub": lambda config: [f"hub:{config.repo}:{part}" for part in str(config.split).split("+")],
}


def resolve_sources(config: DataConfig) -> list[Source]:
    """List the sources of a config with their files. Raises UserError if one is missing or in both splits."""
    sources = []
    for name, part in config.mixed.items():
        key, val_files = f"data.mix.{name}" if config.mix else "data", []
        if part.source not in SOURCES:
            raise UserError(
                f"{key}.source={part.source} is unknown; set one of {', '.join(SOURCES)}"
            )
        files = (
            find_files(part.path, f"{key}.path")
            if part.path is not None
            else SOURCES[part.source](part)
        )
        if part.val_path is not None:
            val_files = find_files(part.val_path, f"{key}.val_path")
        elif part.val_split and part.path is None:
            val_files = [f"hub:{part.repo}:{split}" for split in part.val_split.split("+")]
        _check_keys(part, files + val_files, key)
        has_several = len(files + val_files) > 1 or (is_table(files[0]) and part.row_is_document)
        has_several |= part.separator is not None
        size = part.text_bytes
        if not any(map(is_remote, files)):
            packed = sum(
                os.path.getsize(file)
                for file in files
                if file.lower().endswith((*COMPRESSED, ".parquet"))
            )
            size = sum(map(os.path.getsize, files)) + packed * (TYPICAL_COMPRESSION - 1)
        sources.append(Source(name, part, files, val_files, has_several, size))
    for source, other in itertools.product(sources, repeat=2):
        held_out = other.val_files or (other.files if other is not source else [])
        if shared := set(map(_identity, source.files)) & set(map(_identity, held_out)):
            fix = "remove it from one of them, or hold out a part of it with val_fraction or val_documents"
            raise UserError(f"{min(shared)} would be used for both training and validation; {fix}")
    return sources


def _check_keys(config: DataConfig, files: list[str], section: str) -> None:
    """Raise UserError for a key of tables without a table, or a separator without a text file."""
    tables = sum(map(is_table, files))
    for key in TABLE_KEYS:
        value = getattr(config, key)
        default = getattr(DataConfig, key)
        if (
            tables == 0 and value != default and config.source != "hub"
        ):  # the YAML file of a data set may set the key
            problem = f"{section}.{key}={format_value(value)} has no effect, because {files[0]} has no columns"
            advice = f"set {section}.path to .jsonl, .csv or .parquet, or {section}.{key}={format_value(default)}"
            raise UserError(f"{problem}; {advice}")
    if config.separator is not None and tables == len(files):
        raise UserError(
            f"{section}.separator is for text files, and {files[0]} is a table; set {section}.separator=null"
        )


def _identity(file: str) -> str:
    """The real path of a file, or the hub's split that a slice is from: equal for files with common text."""
    return file.split("[")[0] if is_remote(file) else os.path.realpath(file)


def find_files(paths: str | list[str], key: str) -> list[str]:
    """List the files of a path, folder, pattern, URL or list of them, each once. key: config key for UserErrors."""
    unique: dict[str, str] = {}  # by real path
    outputs = tuple(f"{os.path.realpath(folder)}/" for folder in OUTPUT_FOLDERS)
    for name in map(str, paths if isinstance(paths, list) and paths else [paths]):
        path = os.path.expanduser(name).rstrip("/")
        if os.path.isdir(path):
            found = [
                os.path.join(parent, file) for parent, _, files in os.walk(path) for file in files
            ]
            found = [
                file for file in found if suffix(file) in SUFFIXES and "/." not in file[len(path) :]
            ]
        else:
            found = glob.glob(path, recursive=True)
        found = [
            file
            for file in found
            if os.path.isfile(file) and not os.path.realpath(file).startswith(outputs)
        ]
        found = [name] if is_remote(name) else [path] if os.path.isfile(path) else found
        if not found:
            advice = f"set a file, a folder with {', '.join(SUFFIXES)} files, or a pattern such as texts/*.py"
            if "[" in name:
                advice += "; in a pattern, write [[] for the character ["
            raise UserError(f"{key}={name} has no file to read in {Path.cwd()}; {advice}")
        # part-9 is before part-10
        found.sort(
            key=lambda file: [
                int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", file)
            ]
        )
        unique |= {
            os.path.realpath(file): file for file in found if os.path.realpath(file) not in unique
        }
    return list(unique.values())


def hash_sources(sources: list[Source]) -> str:
    """SHA-256 of the content of all local files, of the names of all others, and of how they are read and split."""
    total = hashlib.sha256()
    for source in sources:
        values = [source.name, *(getattr(source.config, key) for key in READING_KEYS)]
        if source.config.separator is not None:  # otherwise, the hash is that of earlier versions
            values.append(source.config.separator)
        total.update(json.dumps(values).encode())
        for file in [*source.files, "validation", *source.val_files]:
            if not os.path.isfile(file):
                total.update(file.encode())
                continue
            size = os.path.getsize(file)
            count = size if size <= HASHED_BYTES else 2**20
            total.update(f"{suffix(file)} {size}".encode())
            with open(file, "rb") as stream:
                for start in sorted({0, (size - count) // 2, size - count}):
                    stream.seek(start)
                    total.update(stream.read(count))
    return total.hexdigest()
