"""Read documents from files, without any change to their text and in bounded memory.

A text file is one document, and so is each row of a table. Documents are read in pieces of at most MAX_PIECE_CHARS
characters. pyarrow reads all columns of tables as strings: "NA" stays "NA". Only this file imports `datasets`.
"""

import io
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

from common.errors import UserError
from data.config import DataConfig
from data.sources import COMPRESSED, Source, is_remote, is_table, suffix

Document = tuple[str, str]  # prompt ('' without data.prompt_column), text
MAX_PIECE_CHARS = 2**20
BLOCK_BYTES = {".jsonl": 2**20, ".csv": 2**22}  # that are read at a time; a row of a .csv file must be smaller
BATCH_ROWS = 200  # rows of a parquet file or a hub data set that are read at a time


class Piece(NamedTuple):
    """Part of a document, or of its prompt."""

    text: str
    ends_document: bool
    is_prompt: bool


def iter_pieces(source: Source, is_validation: bool = False) -> Iterator[Piece]:
    """Yield the documents of a source, or of its val_files, in pieces. Raises UserError if there is no text to read."""
    config, files = source.config, source.val_files if is_validation else source.files
    empty = {"text"} if config.prompt_column is None else {"prompt", "text"}  # columns without text so far
    limit = itertools.count() if is_validation or config.max_documents is None else iter(range(config.max_documents))
    for file in files:
        try:
            for (prompt, texts), _ in zip(_iter_documents(file, config), limit, strict=False):
                prompts = () if config.prompt_column is None else cut_into_pieces([prompt], is_prompt=True)
                for piece in itertools.chain(prompts, cut_into_pieces(texts)):
                    empty -= {"prompt" if piece.is_prompt else "text"} if piece.text else set()
                    yield piece
        except UserError:
            raise
        except Exception as error:  # pyarrow, datasets and the network have exceptions of many types
            reason = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            if isinstance(error, UnicodeDecodeError):
                before = error.object[max(0, error.start - 20) : error.start]
                reason = f"not UTF-8: byte 0x{error.object[error.start]:02x} after {before!r}; convert it with iconv"
            advice = "check the network, or set data.path to a local copy" if is_remote(file) else "correct the file"
            advice += f", or set data.text_column{_first_line(file)}" if is_table(file) else ""
            raise UserError(f"{file} cannot be read ({reason}); {advice}") from error
    if files and empty:
        advice = f"set another data.path or data.{max(empty)}_column{_first_line(files[0])}"
        raise UserError(f"there is no {max(empty)} in {', '.join(files[:3])}; {advice}")


def _first_line(file: str) -> str:
    """The first line of a .csv or .jsonl file, which shows the columns, as the end of a message."""
    is_text = file.lower().endswith((".csv", ".jsonl")) and not is_remote(file)
    line = _open(file).read(100).decode(errors="replace").partition("\n")[0] if is_text else ""
    return f" (the file begins with {line!r})" * is_text


def read_documents(sources: list[Source]) -> list[Document]:
    """Read all documents of the sources into memory, including documents to hold out. Raises UserError."""
    documents = [([], [])]  # pieces of the prompt and of the text
    for piece in itertools.chain.from_iterable(map(iter_pieces, sources)):
        documents[-1][0 if piece.is_prompt else 1].append(piece.text)
        if piece.ends_document:
            documents.append(([], []))
    return [("".join(prompt), "".join(text)) for prompt, text in documents[:-1]]


def cut_into_pieces(texts: Iterable[str], is_prompt: bool = False) -> Iterator[Piece]:
    """Join the texts into one document, or its prompt, and cut it into pieces: before a space that follows a word.

    This does not change the tokens: no BPE pattern used here (GPT-2's, GPT-4's, ours) has a match that continues from a
    word into a space. Text without spaces, as in some scripts, is cut anywhere.
    """
    pending, search_from = "", max(0, MAX_PIECE_CHARS - 1000)
    for part in (text[i : i + MAX_PIECE_CHARS] for text in texts for i in range(0, len(text), MAX_PIECE_CHARS)):
        pending += part
        while len(pending) > MAX_PIECE_CHARS:
            word_ends = [match.end() for match in re.finditer(r"\S(?= )", pending[search_from:MAX_PIECE_CHARS])]
            stop = search_from + word_ends[-1] if word_ends else MAX_PIECE_CHARS
            yield Piece(pending[:stop], False, is_prompt)
            pending = pending[stop:]
    yield Piece(pending, not is_prompt, is_prompt)


def _iter_documents(file: str, config: DataConfig) -> Iterator[tuple[str, Iterable[str]]]:
    """Yield the prompt and the text, in parts, of each document in a file. Rows without text (null) are skipped."""
    if is_table(file):
        columns = [column for column in (config.prompt_column, config.text_column) if column is not None]
        batches = _iter_batches(file, columns, config)
        rows = (row for batch in batches for row in zip(*map(batch.column, columns), strict=True) if row[-1].is_valid)
        documents = ((row[0].as_py() or "", [row[-1].as_py()]) for row in rows)  # row[0] is the prompt, if there is one
        yield from documents if config.row_is_document else [("", (text for _, (text,) in documents))]
    elif config.prompt_column is not None:
        raise UserError(f"{file} has no columns; set data.path to .jsonl, .csv or .parquet, or data.prompt_column=null")
    else:
        with io.TextIOWrapper(_open(file), "utf-8-sig", newline="") as stream:
            yield "", iter(partial(stream.read, MAX_PIECE_CHARS), "")


def _iter_batches(file: str, columns: list[str], config: DataConfig) -> Iterator[Any]:
    """Yield the columns of a table as Arrow batches. Raises errors of pyarrow and `datasets`."""
    import pyarrow as pa
    from pyarrow import csv, parquet

    if file.startswith("hub:"):
        _, repo, split = file.split(":", 2)
        stream = {"revision": config.revision, "streaming": config.stream}
        rows = _import_datasets().load_dataset(repo, config.config, split=split, **stream)
        return rows.select_columns(columns).with_format("arrow").iter(batch_size=BATCH_ROWS)
    if suffix(file) == ".parquet":
        return parquet.ParquetFile(_download(file)).iter_batches(BATCH_ROWS, columns=columns)
    if suffix(file) == ".csv":
        read = csv.ReadOptions(block_size=BLOCK_BYTES[".csv"], use_threads=False)
        convert = csv.ConvertOptions(column_types=dict.fromkeys(columns, pa.string()), include_columns=columns)
        return csv.open_csv(_open(file), read, csv.ParseOptions(newlines_in_values=True), convert)
    return _iter_jsonl(file, pa.schema([(name, pa.string()) for name in columns]))


def _iter_jsonl(file: str, schema: Any) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import json

    parse, line = json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"), 1
    with io.BufferedReader(_open(file)) as stream:
        while chunk := stream.read(BLOCK_BYTES[".jsonl"]) + stream.readline():  # complete lines
            try:
                if not chunk.isspace():
                    yield json.read_json(pa.BufferReader(chunk), json.ReadOptions(block_size=len(chunk) + 1), parse)
            except pa.ArrowInvalid as error:
                message, _, row = str(error).partition(" in row ")
                raise ValueError(f"{message} near line {line + int(row or 0)}") from None
            line += chunk.count(b"\n")


@cache
def _import_datasets() -> Any:
    """The `datasets` library, imported on first use (1 s)."""
    os.environ.setdefault("USE_TORCH", "0")  # otherwise `datasets` imports torch, which takes 2 s more
    import datasets

    return datasets


def _download(file: str) -> str:
    """The path of a file, which is downloaded into the cache of `datasets` if it is a URL."""
    if not is_remote(file):
        return file
    from aiohttp import ClientTimeout

    timeout = ClientTimeout(total=None, sock_read=30)  # the default limits the complete download to five minutes
    config = _import_datasets().DownloadConfig(storage_options={"client_kwargs": {"timeout": timeout}})
    return _import_datasets().DownloadManager(download_config=config).download(file)


def _open(file: str) -> Any:
    """A binary stream that is decompressed while it is read. Arrow notices a truncated file."""
    import pyarrow

    return pyarrow.input_stream(open(_download(file), "rb"), compression=COMPRESSED.get(Path(file.lower()).suffix))
