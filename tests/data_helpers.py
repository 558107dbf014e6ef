"""Configs, writers of input files, and readers of prepared data, for the tests of data/."""

import csv
import gzip
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import tiktoken
import zstandard
from helpers import BYTE
from hypothesis import strategies as st

from data.config import DataConfig, TokenizerConfig
from data.prepare import PreparedData, prepare
from data.readers import Piece, iter_documents
from data.sources import resolve_source
from data.tokenizer import build_tokenizer, end_of_text

UNUSUAL_TEXTS = [
    "",
    "emoji 😀, 👩\u200d👧",
    "Windows\r\nlines\rand old Macs",
    "NA",
    "null",
    "2024-01-01",
    " spaces ",
    '"quoted", text',
    "\n",
    "<|endoftext|> is text",
    "\u2028\x85\x0c\x1a",
    "e\u0301",
    "\ufeff in between",
]
any_text = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60),
    st.sampled_from(UNUSUAL_TEXTS),
)


def prepare_data(
    config: DataConfig, tokenizer: TokenizerConfig = BYTE, block_size: int = 16
) -> PreparedData:
    return prepare(config, tokenizer, block_size)


def join_pieces(pieces: list[Piece], is_prompt: bool) -> str:
    return "".join(piece.text for piece in pieces if piece.is_prompt == is_prompt)


def read_documents(config: DataConfig) -> list[tuple[str, str]]:
    """Prompt and text of all documents."""
    documents = []
    for document in iter_documents(resolve_source(config)):
        pieces = list(document)
        documents.append((join_pieces(pieces, True), join_pieces(pieces, False)))
    return documents


def load_documents(path: str | list[str], **settings) -> list[str]:
    return [text for _, text in read_documents(DataConfig(path=path, **settings))]


def build(documents: list[str], config: TokenizerConfig) -> tiktoken.Encoding:
    return build_tokenizer(config, documents, has_several_documents=len(documents) > 1)


def read_ids(prepared: PreparedData, split: str) -> list[int]:
    """The token ids of a split."""
    return getattr(prepared, split)[:].tolist()


def decode_split(prepared: PreparedData, split: str) -> str:
    """The text of a split without end-of-text tokens."""
    end = end_of_text(prepared.tokenizer)
    return prepared.tokenizer.decode([i for i in read_ids(prepared, split) if i != end])


def prepared_folders() -> list[Path]:
    """All folders in data/prepared, including unfinished ones."""
    return [path for path in Path("data/prepared").glob("*") if path.is_dir()]


def write_file(path: str, content: str | bytes) -> str:
    """Write a file, compressed if its name says so. Returns its path."""
    if isinstance(content, str):
        content = content.encode()
    compress = {".gz": gzip.compress, ".zst": zstandard.compress}.get(Path(path).suffix, bytes)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(compress(content))
    return path


def write_table(path: str, **columns: list) -> str:
    """Write a .parquet, .csv or .jsonl file. Returns its path."""
    if path.endswith(".parquet"):
        pq.write_table(pa.table(columns), write_file(path, ""), row_group_size=13)
        return path
    out = io.StringIO(newline="")
    rows = list(zip(*columns.values(), strict=True))
    if ".csv" in path:
        csv.writer(out).writerows([list(columns), *rows])
    else:
        for number, row in enumerate(rows):
            values = dict(zip(columns, row, strict=True))
            out.write(json.dumps(values, ensure_ascii=number % 2 == 0) + "\n")
    return write_file(path, out.getvalue())


def write_documents(path: str, documents: list[str]) -> str:
    """Write a table, or one text file per document if path has an asterisk. Returns the path."""
    if "*" not in path:
        return write_table(path, n=list(range(len(documents))), text=documents)
    for number, text in enumerate(documents):
        write_file(path.replace("*", str(number)), text)
    return path
