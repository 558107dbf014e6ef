"""Where text comes from: each source is a function from a DataConfig to the files (paths or addresses) to read.

A text file is one document. Of a table (a data set of the hub, or a .parquet, .jsonl or .csv file) each row is one.
A new source is one function here, in SOURCES, and one YAML file in configs/data/ that names it.
"""

import glob
import hashlib
import logging
import os
import sysconfig
from collections.abc import Callable
from pathlib import Path

from data.config import DataConfig
from errors import UserError

READERS = {".parquet": "parquet", ".jsonl": "json", ".csv": "csv"}  # of `datasets`, for tables; for all else "text"


def python_stdlib(config: DataConfig) -> list[str]:
    """The source code of the running interpreter's standard library: real text that is on every machine.

    In the order of a hash of the names, so that the end, which is held out for validation, is a fair sample.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    left_out = {"test", "tests", "idle_test", "idlelib", "lib2to3", "encodings", "site-packages", "dist-packages"}
    files = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - left_out  # which may hold ten times as many files as the library itself
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    if not files:
        raise UserError(f"this Python has no standard library source at {root}; set data=text data.path=FILE")
    return [str(p) for p in sorted(files, key=lambda p: hashlib.sha256(str(p.relative_to(root)).encode()).digest())]


def text(config: DataConfig) -> list[str]:
    """A text file of the user's own."""
    return [config.path]


def url(config: DataConfig) -> list[str]:
    """A text file at a public address."""
    return [config.url]


def hub(config: DataConfig) -> list[str]:
    """A data set of the Hugging Face hub. The address names all that decides which rows are read."""
    return [f"hub://{config.repo}?config={config.config}&split={config.split}&revision={config.revision}"]


SOURCES: dict[str, Callable[[DataConfig], list[str]]] = {f.__name__: f for f in (python_stdlib, text, url, hub)}


def files(config: DataConfig) -> list[str]:
    """The paths or URLs that `config` names; data.path wins. Raises UserError where there is nothing to read."""
    if config.path is None:
        if config.source not in SOURCES:
            raise UserError(f"data.source={config.source} is unknown; set one of {', '.join(SOURCES)}")
        return SOURCES[config.source](config)
    path = Path(config.path).expanduser()
    if path.is_dir():
        raise UserError(f"data.path={config.path} is a folder; set data.path to one file in it")
    if not path.is_file():
        raise UserError(f"data.path={config.path} does not exist; set data.path to a file (relative to {Path.cwd()})")
    return [str(path)]


def is_url(file: str) -> bool:
    return file.startswith(("http://", "https://"))


def is_hub(file: str) -> bool:
    return file.startswith("hub://")


def is_remote(file: str) -> bool:
    return is_url(file) or is_hub(file)


def is_table(file: str) -> bool:
    """Whether the text is in a column: then data.text_column says in which."""
    return is_hub(file) or Path(file).suffix.lower() in READERS


def digest(files: list[str], config: DataConfig) -> str:
    """A hash of what the files hold, and of a table's column.

    An address stands for itself: nothing is downloaded just to see that it is the same.
    """
    whole = hashlib.sha256()
    for file in files:
        if is_table(file):
            whole.update(config.text_column.encode())
        if is_remote(file):
            whole.update(file.encode())
        else:
            with open(file, "rb") as f:
                whole.update(hashlib.file_digest(f, "sha256").digest())
    return whole.hexdigest()


def read(files: list[str], config: DataConfig) -> list[str]:
    """The documents: each file's text, or each row's of a table, nulls left out; line ends become newlines.

    Raises UserError where that cannot be had.
    """
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it would log is said in one sentence below
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    try:
        documents = _column(_rows(files, config), config.text_column if is_table(files[0]) else "text", files[0])
    except UserError:
        raise
    except Exception as error:
        # Many libraries lie between here and the network or a table, each with its own exceptions.
        sentence = _what_went_wrong(files, config, error.__cause__ or error)  # `datasets` wraps what its readers raise
        if sentence is None:
            raise
        raise UserError(sentence) from error
    if not any(documents):
        raise UserError(f"{', '.join(files[:3])} holds no text; set data.path to a file that does")
    return documents


def _rows(files: list[str], config: DataConfig):
    """The data set that `datasets` makes of the files, all of one kind."""
    import datasets

    if is_hub(files[0]):  # gigabytes, so that it shows how far it is; kept in the cache of `datasets`
        return datasets.load_dataset(config.repo, name=config.config, split=config.split, revision=config.revision)
    datasets.disable_progress_bars()
    names = [file if is_url(file) else glob.escape(str(Path(file).resolve())) for file in files]
    reader = READERS.get(Path(files[0]).suffix.lower(), "text")
    options = {"text": {"sample_by": "document"}, "csv": {"keep_default_na": False}}.get(reader, {})  # "NA" is a word
    # Local files are streamed, so that no second copy is written into a cache; a URL is downloaded into one.
    stream = not any(is_url(file) for file in files)
    return datasets.load_dataset(reader, data_files=names, split="train", streaming=stream, **options)


def _column(rows, column: str, where: str) -> list[str]:
    """The texts in a column of a data set, without its nulls. Raises UserError where there is no such column."""
    names = rows.column_names or list(next(iter(rows), {}))
    if names and column not in names:
        raise UserError(f"{where} has no column {column}; set data.text_column to one of {', '.join(names)}")
    documents = []
    for row in rows.select_columns([column]):
        if not isinstance(row[column], str | None):
            raise UserError(
                f"column {column} of {where} holds no text but {type(row[column]).__name__}; "
                f"set data.text_column to one of {', '.join(names)}"
            )
        if row[column] is not None:
            documents.append(row[column])
    return documents


def _what_went_wrong(files: list[str], config: DataConfig, error: Exception) -> str | None:
    """The sentence for what `datasets` raised; None for local text, whose failure to be read would be a bug."""
    file, suffix = files[0], Path(files[0]).suffix.lower()
    reason = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
    if is_hub(file):
        return (
            f"{config.repo} could not be read from the hub ({reason}); mend data.repo, data.config, data.split or "
            "data.revision, or get the file by other means and set data.path=FILE"
        )
    if isinstance(error, UnicodeDecodeError) and suffix != ".parquet":
        return where_not_utf8(files, error)
    if is_url(file):
        return f"{file} could not be downloaded ({reason}); get the file by other means and set data.path=FILE"
    return f"{file} cannot be read as {suffix} ({reason}); mend it, or set data.path=FILE" if is_table(file) else None


def where_not_utf8(files: list[str], error: UnicodeDecodeError) -> str:
    for file in files:
        if not is_url(file):
            try:
                Path(file).read_bytes().decode()
            except UnicodeDecodeError as found:
                return (
                    f"{file} is not UTF-8: byte {found.start} is 0x{found.object[found.start]:02x}; "
                    "save it as UTF-8 (iconv -f latin1 -t utf-8, for instance)"
                )
    return f"{files[0]} is not UTF-8 ({error.reason}); save it as UTF-8"
