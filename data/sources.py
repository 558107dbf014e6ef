"""Where text comes from: each source is a function from a DataConfig to the places (files, addresses) to read.

A text file is one document. Of a table (a data set of the hub, or a .parquet, .jsonl or .csv file) each row is one,
unless data.row_is_document=false. A new source is one function here, in SOURCES, and one YAML file in configs/data/
that names it.
"""

import glob
import hashlib
import logging
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from common.errors import UserError
from data.config import DataConfig
from data.files import TextSource, find, place
from data.tables import read_csv, read_jsonl
from data.text import Piece, chunk_document, read_utf8, slice_documents

ROWS = 200  # of a table at a time
IN_TEXT_FILES = {"json": read_jsonl, "csv": read_csv}  # the others are read by `datasets`


def python_stdlib(config: DataConfig) -> list[TextSource]:
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
    files.sort(key=lambda path: hashlib.sha256(str(path.relative_to(root)).encode()).digest())
    return [TextSource(str(path), "text") for path in files]


def text(config: DataConfig) -> list[TextSource]:
    """Files of the user's own."""
    return find(config.path, "data.path")


def url(config: DataConfig) -> list[TextSource]:
    """A file at a public address."""
    return [place(config.url)]


def hub(config: DataConfig) -> list[TextSource]:
    """A data set of the Hugging Face hub."""
    return [TextSource(config.repo, "hub", config.split)]


SOURCES: dict[str, Callable[[DataConfig], list[TextSource]]] = {f.__name__: f for f in (python_stdlib, text, url, hub)}


def list_sources(config: DataConfig) -> list[TextSource]:
    """What `config` (not a mix) reads; data.path wins. Raises UserError where there is nothing to read."""
    if config.path is not None:
        return text(config)
    if config.source not in SOURCES:
        raise UserError(f"data.source={config.source} is unknown; set one of {', '.join(SOURCES)}")
    return SOURCES[config.source](config)


def held_out(config: DataConfig) -> list[TextSource] | None:
    """What validation reads where it has a text of its own; None: a part of the others. Raises UserError."""
    if config.val_path is not None:
        return find(config.val_path, "data.val_path")
    if config.source == "hub" and config.path is None and config.val_split:
        return [TextSource(config.repo, "hub", config.val_split)]
    return None


def all_places(config: DataConfig) -> list[TextSource]:
    """What `config` reads, also a mix, to train on and held out. Raises UserError."""
    return [place for part in config.parts.values() for place in list_sources(part) + (held_out(part) or [])]


def iter_text(places: list[TextSource], config: DataConfig) -> Iterator[Piece]:
    """The text in the places: documents in pieces, see data/text.py. Nulls in a table are left out.

    Raises UserError where that cannot be had.
    """
    for each in places:
        if not each.is_table:
            path = _downloaded(each.address) if each.is_remote else each.address
            yield from chunk_document(read_utf8(path, each.address))
        elif config.row_is_document:
            for row in _rows(each, config):
                yield from chunk_document([row])
        else:
            yield from chunk_document(_rows(each, config))


def documents(config: DataConfig) -> list[str]:
    """All documents of `config`, whole, in memory. Raises UserError."""
    whole, parts = [], []
    for part in config.parts.values():
        last = None if part.max_documents is None else (part.max_documents, 0)
        for text, ends in slice_documents(iter_text(list_sources(part), part), (0, 0), last):
            parts.append(text)
            if ends:
                whole.append("".join(parts))
                parts = []
    if not any(whole):
        raise UserError(f"{config.label} holds no text; set data.path to a file that does")
    return whole


@cache
def _datasets() -> Any:
    """`datasets`, imported where it is needed, for that takes a second; what it would log is said in one sentence."""
    before = os.environ.get("USE_TORCH")
    os.environ["USE_TORCH"] = "0"  # or it imports torch as well, which takes two more, for nothing that is used here
    try:
        import datasets
    finally:
        if before is None:
            del os.environ["USE_TORCH"]
        else:
            os.environ["USE_TORCH"] = before
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else it tells a server of each file that is read, one's own too
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    return datasets


def _downloaded(address: str) -> str:
    """The path of a copy of a file at a URL, in the cache of `datasets`. Raises UserError."""
    try:
        return _datasets().DownloadManager().download(address)
    except Exception as error:  # many libraries lie between here and the network, each with its own exceptions
        reason = _reason(error.__cause__ or error, address)
        raise UserError(
            f"{address} could not be downloaded ({reason}); get the file by other means and set data.path=FILE"
        ) from error


def _rows(place: TextSource, config: DataConfig) -> Iterator[str]:
    """The texts in a table's column. Raises UserError."""
    path = _downloaded(place.address) if place.is_remote and place.kind != "hub" else place.address
    if place.kind in IN_TEXT_FILES:
        yield from IN_TEXT_FILES[place.kind](path, place.address, config.text_column)
        return
    if os.path.isfile(path) and not os.path.getsize(path):
        return  # `datasets` takes an empty file for a broken one
    if place.is_compressed:
        raise UserError(f"{place.address}: .parquet is compressed in itself and not once more; decompress it")
    try:
        for batch in _batches(place, path, config):
            yield from _texts(batch, place, config.text_column)
    except UserError:
        raise
    except Exception as error:
        # As many lie between here and a table.
        raise UserError(_what_went_wrong(place, error.__cause__ or error)) from error


def _batches(place: TextSource, path: str, config: DataConfig) -> Iterator[Any]:
    """Arrow tables with the column of texts alone, ROWS at a time. Raises UserError, and what `datasets` raises."""
    datasets, column = _datasets(), config.text_column
    if place.kind == "hub":  # gigabytes, so that a terminal shows how far it is; kept in the cache of `datasets`
        if sys.stderr.isatty():
            datasets.enable_progress_bars()
        revision = commit(config.repo, config.revision) or config.revision if place.is_remote else None
        stream = config.stream or not place.is_remote  # of a folder the cache would not see that it changed
        rows = datasets.load_dataset(path, name=config.config, split=place.split, revision=revision, streaming=stream)
    else:
        # Streamed, so that no second copy is written into a cache; and not by row groups, of which one may hold all.
        file = glob.escape(str(Path(path).resolve()))
        rows = datasets.load_dataset("parquet", data_files=[file], split="train", streaming=True, batch_size=ROWS)
    names = rows.column_names or list(next(iter(rows), {}))
    if names and column not in names:
        raise UserError(f"{place.address} has no column {column}; set data.text_column to one of {', '.join(names)}")
    yield from rows.select_columns([column]).with_format("arrow").iter(batch_size=ROWS) if names else ()


def _texts(table: Any, place: TextSource, column: str) -> list[str]:
    kind = table.schema.field(column).type
    if str(kind) not in ("string", "large_string", "string_view", "null"):
        raise UserError(
            f"column {column} of {place.address} holds no text but {kind}; set data.text_column to one that does"
        )
    return [text for text in table[column].to_pylist() if text is not None]


def revisions(config: DataConfig) -> dict[str, str | None]:
    """The commit of each text that is read from the hub; None: it cannot be had now."""
    return {
        name: commit(part.repo, part.revision)
        for name, part in config.parts.items()
        if any(place.kind == "hub" and place.is_remote for place in list_sources(part))
    }


_commits: dict[tuple[str, str | None], str | None] = {}


def commit(repo: str, revision: str | None) -> str | None:
    """The commit that a revision (a branch, None: the main one) of a repository of the hub is at, when first asked.

    So that what is read twice is the same twice. None: without a network; what `datasets` has in its cache decides.
    """
    if (repo, revision) not in _commits:
        from huggingface_hub import HfApi

        try:
            _commits[repo, revision] = HfApi().dataset_info(repo, revision=revision, timeout=10).sha
        except Exception:  # the same error, if it is one, comes again from the reader, which tells it
            _commits[repo, revision] = None
    return _commits[repo, revision]


def pin_revisions(config: DataConfig, revisions: dict[str, str | None]) -> None:
    """From now on each text of the hub is read at this commit, as `revisions` told it earlier."""
    for name, known in revisions.items():
        _commits[config.parts[name].repo, config.parts[name].revision] = known


def _reason(error: Exception, address: str) -> str:
    said = [line for line in str(error).strip().splitlines()[:1] if line != address]  # as some say no more than that
    return ": ".join([type(error).__name__, *said])[:300]


def _what_went_wrong(place: TextSource, error: Exception) -> str:
    """The sentence for what `datasets` raised."""
    reason, address = _reason(error, place.address), place.address
    if place.kind == "hub":
        offline = any(word in f"{type(error).__name__} {error}" for word in ("Connect", "Offline", "resolve host"))
        mend = "check the network" if offline else "mend data.repo, data.config, data.split or data.revision"
        return (
            f"{address} could not be read from the hub ({reason}); {mend}, or get the files by other means and set "
            "data.path=FILES"
        )
    return f"{address} cannot be read as .parquet ({reason}); mend it, or set another data.path"
