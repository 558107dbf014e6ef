"""Read documents from files, without any change to their text.

A text file is one document, unless data.separator divides it. Each row of a table is a document. Documents are read in
pieces of at most MAX_PIECE_CHARS characters. A row, or a document between separators, must fit into memory. All columns
of tables are read as strings: "NA" stays "NA". Only this file imports `datasets`.
"""

import csv
import io
import itertools
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from common.files import describe_decode_error, refuse_utf16
from common.settings import unescape
from data.config import DataConfig
from data.sources import COMPRESSED, CSV_DELIMITERS, Source, is_remote, is_table, suffix

MAX_PIECE_CHARS = 2**20
JSON_BLOCK_BYTES = 2**20  # that are read at a time, and the rest of the last row
BATCH_ROWS = 200  # rows of a parquet file or a hub data set that are read at a time
csv.field_size_limit(2**31 - 1)  # the largest possible on Windows; the default is 131,072
CONVERT_JSON = """
import json, sys; [print(json.dumps({"text": row} if isinstance(row, str) else row)) for row in json.load(sys.stdin)]
""".strip()


class Piece(NamedTuple):
    """Part of a document, or of its prompt."""

    text: str
    ends_document: bool
    is_prompt: bool


def iter_pieces(source: Source, is_validation: bool = False) -> Iterator[Piece]:
    """Yield the documents of a source, or of its val_files, in pieces. Raises UserError if there is no text to read."""
    config = source.config
    files = source.val_files if is_validation else source.files
    missing = (
        {"text"} if config.prompt_column is None else {"prompt", "text"}
    )  # columns without text so far
    for piece in _iter_files(files, config, None if is_validation else config.max_documents):
        if piece.text:
            missing.discard("prompt" if piece.is_prompt else "text")
        yield piece
    if files and missing:
        name = max(missing)
        advice = "set another data.path"
        if is_table(files[0]):
            advice += f" or data.{name}_column{_first_line(files[0])}"
        raise UserError(f"there is no {name} in {', '.join(files[:3])}; {advice}")


def _iter_files(files: list[str], config: DataConfig, max_documents: int | None) -> Iterator[Piece]:
    """Yield the pieces of the first `max_documents` documents. No further file is opened."""
    num_documents = 0
    for file in files:
        for piece in _iter_file(file, config):
            yield piece
            num_documents += piece.ends_document
            if num_documents == max_documents:
                return


def _iter_file(file: str, config: DataConfig) -> Iterator[Piece]:
    """Yield the pieces of a file. Raises UserError if it cannot be read."""
    try:
        for prompt, texts in _iter_documents(file, config):
            if config.prompt_column is not None:
                yield from cut_into_pieces([prompt], is_prompt=True)
            yield from cut_into_pieces(texts)
    except UserError:
        raise
    except Exception as error:  # pyarrow, datasets and the network have exceptions of many types
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        if isinstance(error, UnicodeDecodeError):
            reason = describe_decode_error(error)
        advice = (
            "check the network, or set data.path to a local copy"
            if is_remote(file)
            else "correct the file"
        )
        if file.startswith("hub:"):
            advice += ", or set data.text_column"
        raise UserError(f"{file} cannot be read ({reason}); {advice}") from error


def _first_line(file: str) -> str:
    """The first line of a local .csv or .jsonl file, which shows the columns, as the end of a message."""
    if is_remote(file) or suffix(file) == ".parquet":
        return ""
    line = _open(file).read(100).decode(errors="replace").partition("\n")[0]
    return f" (the file begins with {line!r})"


def iter_documents(sources: Iterable[Source]) -> Iterator[Iterator[Piece]]:
    """Yield each document of the sources as an iterator of its pieces, which must be read before the next document.

    The documents include those to hold out. Raises UserError.
    """
    pieces = itertools.chain.from_iterable(map(iter_pieces, sources))
    for first in pieces:
        yield _take_document(itertools.chain([first], pieces))


def _take_document(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """Yield pieces up to the end of the first document."""
    for piece in pieces:
        yield piece
        if piece.ends_document:
            return


def cut_into_pieces(texts: Iterable[str], is_prompt: bool = False) -> Iterator[Piece]:
    """Join the texts into one document, or its prompt, and cut it into pieces: before a space that follows a word.

    This does not change the tokens: no BPE pattern used here (GPT-2's, GPT-4's, ours) has a match that continues from a
    word into a space. Text without spaces, as in some scripts, is cut anywhere.
    """
    pending, search_from = "", max(0, MAX_PIECE_CHARS - 1000)
    for part in (
        text[i : i + MAX_PIECE_CHARS]
        for text in texts
        for i in range(0, len(text), MAX_PIECE_CHARS)
    ):
        pending += part
        while len(pending) > MAX_PIECE_CHARS:
            word_ends = [
                match.end()
                for match in re.finditer(r"\S(?= )", pending[search_from:MAX_PIECE_CHARS])
            ]
            stop = search_from + word_ends[-1] if word_ends else MAX_PIECE_CHARS
            yield Piece(pending[:stop], False, is_prompt)
            pending = pending[stop:]
    yield Piece(pending, not is_prompt, is_prompt)


def _iter_documents(file: str, config: DataConfig) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the prompt and the text, in parts, of each document in a file."""
    if is_table(file):
        rows = _iter_rows(file, config)
        if config.row_is_document:
            for prompt, text in rows:
                yield prompt, [text]
        else:
            yield "", (text for _, text in rows)
    elif config.prompt_column is not None:
        raise UserError(
            f"{file} has no columns; set data.path to .jsonl, .csv or .parquet, or data.prompt_column=null"
        )
    else:
        with _open_text(file) as stream:
            parts = iter(partial(stream.read, MAX_PIECE_CHARS), "")
            if config.separator is None:
                yield "", parts
            else:
                documents = _split_documents(parts, unescape(config.separator))
                yield from (("", [text]) for text in documents if text)


def _split_documents(parts: Iterable[str], separator: str) -> Iterator[str]:
    """Yield the documents between separators. A \\n also matches \\r\\n."""
    pattern = re.compile(re.escape(separator).replace("\\\n", "\r?\n"))
    longest = 2 * len(separator)  # with the \r of each \n
    searched: list[str] = []  # beginning of the current document
    pending = ""  # its end, which may contain the beginning of a separator
    for part in parts:
        *ended, pending = pattern.split(pending + part)
        for text in ended:
            yield "".join([*searched, text])
            searched = []
        searched.append(pending[:-longest])
        pending = pending[-longest:]
    yield "".join([*searched, pending])


def _iter_rows(file: str, config: DataConfig) -> Iterator[tuple[str, str]]:
    """Yield the prompt ('' without data.prompt_column) and the text of each row, except rows without text (null)."""
    columns = [config.text_column]
    if config.prompt_column is not None:
        columns.append(config.prompt_column)
    rows = (
        _iter_csv(file, columns)
        if suffix(file) in CSV_DELIMITERS
        else _iter_arrow(file, columns, config)
    )
    for text, *prompts in rows:
        if text is None:
            continue
        if not isinstance(text, str):
            raise ValueError(
                f"the column {config.text_column} contains {type(text).__name__}, not text"
            )
        yield (prompts[0] or "") if prompts else "", text


def _iter_csv(file: str, columns: list[str]) -> Iterator[list[str]]:
    """Yield the columns of each row of a .csv or .tsv file. Raises UserError for a wrong header or row."""
    with _open_text(file) as stream:
        lines = _iter_csv_lines(
            file, csv.reader(stream, delimiter=CSV_DELIMITERS[suffix(file)], strict=True)
        )
        _, names = next(lines, (1, []))
        _check_columns(file, names, columns)
        positions = [names.index(column) for column in columns]
        for line, row in lines:
            if len(row) != len(names):
                reason = f"the row at line {line} has {len(row)} values instead of {len(names)}"
                raise UserError(f"{file} cannot be read ({reason}); correct the file")
            yield [row[position] for position in positions]


def _iter_csv_lines(file: str, reader: Any) -> Iterator[tuple[int, list[str]]]:
    """Yield the rows that are not empty, with the number of their first line. Raises UserError for wrong quotes."""
    line = 1
    try:
        for row in reader:
            if row:
                yield line, row
            line = reader.line_num + 1
    except csv.Error as error:
        reason = f"has wrong quotes: {error}"
        if "unexpected end" in str(error):
            reason = "opens a quote that is never closed"
        raise UserError(
            f"{file} cannot be read (the row at line {line} {reason}); correct the file"
        ) from None


def _check_columns(file: str, names: list[str], columns: list[str]) -> None:
    """Raise UserError unless each of the columns is one of the names in the header of a table, and only once."""
    for column in columns:
        if names.count(column) > 1:
            raise UserError(
                f"{file} has {names.count(column)} columns named {column!r}; rename them"
            )
        if column not in names:
            listed = ", ".join(map(repr, names))[:200] or "missing"
            problem = f"{file} has no column {column!r}: the columns are {listed}"
            advice = "set data.text_column or data.prompt_column, or write names in the first line"
            raise UserError(f"{problem}; {advice}")


def _iter_arrow(file: str, columns: list[str], config: DataConfig) -> Iterator[tuple[Any, ...]]:
    """Yield the columns of each row of another table. Raises errors of pyarrow and `datasets`."""
    for batch in _iter_batches(file, columns, config):
        yield from zip(*(batch.column(column).to_pylist() for column in columns), strict=True)


def _iter_batches(file: str, columns: list[str], config: DataConfig) -> Iterator[Any]:
    """Yield the columns of a table as Arrow batches."""
    import pyarrow as pa
    from pyarrow import parquet

    if file.startswith("hub:"):
        _, repo, split = file.split(":", 2)
        stream = {"revision": config.revision, "streaming": config.stream}
        rows = _import_datasets().load_dataset(repo, config.config, split=split, **stream)
        return rows.select_columns(columns).with_format("arrow").iter(batch_size=BATCH_ROWS)
    if suffix(file) == ".parquet":
        table = parquet.ParquetFile(_download(file))
        _check_columns(file, table.schema_arrow.names, columns)
        return table.iter_batches(BATCH_ROWS, columns=columns)
    return _iter_jsonl(file, pa.schema([(name, pa.string()) for name in columns]))


def _iter_jsonl(file: str, schema: Any) -> Iterator[Any]:
    """Yield the rows of a file with one JSON object per line, as Arrow tables."""
    import pyarrow as pa
    from pyarrow import json

    parse, line = json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"), 1
    with _open_bytes(file) as stream:
        if stream.peek(100).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            decompressed = re.sub(r"\.(gz|zst)$", "", file)
            convert = f"python -c '{CONVERT_JSON}' < {shlex.quote(decompressed)} > new.jsonl"
            raise UserError(
                f"{file} is a JSON array instead of one object per line; convert it: {convert}"
            )
        while chunk := stream.read(JSON_BLOCK_BYTES) + stream.readline():  # complete lines
            try:
                if not chunk.isspace():
                    yield json.read_json(
                        pa.BufferReader(chunk), json.ReadOptions(block_size=len(chunk) + 1), parse
                    )
            except pa.ArrowInvalid as error:
                message, _, row = str(error).partition(" in row ")
                raise ValueError(f"{message} near line {line + int(row or 0)}") from None
            line += chunk.count(b"\n")


@cache
def _import_datasets() -> Any:
    """The `datasets` library, imported on first use (1 s)."""
    os.environ.setdefault(
        "USE_TORCH", "0"
    )  # otherwise `datasets` imports torch, which takes 2 s more
    import datasets

    return datasets


def _download(file: str) -> str:
    """The path of a file, which is downloaded into the cache of `datasets` if it is a URL."""
    if not is_remote(file):
        return file
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(
        total=None, sock_read=30
    )  # the default limits the complete download to five minutes
    config = _import_datasets().DownloadConfig(
        storage_options={"client_kwargs": {"timeout": timeout}}
    )
    return _import_datasets().DownloadManager(download_config=config).download(file)


def _open(file: str) -> Any:
    """A binary stream that is decompressed while it is read. Arrow notices a truncated file."""
    import pyarrow

    return pyarrow.input_stream(
        open(_download(file), "rb"), compression=COMPRESSED.get(Path(file.lower()).suffix)
    )


def _open_bytes(file: str) -> io.BufferedReader:
    """A buffered binary stream of text in UTF-8. Raises UserError for UTF-16 and UTF-32."""
    stream = io.BufferedReader(_open(file), 2**16)
    start = stream.peek(2**16)
    if start[257:262] == b"ustar":  # the mark of a tar file
        raise UserError(f"{file} is an archive; unpack it, and set data.path to its folder")
    refuse_utf16(start, file)
    return stream


def _open_text(file: str) -> io.TextIOWrapper:
    """A text stream without the byte order mark, whose line ends are unchanged."""
    return io.TextIOWrapper(_open_bytes(file), "utf-8-sig", newline="")
