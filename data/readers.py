"""Read documents from text files, tables, URLs and data sets of the Hugging Face hub.

A text file is one document, unless data.separator divides it. Each row of a table is a document,
unless data.row_is_document is false. The text does not change, and columns of tables are read as
strings: "NA" stays "NA".

Documents are read in pieces of at most MAX_PIECE_CHARS characters, so a text file can be larger
than the memory. A row of a table, or a document between separators, must fit into memory.

iter_documents yields documents, and iter_pieces yields pieces. Below them are the readers of text
files, of rows, and of each format of a table. Only this file imports `datasets`.
"""

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, NamedTuple

from common.errors import UserError
from common.settings import unescape
from data.config import DataConfig
from data.sources import (
    COMPRESSED,
    CSV_OPTIONS,
    Source,
    is_remote,
    is_table,
    suffix,
    without_query,
)

MAX_PIECE_CHARS = 2**20
WORD_END_CHARS = 1000  # a piece ends after the last word in its last 1,000 characters
BATCH_ROWS = 200  # of a .parquet file or a hub data set, read at a time
ADVICE = "set another data.path, data.text_column or data.prompt_column"

# For the whole process. This is the largest limit on Windows; the default is 131,072.
csv.field_size_limit(2**31 - 1)


class Piece(NamedTuple):
    """Part of a document, or of its prompt."""

    text: str
    ends_document: bool
    is_prompt: bool


def iter_documents(source: Source) -> Iterator[list[Piece]]:
    """Yield the pieces of each document of a source.

    The documents include those that a training run would hold out, but no separate validation
    files. Raises UserError.
    """
    document = []
    for piece in iter_pieces(source):
        document.append(piece)
        if piece.ends_document:
            yield document
            document = []


def iter_pieces(source: Source, is_validation: bool = False) -> Iterator[Piece]:
    """Yield the documents of a source, or of its separate validation files, in pieces.

    Raises UserError if a file cannot be read, and after the last piece if there was no text, or no
    prompt although data.prompt_column is set.
    """
    config = source.config
    files = source.val_files if is_validation else source.files
    max_documents = None if is_validation else config.max_documents
    missing = {"text"} if config.prompt_column is None else {"text", "prompt"}
    num_documents = 0
    for piece in chain.from_iterable(_iter_file(file, config) for file in files):
        if piece.text != "":
            missing.discard("prompt" if piece.is_prompt else "text")
        yield piece
        num_documents += piece.ends_document
        if num_documents == max_documents:
            break
    if files and missing:
        raise UserError(f"there is no {max(missing)} in {', '.join(files[:3])}; {ADVICE}")


def _iter_file(file: str, config: DataConfig) -> Iterator[Piece]:
    """Yield the pieces of a file. Raises UserError if it cannot be read."""
    try:
        if not is_table(file):
            for parts in _iter_text_file(file, config.separator):
                yield from cut_into_pieces(parts)
        elif config.row_is_document:
            for text, prompt in _iter_rows(file, config):
                if config.prompt_column is not None:
                    yield from cut_into_pieces([prompt], is_prompt=True)
                yield from cut_into_pieces([text])
        else:  # one document of all rows, with nothing between them
            yield from cut_into_pieces(text for text, _ in _iter_rows(file, config))
    except UserError:
        raise
    except Exception as error:  # pyarrow, datasets and the network have exceptions of many types
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        advice = (
            "correct the file: text must be UTF-8 (iconv -f ENCODING -t UTF-8), not compressed, or "
            "once as .gz or .zst (zstd -d --long=31 decompresses a window above 128 MB)"
        )
        if is_remote(file):
            advice = "check the network and data.text_column, or set data.path to a local copy"
        elif is_table(file):
            advice = f"correct the file (text must be UTF-8), or {ADVICE}"
        raise UserError(f"{file} cannot be read ({reason}); {advice}") from error


def cut_into_pieces(parts: Iterable[str], is_prompt: bool = False) -> Iterator[Piece]:
    """Join the parts of one document, or of its prompt, and cut it into pieces, between words.

    Raises ValueError for half a surrogate pair, which JSON can contain.
    """
    pending = ""  # the text that is not in a piece yet
    for part in parts:
        part.encode()  # raises ValueError
        pending += part
        start = 0
        while len(pending) - start > MAX_PIECE_CHARS:
            stop = _find_cut(pending, start)
            yield Piece(pending[start:stop], ends_document=False, is_prompt=is_prompt)
            start = stop
        pending = pending[start:]
    # A prompt does not end its document: the text follows.
    yield Piece(pending, ends_document=not is_prompt, is_prompt=is_prompt)


def _find_cut(text: str, start: int) -> int:
    """The end of the piece that begins at `start`: before the last space that follows a word.

    A cut there does not change the tokens, because no BPE pattern used here (GPT-2's, GPT-4's,
    ours) has a match that continues from a word into a space. Text without spaces, as in some
    scripts, is cut anywhere.
    """
    stop = start + MAX_PIECE_CHARS
    search_from = max(start, stop - WORD_END_CHARS)
    # .* matches as much as possible, so the match ends with the last word
    match = re.match(r"(?s).*\S(?= )", text[search_from:stop])
    return stop if match is None else search_from + match.end()


# Text files


def _iter_text_file(file: str, separator: str | None) -> Iterator[Iterable[str]]:
    """Yield each document of a text file, in parts. Empty documents between separators are skipped.

    The parts must be read before the next document.
    """
    with _open_text(file) as stream:
        parts = _read_parts(stream)
        if separator is None:
            yield parts
        else:
            for document in filter(None, _split_documents(parts, unescape(separator))):
                yield [document]


def _read_parts(stream: io.TextIOWrapper) -> Iterator[str]:
    """Yield the text of a stream in parts. Raises ValueError for NUL bytes."""
    while part := stream.read(MAX_PIECE_CHARS):
        if "\0" in part:
            raise ValueError(
                "it has NUL bytes, as archives, binary files, and text in UTF-16LE, UTF-16BE, "
                "UTF-32LE and UTF-32BE have"
            )
        yield part


def _split_documents(parts: Iterable[str], separator: str) -> Iterator[str]:
    r"""Yield the documents between separators. A \n in the separator also matches \r\n."""
    # re.escape writes a newline as a backslash and a newline.
    pattern = re.compile(re.escape(separator).replace("\\\n", "\r?\n"))
    pending = ""  # the current document, whose end can be the beginning of a separator
    for part in parts:
        *ended, pending = pattern.split(pending + part)
        yield from ended
    yield pending


# Tables


def _iter_rows(file: str, config: DataConfig) -> Iterator[tuple[str, str]]:
    """Yield text and prompt of each row. A prompt that is null or has no column is empty.

    Skips rows whose text is null. Raises ValueError if another value is neither text nor null.
    """
    columns = list(filter(None, [config.text_column, config.prompt_column]))
    for number, row in enumerate(_iter_table(file, columns, config), start=1):
        for column in columns:
            if not isinstance(row.get(column), str | None):
                raise ValueError(
                    f"the column {column} contains {type(row[column]).__name__}, not text, in row "
                    f"{number}"
                )
        text = row.get(config.text_column)
        if text is not None:
            yield text, row.get(config.prompt_column) or ""


def _iter_table(file: str, columns: list[str], config: DataConfig) -> Iterator[dict]:
    """Yield the rows of a table: {column: value}. None is null."""
    if file.startswith("hub:"):
        return _iter_hub(file, columns, config)
    readers = {".csv": _iter_csv, ".tsv": _iter_csv, ".parquet": _iter_parquet}
    return readers.get(suffix(file), _iter_jsonl)(file, columns)


def _iter_csv(file: str, columns: list[str]) -> Iterator[dict]:
    """Read a .csv or .tsv file. Raises ValueError with the line."""
    with _open_text(file) as stream:
        reader = csv.DictReader(stream, strict=True, **CSV_OPTIONS[suffix(file)])
        try:
            names = reader.fieldnames or []
            if any(names.count(column) != 1 for column in columns):
                raise csv.Error(f"the first row needs the names {columns} once, and has {names}")
            for row in reader:
                # DictReader's mark of missing values is None, which is also the key of further ones
                if None in row or None in row.values():
                    raise csv.Error(f"the row does not have {len(names)} values")
                yield row
        except csv.Error as error:
            raise ValueError(f"near line {reader.line_num}: {error}") from None


def _iter_jsonl(file: str, columns: list[str]) -> Iterator[dict]:
    """Read a file with one JSON object per line. Raises ValueError with the line.

    columns: not used, because a row is read with all of its values.
    """
    with _open_text(file) as stream:
        for number, line in enumerate(stream, start=1):
            if line.isspace():
                continue
            try:
                row = {**json.loads(line)}
            except (ValueError, TypeError) as error:
                raise ValueError(
                    f"line {number} is no JSON object: {error}; convert an array with jq -c '.[]'"
                ) from None
            yield row


def _iter_parquet(file: str, columns: list[str]) -> Iterator[dict]:
    """Read a .parquet file."""
    from pyarrow import parquet

    table = parquet.ParquetFile(_download(file))
    names = table.schema_arrow.names
    if not set(columns) <= set(names):
        raise ValueError(f"it needs the columns {columns}, and has {names}")
    for batch in table.iter_batches(BATCH_ROWS, columns=columns):
        yield from batch.select(columns).to_pylist()


def _iter_hub(file: str, columns: list[str], config: DataConfig) -> Iterator[dict]:
    """Read a split of a hub data set."""
    _, repo, split = file.split(":", 2)
    rows = _import_datasets().load_dataset(
        repo, config.config, split=split, revision=config.revision, streaming=config.stream
    )
    rows = rows.select_columns(columns).with_format("arrow")
    for batch in rows.iter(batch_size=BATCH_ROWS):
        yield from batch.select(columns).to_pylist()


# Opening and downloading


def _import_datasets() -> Any:
    """The `datasets` library, which takes a second to import.

    Sets USE_TORCH=0 for the rest of the process, unless it is set: otherwise, `datasets` imports
    torch, which takes 2 s more.
    """
    os.environ.setdefault("USE_TORCH", "0")
    import datasets

    return datasets


def _download(file: str) -> str:
    """The path of a file. A URL is downloaded into the cache of `datasets`. Raises UserError."""
    if not is_remote(file):
        with open(file, "rb") as stream:
            if stream.read(100).startswith(b"version https://git-lfs.github.com/spec/"):
                raise UserError(f"{file} is a Git LFS pointer; download the file with git lfs pull")
        return file
    from aiohttp import ClientTimeout

    # The default limits the complete download to five minutes. This limits a pause to 30 seconds.
    timeout = ClientTimeout(total=None, sock_read=30)
    datasets = _import_datasets()
    config = datasets.DownloadConfig(storage_options={"client_kwargs": {"timeout": timeout}})
    return datasets.DownloadManager(download_config=config).download(file)


def _open_text(file: str) -> io.TextIOWrapper:
    """A text stream without the byte order mark, whose line ends are unchanged.

    It is decompressed while it is read. A truncated file is an error.
    """
    import pyarrow

    _, last_suffix = os.path.splitext(without_query(file).lower())
    raw = pyarrow.input_stream(_download(file), compression=COMPRESSED.get(last_suffix))
    return io.TextIOWrapper(io.BufferedReader(raw, 2**16), "utf-8-sig", newline="")
