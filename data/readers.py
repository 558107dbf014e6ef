"""Read documents from input files, without any change to their text and in bounded memory.

A document is a sequence of pieces: (text, whether the document ends with it, whether it belongs to the prompt). A text
file is one document. Each row of a table is a document, unless data.row_is_document=false.

.csv and .jsonl are read here, line by line. `datasets` guesses column types from the first rows: "NA" becomes null and
dates become timestamps. It also uses the first column of a .csv as an index if rows are longer than the header, and it
does not report the line of an error. Parquet files, URLs and the hub are read through `datasets`, which only this file
imports.
"""

import codecs
import csv
import glob
import json
import logging
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from data.sources import DOWNLOAD_TIMEOUT_S, InputFile, Position, TextSource, open_input, report_unreadable

Document = tuple[str, str]  # prompt ('' without data.prompt_column), text
MAX_PIECE_CHARS = 2**20
MAX_LINE_CHARS = 2**30  # of .csv and .jsonl files
BLOCK_BYTES = 2**20  # bytes of a file that are read at a time
UTF_16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
BATCH_ROWS = 200  # rows of a parquet file or a hub data set that are read at a time


class Piece(NamedTuple):
    """Part of a document, or of its prompt."""

    text: str
    ends_document: bool
    is_prompt: bool


def iter_text(source: TextSource, files: list[InputFile]) -> Iterator[Piece]:
    """Yield the documents of the files in pieces. Nulls in a table are skipped. Raises UserError, with the position."""
    for file in files:
        if not file.is_table:
            if source.prompt_column is not None:
                raise UserError(
                    f"{file.address} is no table, so it has no column {source.prompt_column}; set data.path to .jsonl, "
                    ".csv or .parquet files, or data.prompt_column=null"
                )
            path = _download(file.address) if file.is_remote else file.address
            yield from chunk_document(read_utf8(path, file))
        elif source.row_is_document:
            lacks_completion = source.prompt_column is not None
            for *prompt, text in _read_rows(file, source):
                if prompt:
                    yield from chunk_document(prompt, is_prompt=True)
                    lacks_completion = lacks_completion and not text
                yield from chunk_document([text])
            if lacks_completion:
                raise UserError(
                    f"column {source.text_column} of {file.address} has no text to complete a prompt; set "
                    "data.text_column to the column of completions"
                )
        else:
            yield from chunk_document(text for (text,) in _read_rows(file, source))


def read_documents(sources: list[TextSource]) -> list[Document]:
    """Read all documents of the sources into memory, including documents to hold out. Raises UserError."""
    documents, prompt, parts = [], [], []
    for source in sources:
        for text, ends_document, is_prompt in slice_documents(iter_text(source, source.files), (0, 0), source.end):
            (prompt if is_prompt else parts).append(text)
            if ends_document:
                documents.append(("".join(prompt), "".join(parts)))
                prompt, parts = [], []
    if not any(text for _, text in documents):
        raise no_text_error([file for source in sources for file in source.files])
    return documents


def no_text_error(files: list[InputFile]) -> UserError:
    addresses = ", ".join(file.address for file in files[:3]) + (", ..." if len(files) > 3 else "")
    return UserError(f"there is no text in {addresses}; set data.path to a file that contains text")


def slice_documents(pieces: Iterable[Piece], start: Position, stop: Position | None) -> Iterator[Piece]:
    """Yield the pieces from `start` to `stop`, or to the end. If `stop` cuts a document, no piece ends it."""
    document = character = 0
    for text, ends_document, is_prompt in pieces:
        first, last = (document, character), (document, character + len(text))
        if stop is not None and first >= stop:
            return
        if stop is not None and stop < last:
            text, ends_document = text[: stop[1] - character], False
        if last >= start and (last > start or ends_document):
            text = text[start[1] - character :] if first < start else text
            yield Piece(text, ends_document, is_prompt)
        document, character = (document + 1, 0) if ends_document else last


def chunk_document(texts: Iterable[str], is_prompt: bool = False) -> Iterator[Piece]:
    """Join the texts into one document, or its prompt, and cut it into pieces of at most MAX_PIECE_CHARS characters."""
    pending = ""
    for text in texts:
        pending, start = pending + text, 0
        while len(pending) - start > MAX_PIECE_CHARS:
            window = pending[start : start + MAX_PIECE_CHARS]
            cut = _find_cut(window)
            yield Piece(window[:cut], False, is_prompt)
            start += cut
        pending = pending[start:]
    yield Piece(pending, not is_prompt, is_prompt)


def _find_cut(text: str) -> int:
    """Find a position where cutting does not change the tokens: between a word and the space after it.

    No BPE pattern used here (GPT-2's, GPT-4's, ours) has a match that continues from a word into a space. Text without
    spaces, as in some scripts, is cut at its end: the tokens there can differ, the text does not.
    """
    cut = text.rfind(" ", 1)
    while cut > 0:
        while cut > 0 and text[cut - 1].isspace():
            cut -= 1
        if cut > 0 and text[cut] == " ":
            return cut
        cut = text.rfind(" ", 1, max(1, cut))
    return len(text)


# Text files


def open_decompressed(path: str, compression: str | None) -> Any:
    """Open a binary file that is decompressed while it is read. Raises OSError.

    Arrow detects a truncated compressed file; Python's zstandard does not.
    """
    if compression is None:
        return open_input(path)
    import pyarrow

    return pyarrow.input_stream(path, compression=compression)


def read_utf8(path: str, file: InputFile) -> Iterator[str]:
    """Yield the text of a file in blocks, without a byte order mark. Raises UserError, with the byte, if not UTF-8.

    path: the file itself, or the downloaded copy.
    """
    decoder, position = codecs.getincrementaldecoder("utf-8")(), 0
    block = None
    try:
        with report_unreadable(file.address), open_decompressed(path, file.compression) as stream:
            while block != b"":
                block = stream.read(BLOCK_BYTES)
                pending, _ = decoder.getstate()
                try:
                    text = decoder.decode(block, final=not block)
                except UnicodeDecodeError as error:
                    byte, invalid = position - len(pending) + error.start, error.object[error.start :]
                    encoding = "utf-16" if byte == 0 and invalid.startswith(UTF_16_MARKS) else "latin1"
                    raise UserError(
                        f"{file.address} is not UTF-8: byte {byte} is 0x{invalid[0]:02x}; save it as UTF-8 (iconv -f "
                        f"{encoding} -t utf-8) if it is text, or set another data.path"
                    ) from None
                yield text.removeprefix("\ufeff") if position == 0 else text
                position += len(block)
    except OSError as error:
        raise UserError(
            f"{file.address} cannot be decompressed ({error}); copy the file again, or decompress it yourself"
        ) from None


# Tables


def _read_rows(file: InputFile, source: TextSource) -> Iterator[Sequence[str]]:
    """Yield [text], or [prompt, text] with data.prompt_column, of each row of a table. Raises UserError."""
    path = _download(file.address) if file.is_remote and file.file_type != "hub" else file.address
    if file.file_type == "json":
        yield from read_jsonl(path, file, source.columns)
    elif file.file_type == "csv":
        yield from read_csv(path, file, source.columns)
    else:
        try:
            for batch in _iter_batches(file, path, source):
                yield from _read_columns(batch, file, source.columns)
        except UserError:
            raise
        except Exception as error:  # many libraries are involved, each with its own exceptions
            raise UserError(_explain_read_error(file, error.__cause__ or error)) from error


def read_jsonl(path: str, file: InputFile, columns: dict[str, str]) -> Iterator[list[str]]:
    """Yield the columns of a .jsonl file, row by row. Blank lines are skipped. Raises UserError, with the line."""
    for number, line in enumerate(_read_lines(path, file), start=1):
        if not line.strip():
            continue
        where = f"line {number} of {file.address}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not valid JSON ({error}); correct that line") from None
        if not isinstance(row, dict):
            example = ", ".join(f'"{column}": "..."' for column in columns.values())
            raise UserError(f"{where} is not a JSON object; write each line as {{{example}}}")
        texts = []
        for key, column in columns.items():
            if column not in row:
                others = _list_columns(name for name in row if name not in columns.values())
                fix = "complete or remove that row" if others == "none" else f"set {key} to one of {others}"
                raise UserError(f"{where} has no column {column}; {fix}")
            text = row[column]
            if not isinstance(text, str | None):
                raise UserError(
                    f"column {column} in {where} has type {type(text).__name__}; set {key} to a column of text"
                )
            try:
                text is None or text.isascii() or text.encode()
            except UnicodeEncodeError:
                raise UserError(f"{where} has a lone surrogate (half a character); remove it") from None
            texts.append(text)
        if None not in texts:
            yield texts
        elif texts[-1] is not None:
            raise _null_prompt_error(where, columns)


def _null_prompt_error(where: str, columns: dict[str, str]) -> UserError:
    column = columns["data.prompt_column"]
    return UserError(f'column {column} in {where} is null; write "" for no prompt, or remove that row')


def read_csv(path: str, file: InputFile, columns: dict[str, str]) -> Iterator[list[str]]:
    """Yield the columns of a .csv file (RFC 4180), row by row. The first line contains the names of the columns.

    Blank lines are skipped. Raises UserError, with the line.
    """
    csv.field_size_limit(MAX_LINE_CHARS)
    rows = csv.reader((line + "\n" for line in _read_lines(path, file)), strict=True)
    header: list[str] = []
    try:
        for row in filter(None, rows):
            if not header:
                header = row
                _check_columns(file, columns, header)
                indices = [header.index(column) for column in columns.values()]
            elif len(row) != len(header):
                raise UserError(
                    f"line {rows.line_num} of {file.address} has {len(row)} fields, but the first line names "
                    f"{len(header)} columns; put text that contains commas in quotation marks"
                )
            else:
                yield [row[index] for index in indices]
    except csv.Error as error:
        raise UserError(
            f"line {rows.line_num} of {file.address} is not valid CSV ({error}); correct that line"
        ) from None


def _read_lines(path: str, file: InputFile) -> Iterator[str]:
    """Yield the lines of a file without line ends. The last line is what follows the last line end, possibly ''."""
    parts, size = [], 0
    for block in read_utf8(path, file):
        *lines, rest = block.split("\n")
        for line in lines:
            yield "".join([*parts, line])
            parts, size = [], 0
        parts.append(rest)
        size += len(rest)
        if size > MAX_LINE_CHARS:
            raise UserError(f"{file.address} has a line of more than {MAX_LINE_CHARS:,} characters; split that line")
    yield "".join(parts)


def _check_columns(file: InputFile, columns: dict[str, str], names: list[str]) -> None:
    for key, column in columns.items():
        if column not in names:
            raise UserError(f"{file.address} has no column {column}; set {key} to one of {_list_columns(names)}")


def _list_columns(columns: Iterable[str]) -> str:
    return ", ".join(columns)[:200] or "none"


# Tables through `datasets`


@cache
def _import_datasets() -> Any:
    """The `datasets` library, imported on first use (1 s), without its log messages and download counts."""
    os.environ.setdefault("USE_TORCH", "0")  # otherwise `datasets` imports torch, which takes 2 s more
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # otherwise each read, also of a local file, contacts a server
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)
    return datasets


def _download(address: str) -> str:
    """Download a URL into the cache of `datasets` and return the path. Raises UserError."""
    try:
        from aiohttp import ClientTimeout

        datasets = _import_datasets()
        # The default limits the complete download to five minutes instead.
        timeout = ClientTimeout(total=None, sock_connect=DOWNLOAD_TIMEOUT_S, sock_read=DOWNLOAD_TIMEOUT_S)
        config = datasets.DownloadConfig(storage_options={"client_kwargs": {"timeout": timeout}})
        return datasets.DownloadManager(download_config=config).download(address)
    except Exception as error:  # many libraries are involved, each with its own exceptions
        reason = _summarize(error.__cause__ or error, address)
        raise UserError(
            f"{address} could not be downloaded ({reason}); download it another way and set data.path=FILE"
        ) from error


def _iter_batches(file: InputFile, path: str, source: TextSource) -> Iterator[Any]:
    """Yield Arrow tables of BATCH_ROWS rows, with the needed columns. Raises UserError and errors of `datasets`."""
    datasets, columns = _import_datasets(), list(source.columns.values())
    if file.file_type == "hub":
        if sys.stderr.isatty():
            datasets.enable_progress_bars()  # downloads of gigabytes
        rows = datasets.load_dataset(
            path,
            name=source.hub_config,
            split=file.split,
            revision=source.revision if file.is_remote else None,
            # Without streaming, `datasets` misses changes in a local folder.
            streaming=source.stream or not file.is_remote,
        )
    else:
        # Streaming: without it, `datasets` would copy the file into its cache.
        pattern = glob.escape(str(Path(path).resolve()))
        rows = datasets.load_dataset(
            "parquet", data_files=[pattern], split="train", streaming=True, batch_size=BATCH_ROWS
        )
    names = rows.column_names or list(next(iter(rows), {}))
    if names:
        _check_columns(file, source.columns, names)
    yield from rows.select_columns(columns).with_format("arrow").iter(batch_size=BATCH_ROWS) if names else ()


def _read_columns(table: Any, file: InputFile, columns: dict[str, str]) -> Iterator[Sequence[str]]:
    for key, column in columns.items():
        column_type = table.schema.field(column).type
        if str(column_type) not in ("string", "large_string", "string_view", "null"):
            raise UserError(f"column {column} of {file.address} has type {column_type}; set {key} to a column of text")
    for texts in zip(*(table[column].to_pylist() for column in columns.values()), strict=True):
        if None not in texts:
            yield texts
        elif texts[-1] is not None:
            raise _null_prompt_error(f"a row of {file.address}", columns)


def _explain_read_error(file: InputFile, error: BaseException) -> str:
    """The error message for an exception of `datasets`."""
    reason = _summarize(error, file.address)
    if file.file_type != "hub":
        return f"{file.address} cannot be read as .parquet ({reason}); repair the file, or set another data.path"
    is_offline = any(word in f"{type(error).__name__} {error}" for word in ("Connect", "Offline", "resolve host"))
    fix = "check the network" if is_offline else "correct data.repo, data.config, data.split or data.revision"
    return (
        f"{file.address} could not be read from the hub ({reason}); {fix}, or download the files another way and set "
        "data.path=FILES"
    )


def _summarize(error: BaseException, address: str) -> str:
    """The type and the first line of an exception, at most 300 characters."""
    first_line = [line for line in str(error).strip().splitlines()[:1] if line != address]
    return ": ".join([type(error).__name__, *first_line])[:300]
