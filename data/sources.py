"""Resolve the config to text sources: which files to read, which to hold out, and a hash of their content.

A new source is a function in SOURCES that returns the files to read, and a YAML file in configs/data/ that sets
`source` to its name. See docs/data.md.
"""

import glob
import hashlib
import io
import json
import os
import re
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from common.errors import UserError
from common.files import atomic_write
from data.config import DataConfig

# Types of the files that are read from a folder, by suffix. A file that data.path names directly may have any suffix.
FILE_TYPES = {".txt": "text", ".md": "text", ".parquet": "parquet", ".jsonl": "json", ".csv": "csv"}
COMPRESSED = {".gz": "gzip", ".zst": "zstd"}
OUTPUT_FOLDERS = ("runs", "data/prepared")  # below the current folder; never read as input
TYPICAL_COMPRESSION = 3  # bytes of text per byte of a compressed file or a .parquet file
DOWNLOAD_TIMEOUT_S = 30.0  # how long a server may send nothing
MIN_CACHED_BYTES = 2**24  # smaller files are always hashed, which is faster than the cache
Position = tuple[int, int]  # (index of the document, index of the character in the document)
# Keys of DataConfig that are fields of TextSource.
SOURCE_SETTINGS = ("revision", "stream", "text_column", "prompt_column", "row_is_document", "max_documents")
SOURCE_SETTINGS += ("val_documents", "val_fraction", "weight", "text_bytes")
STDLIB_EXCLUDED = {"test", "tests", "idle_test", "idlelib", "lib2to3", "encodings", "site-packages", "dist-packages"}


@dataclass(frozen=True)
class InputFile:
    """A local file, a file at a URL, or a split of a hub data set.

    file_type: "text", or a type of table: "parquet", "json", "csv" or "hub".
    """

    address: str
    file_type: str
    split: str | None = None

    @classmethod
    def from_address(cls, address: str) -> "InputFile":
        """The file at a path or URL. Its suffix decides its type."""
        return cls(address, FILE_TYPES.get(_suffix(address), "text"))

    @property
    def is_table(self) -> bool:
        return self.file_type != "text"

    @property
    def compression(self) -> str | None:
        return COMPRESSED.get(Path(self.address).suffix.lower())

    @property
    def is_remote(self) -> bool:
        if self.file_type == "hub":
            return not os.path.isdir(self.address)  # data.repo may be a local copy of a repository
        return self.address.startswith(("http://", "https://"))

    @property
    def dedup_keys(self) -> set[str]:
        """Keys that are equal for all paths of the same file. Slices of one split share a key."""
        address = self.address if self.is_remote else os.path.realpath(self.address)
        if self.split is None:
            return {address}
        return {f"{address}, split {part.split('[')[0].strip()}" for part in self.split.split("+")}


@dataclass(frozen=True)
class TextSource:
    """A source of text, alone or in a mix, with all settings for reading and splitting it.

    files: input for training.
    val_files: separate input for validation. If None, a part of `files` is held out.
    hub_config, revision: of a hub data set; `pin_commits` replaces a branch by its commit.
    The other fields are keys of DataConfig (SOURCE_SETTINGS).
    """

    name: str
    files: list[InputFile]
    val_files: list[InputFile] | None
    hub_config: str | None
    revision: str | None
    stream: bool
    text_column: str | None
    prompt_column: str | None
    row_is_document: bool
    max_documents: int | None
    val_documents: int | None
    val_fraction: float | None
    weight: float
    text_bytes: int | None

    @property
    def end(self) -> Position | None:
        """Position where reading `files` stops. None for the end."""
        return None if self.max_documents is None else (self.max_documents, 0)

    @property
    def columns(self) -> dict[str, str]:
        """The columns of a table that are read, by config key: the prompt if there is one, then the text."""
        columns = {"data.prompt_column": self.prompt_column, "data.text_column": self.text_column}
        return {key: column for key, column in columns.items() if column is not None}

    @property
    def is_streamed(self) -> bool:
        return self.stream and any(file.file_type == "hub" for file in self.files)


def resolve_sources(config: DataConfig) -> list[TextSource]:
    """List the sources of a config, in the order of the mix. Raises UserError if a path or a source does not exist."""
    sources = []
    for name, source in config.mixed.items():
        try:
            files, val_files = _list_files(source), _list_val_files(source)
        except UserError as error:
            raise UserError(f"data.mix.{name}: {error}" if config.mix else str(error)) from None
        settings = {key: getattr(source, key) for key in SOURCE_SETTINGS}
        sources.append(TextSource(name, files, val_files, hub_config=source.config, **settings))
    return sources


def estimate_text_bytes(sources: list[TextSource]) -> int | None:
    """Approximate number of bytes of text in `files` of all sources, from the sizes of the files.

    If a file is not on this machine, text_bytes of its source counts instead. Returns None if text_bytes is not set.
    """
    sizes = []
    for source in sources:
        if any(file.is_remote for file in source.files):
            sizes.append(source.text_bytes)
        else:
            sizes.append(sum(_estimate_file_bytes(file) for file in source.files))
    return None if None in sizes else sum(sizes)


def _estimate_file_bytes(file: InputFile) -> int:
    path = Path(file.address)
    parts = path.rglob("*.*") if path.is_dir() else [path]  # a local copy of a hub data set
    size = sum(part.stat().st_size for part in parts if part.is_file())
    is_compressed = file.compression or file.file_type in ("parquet", "hub")
    return size * TYPICAL_COMPRESSION if is_compressed else size


def all_files(sources: list[TextSource]) -> list[InputFile]:
    return [file for source in sources for file in source.files + (source.val_files or [])]


def python_stdlib(config: DataConfig) -> list[InputFile]:
    """Source code of the running interpreter's standard library: real text that needs no download.

    The files are sorted by a hash of their names, so that the last ones are a fair sample for validation.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - STDLIB_EXCLUDED
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    if not paths:
        raise UserError(f"this Python has no standard library source in {root}; set data=text data.path=FILE")
    paths.sort(key=lambda path: hashlib.sha256(str(path.relative_to(root)).encode()).digest())
    return [InputFile(str(path), "text") for path in paths]


def text(config: DataConfig) -> list[InputFile]:
    """Local files."""
    return find_files(config.path, "data.path")


def url(config: DataConfig) -> list[InputFile]:
    """A file at a public address."""
    return [InputFile.from_address(config.url)]


def hub(config: DataConfig) -> list[InputFile]:
    """A data set of the Hugging Face hub."""
    return [InputFile(config.repo, "hub", config.split)]


SOURCES: dict[str, Callable[[DataConfig], list[InputFile]]] = {f.__name__: f for f in (python_stdlib, text, url, hub)}


def _list_files(config: DataConfig) -> list[InputFile]:
    if config.path is not None:
        return text(config)
    if config.source not in SOURCES:
        raise UserError(f"data.source={config.source} is unknown; set one of {', '.join(SOURCES)}")
    return SOURCES[config.source](config)


def _list_val_files(config: DataConfig) -> list[InputFile] | None:
    if config.val_path is not None:
        return find_files(config.val_path, "data.val_path")
    if config.source == "hub" and config.path is None and config.val_split:
        return [InputFile(config.repo, "hub", config.val_split)]
    return None


def find_commits(sources: list[TextSource]) -> dict[str, str | None]:
    """Find the current commit of each hub data set, by source. A commit is None if the hub cannot be reached."""
    on_hub = [source for source in sources if source.files[0].file_type == "hub" and source.files[0].is_remote]
    return {source.name: _find_commit(source.files[0].address, source.revision) for source in on_hub}


def _find_commit(repo: str, revision: str | None) -> str | None:
    from huggingface_hub import HfApi

    try:
        return HfApi().dataset_info(repo, revision=revision, timeout=10).sha
    except Exception:  # a real error occurs again in the reader, which reports it
        return None


def pin_commits(sources: list[TextSource], commits: dict[str, str | None]) -> list[TextSource]:
    """Replace the revision of each source by its commit, so that all passes read the same data.

    If the commit is unknown, the revision stays, and `datasets` reads the version in its cache.
    """
    return [replace(source, revision=commits.get(source.name) or source.revision) for source in sources]


# Local files


@contextmanager
def report_unreadable(name: str) -> Iterator[None]:
    """Context manager: an error of the operating system becomes a UserError. name: the input, for the message."""
    try:
        yield
    except OSError as error:
        if error.errno is None:  # of a library
            raise
        raise UserError(f"{name} cannot be read ({error.strerror}); set another file") from None


def open_input(path: str | Path) -> IO[bytes]:
    """Open a file for reading. A file of size 0 is not read: in /proc, such files can be endless, or block."""
    return open(path, "rb") if os.path.getsize(path) else io.BytesIO()


def find_files(paths: str | list[str], key: str) -> list[InputFile]:
    """List the files of a path, folder, pattern, URL or list of them: in list order, then by name, without duplicates.

    key: config key for error messages. Raises UserError if there is nothing to read.
    """
    unique = {}  # by real path: a file with two names could be both trained on and held out
    for path in paths if isinstance(paths, list) else [paths]:
        with report_unreadable(f"{key}={path}"):
            for file in _find(path, key):
                unique.setdefault(os.path.realpath(file), file)
    return [InputFile.from_address(file) for file in unique.values()]


def _find(name: str, key: str) -> list[str]:
    path = Path(os.path.expanduser(name))
    if name.startswith(("http://", "https://")):
        return [name]
    if path.is_dir():
        return _find_in_folder(path, key)
    if path.is_file():
        return [str(path)]
    if path.exists():
        raise UserError(f"{key}={name} is a pipe or a device, which cannot be read twice; save it as a file first")
    if name.startswith("[") and name.endswith("]"):
        raise UserError(f'{key}={name} does not exist; a list of files needs quotes: {key}=\'["a.txt", "b.txt"]\'')
    if glob.has_magic(name):
        matches = [match for match in glob.iglob(str(path), recursive=True) if os.path.isfile(match)]
        matches = [match for match in matches if not _is_output(match)]
        if not matches:
            raise UserError(f"{key}={name} matches no file (relative to {Path.cwd()}); set another pattern")
        return sorted(matches, key=_natural_order)
    raise UserError(
        f"{key}={name} does not exist; set {key} to a file, a folder or a pattern (relative to {Path.cwd()})"
    )


def _find_in_folder(folder: Path, key: str) -> list[str]:
    """List files with a known suffix below a folder. Hidden files are skipped; links to folders are followed once."""
    files, visited = [], set()
    for parent, subfolders, names in os.walk(folder, followlinks=True):
        is_new = os.path.realpath(parent) not in visited  # a link can lead back to a folder that contains it
        visited.add(os.path.realpath(parent))
        subfolders[:] = sorted(name for name in subfolders if is_new and not name.startswith("."))
        files += [Path(parent, name) for name in names if not name.startswith(".")]
    files = [path for path in files if path.is_file() and not _is_output(path)]
    readable = [str(path) for path in files if _suffix(path.name) in FILE_TYPES]
    if not readable:
        raise UserError(
            f"{key}={folder} contains no {', '.join(FILE_TYPES)} file (also with {' or '.join(COMPRESSED)}); "
            f"for other text files, set a pattern such as {key}='{folder}/**/*.py'"
        )
    return sorted(readable, key=_natural_order)


def _suffix(address: str) -> str:
    """The lower-case suffix without compression: .jsonl for a.jsonl, a.jsonl.gz and a.JSONL."""
    path = Path(address.lower())
    return Path(path.stem).suffix if path.suffix in COMPRESSED else path.suffix


def _is_output(path: str | Path) -> bool:
    return any(Path(path).resolve().is_relative_to(Path(folder).resolve()) for folder in OUTPUT_FOLDERS)


def _natural_order(name: str) -> list:
    """Sort key that puts part-9 before part-10."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


# Content


def hash_content(files: list[InputFile], cache: Path) -> str:
    """SHA-256 of the content of all local files and the addresses of all remote files. Nothing is downloaded.

    cache: a JSON file with the hashes of large files, by path, size and times.
    """
    total = hashlib.sha256()
    with hash_cache(cache) as known:
        for file in files:
            total.update(json.dumps([file.file_type, file.split]).encode())
            if file.is_remote:
                total.update(file.address.encode())
                continue
            root = Path(file.address)
            for path in sorted(root.rglob("*")) if root.is_dir() else [root]:
                if path.is_file():
                    name = str(path.relative_to(root)) if root.is_dir() else ""  # `datasets` derives splits from names
                    with report_unreadable(str(path)):
                        total.update((name + hash_file(path, known)).encode())
    return total.hexdigest()


@contextmanager
def hash_cache(path: Path) -> Iterator[dict[str, str]]:
    """Context manager: the `known` hashes of hash_file, from a JSON file that is written if hashes were added."""
    known = {}
    with suppress(OSError, ValueError):
        saved = json.loads(path.read_text())
        known = saved if isinstance(saved, dict) else {}
    size_before = len(known)
    try:
        yield known
    finally:
        if len(known) > size_before:
            with suppress(OSError):  # the cache is optional: a full disk costs time, not correctness
                path.parent.mkdir(parents=True, exist_ok=True)
                atomic_write(path, json.dumps(known))


def hash_file(path: Path, known: dict[str, str]) -> str:
    """SHA-256 of a file; added to `known` if the file is large and was not modified within the last 2 s."""
    stat = path.stat()
    key = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ctime_ns}:{stat.st_ino}"
    if key in known:
        return known[key]
    with open_input(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # A file that was modified just now can change again without a new modification time.
    if stat.st_size >= MIN_CACHED_BYTES and time.time_ns() - stat.st_mtime_ns > 2e9:
        known[key] = digest
    return digest
