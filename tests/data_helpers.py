"""Configs, table writers and readers of prepared data for the tests of data/."""

import csv
import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tiktoken
import zstandard
from helpers import BYTE, TEXT_SOURCE
from hypothesis import strategies as st

from data.config import DataConfig, TokenizerConfig
from data.prepare import prepare
from data.readers import read_documents
from data.shards import PreparedData
from data.sources import resolve_sources
from data.tokenizer import Corpus, build_tokenizer, end_of_text

STDLIB = replace(TEXT_SOURCE, name="python_stdlib", source="python_stdlib", path=None)
HUB = replace(TEXT_SOURCE, source="hub", path=None, repo="some/texts", split="train", revision="refs/convert/parquet")
GPT4 = (  # the patterns of cl100k_base and o200k_base in tiktoken 0.14
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
GPT2S = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
UNUSUAL_TEXTS = [
    "",
    "emoji 😀 and 👩‍👩‍👧",
    "Windows\r\nlines\rand old Macs",
    "NUL \x00 bytes \x00\x00",
    "NA",
    "null",
    "007",
    '"quoted", text',
    " spaces ",
    "\n",
    "<|endoftext|> is text",
    "\u2028\x85\x0c\x1a",
    "e\u0301",
    "\ufeff in between",
]
any_text = st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), st.sampled_from(UNUSUAL_TEXTS))
some_documents = st.lists(any_text, max_size=8).map(lambda texts: ["the first text", *texts, "the last text"])


def prepare_text(config: DataConfig, tokenizer: TokenizerConfig = BYTE, block_size: int = 16) -> PreparedData:
    return prepare(config, tokenizer, block_size)


def load_documents(config: DataConfig) -> list[str]:
    return ["".join(document) for document in read_documents(resolve_sources(config))]


def build(documents: list[str], config: TokenizerConfig) -> tiktoken.Encoding:
    """A tokenizer built from the documents."""
    return build_tokenizer(Corpus(documents, has_several_documents=len(documents) > 1), config)


def make_mix(**changed) -> DataConfig:
    """The values of configs/data/mix.yaml, with changes."""
    mix = {"name": "mix", "path": None, "source": "mix", "text_column": None, "val_fraction": None}
    return replace(TEXT_SOURCE, **mix | changed)


def decode_documents(prepared: PreparedData) -> list[str]:
    """Decode the documents of both splits. Every document must end with an end-of-text token."""
    ids = np.concatenate([prepared.tokens(split)[:] for split in ("train", "val")])
    ends = np.flatnonzero(ids == end_of_text(prepared.tokenizer))
    assert ends[-1] == len(ids) - 1
    return [prepared.tokenizer.decode(part[:-1].tolist()) for part in np.split(ids, ends + 1)[:-1]]


def decode_split(prepared: PreparedData, split: str) -> str:
    """The text of a split without end-of-text tokens."""
    end = end_of_text(prepared.tokenizer)
    return prepared.tokenizer.decode([i for i in prepared.tokens(split)[:].tolist() if i != end])


def prepared_folders() -> list[Path]:
    """All folders in data/prepared, including unfinished ones."""
    return list(Path("data/prepared").glob("[!.]*/"))


def write_parquet(path: Path, documents: list[str]) -> None:
    pq.write_table(pa.table({"id": range(len(documents)), "text": documents}), path)


def write_jsonl(path: Path, documents: list[str]) -> None:
    lines = [json.dumps({"text": text, "n": n}, ensure_ascii=n % 2 == 0) + "\n" for n, text in enumerate(documents)]
    path.write_text("".join(lines), encoding="utf-8", newline="")


def write_csv(path: Path, documents: list[str]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["n", "text"], *enumerate(documents)])


def write_compressed(path: Path) -> None:
    """Add <path>.gz and <path>.zst."""
    raw = path.read_bytes()
    Path(f"{path}.gz").write_bytes(gzip.compress(raw))
    Path(f"{path}.zst").write_bytes(zstandard.compress(raw))


TABLE_WRITERS = {"parquet": write_parquet, "jsonl": write_jsonl, "csv": write_csv}
