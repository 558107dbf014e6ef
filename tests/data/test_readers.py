"""Documents are read exactly, from all types of files, and errors name their position."""

import csv
import gzip
import http.server
import json
import threading
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from data_helpers import (
    HUB,
    TABLE_WRITERS,
    UNUSUAL_TEXTS,
    build,
    decode_documents,
    decode_split,
    load_documents,
    prepare_text,
    prepared_folders,
    some_documents,
    write_compressed,
)
from helpers import BPE, BYTE, CHAR, GPT2, TEXT_SOURCE
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from configs.cli import parse_config
from data import readers
from data.config import TokenizerConfig
from data.readers import chunk_document
from data.tokenizer import encode, end_of_text, needs_download

DOCUMENTS = [f"Document {n} of the web says {n * n}, and après tout no more.\n" * 3 for n in range(60)]


@pytest.fixture
def tables(workdir):
    """The same documents in each type of table. The parquet file has several row groups, like OpenWebText's."""
    columns = {"text": DOCUMENTS, "id": list(range(60)), "title": ["a"] * 60}
    pq.write_table(pa.table(columns), "web.parquet", row_group_size=13)
    table = datasets.Dataset.from_dict(columns)
    table.to_json("web.jsonl")
    table.to_csv("web.csv")
    return workdir


@pytest.fixture
def hub(tables, monkeypatch):
    """A substitute for the hub: `datasets` reads a local folder instead of some/texts. Returns the recorded calls."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tables / "cache")
    monkeypatch.setattr("data.sources._find_commit", lambda repo, revision: f"the commit of {revision}")
    folder, calls, load = tables / "hub", [], datasets.load_dataset
    for part in range(2):
        (folder / "plain_text/train").mkdir(parents=True, exist_ok=True)
        table = pa.table({"text": DOCUMENTS[part * 30 :][:30]})
        pq.write_table(table, folder / f"plain_text/train/000{part}.parquet", row_group_size=13)

    def load_from_folder(repo, **arguments):
        calls.append((repo, arguments))
        return load(str(folder), **arguments | {"revision": None})

    monkeypatch.setattr(datasets, "load_dataset", load_from_folder)
    return calls


def assert_documents_round_trip(table: str, tokenizer_config: TokenizerConfig, documents: list[str]) -> None:
    with TemporaryDirectory() as folder, chdir(folder):
        TABLE_WRITERS[table](Path(f"texts.{table}"), documents)
        config = replace(TEXT_SOURCE, path=f"texts.{table}", val_fraction=0.4)
        assert decode_documents(prepare_text(config, tokenizer_config, 2)) == documents


def assert_file_round_trips(tokenizer_config: TokenizerConfig, text: str) -> None:
    with TemporaryDirectory() as folder, chdir(folder):
        Path("text.md").write_text(text, encoding="utf-8", newline="")
        prepared = prepare_text(replace(TEXT_SOURCE, path="text.md", val_fraction=0.4), tokenizer_config, 1)
        ids = np.concatenate([prepared.tokens(split)[:] for split in ("train", "val")]).tolist()
        assert prepared.tokenizer.decode([i for i in ids if i != end_of_text(prepared.tokenizer)]) == text


@pytest.mark.parametrize("table", TABLE_WRITERS)
@settings(max_examples=16, deadline=None)
@example(tokenizer_config=CHAR, documents=[*UNUSUAL_TEXTS, "the last text"])
@example(tokenizer_config=BYTE, documents=[*UNUSUAL_TEXTS, "the last text"])
@example(tokenizer_config=BPE, documents=[*UNUSUAL_TEXTS, "the last text"])
@given(tokenizer_config=st.sampled_from([CHAR, BYTE, BPE]), documents=some_documents)
def test_tables_round_trip_exactly(table, tokenizer_config, documents):
    assert_documents_round_trip(table, tokenizer_config, documents)


@pytest.mark.parametrize("tokenizer_config", [CHAR, BYTE, BPE], ids=lambda tokenizer_config: tokenizer_config.name)
@settings(max_examples=25, deadline=None)
@example(text="".join(UNUSUAL_TEXTS) + "the last text")
@given(text=some_documents.map("".join))
def test_text_files_round_trip_exactly(tokenizer_config, text):
    assert_file_round_trips(tokenizer_config, text)


@pytest.mark.parametrize("table", TABLE_WRITERS)
def test_local_tables_are_read_without_network_access(workdir, monkeypatch, table):
    """By default, `datasets` counts each read on a server, and waits if there is no network."""
    TABLE_WRITERS[table](Path(f"texts.{table}"), UNUSUAL_TEXTS)
    hosts = []
    monkeypatch.setattr("socket.getaddrinfo", lambda host, *rest, **options: hosts.append(host) or [])
    assert load_documents(replace(TEXT_SOURCE, path=f"texts.{table}")) == UNUSUAL_TEXTS
    assert not hosts


def test_blank_rows_of_a_one_column_csv_are_documents(workdir):
    documents = ["a", " ", "", "  \t", "b"]
    with open("one.csv", "w", encoding="utf-8", newline="") as f:
        csv.writer(f).writerows([["text"], *([text] for text in documents)])
    assert load_documents(replace(TEXT_SOURCE, path="one.csv")) == documents


def test_jsonl_ignores_other_columns_and_does_not_guess_types(workdir):
    rows = [
        {"text": "2024-01-01", "n": 1},
        {"n": "x", "text": "2024-01-02", "more": [1]},
        {"text": None},
        {"text": "3"},
    ]
    Path("a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    assert load_documents(replace(TEXT_SOURCE, path="a.jsonl")) == ["2024-01-01", "2024-01-02", "3"]


def test_nulls_in_parquet_are_skipped(workdir):
    pq.write_table(pa.table({"text": ["one", None, "two", "", "three"]}), "holes.parquet")
    assert load_documents(replace(TEXT_SOURCE, path="holes.parquet")) == ["one", "two", "", "three"]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_compressed_files_are_read_as_their_content(workdir, name, suffix):
    documents = ["one\r\n😀" * 30, "two", "three\x00" * 9]
    path = workdir / name
    if name == "a.txt":
        documents = documents[:1]
        path.write_text(documents[0], encoding="utf-8", newline="")
    else:
        TABLE_WRITERS[path.suffix[1:]](path, documents)
    write_compressed(path)
    assert load_documents(replace(TEXT_SOURCE, path=f"{name}{suffix}")) == documents


@pytest.mark.parametrize("name", ["web.parquet", "web.jsonl", "web.csv"])
def test_table_rows_are_documents_and_the_last_are_held_out(tables, name):
    prepared = prepare_text(replace(TEXT_SOURCE, path=name))
    assert decode_documents(prepared) == DOCUMENTS
    val = prepared.tokenizer.decode(prepared.tokens("val")[:].tolist()).split("<|endoftext|>")[:-1]
    assert val == DOCUMENTS[-len(val) :]
    assert len(val) == 6
    assert prepared.meta["source"]["documents"] == 60


@pytest.mark.parametrize("tokenizer_config", [BPE, GPT2], ids=lambda tokenizer_config: tokenizer_config.name)
def test_document_in_pieces_has_the_same_tokens(workdir, monkeypatch, tokenizer_config):
    if needs_download(tokenizer_config):
        pytest.skip("NOT RUN: needs GPT-2's vocabulary")
    text = (workdir / "text.txt").read_text() * 3 + "   ...\n\n  x\t y  \n z" * 300
    tokenizer = build([text], tokenizer_config)
    whole = encode(tokenizer, text)
    for size in (100, 301, 1000):
        monkeypatch.setattr(readers, "MAX_PIECE_CHARS", size)
        pieces = list(chunk_document([text[:77], text[77:]]))
        assert "".join(piece for piece, *_ in pieces) == text
        assert [ends for _, ends, _ in pieces] == [False] * (len(pieces) - 1) + [True]
        assert max(len(piece) for piece, *_ in pieces) <= size
        assert np.array_equal(np.concatenate([encode(tokenizer, piece) for piece, *_ in pieces]), whole)


UNREADABLE = [
    ("missing.txt", None, "missing.txt does not exist"),
    ("none/*.txt", None, "matches no file"),
    ("folder", None, r"contains no .txt, .md, .parquet, .jsonl, .csv file \(also with .gz or .zst\); .* set a pattern"),
    ("[a.txt,b.txt]", None, r"a list of files needs quotes: data.path="),
    ("empty.txt", b"", "there is no text in .*empty.txt"),
    ("late.txt", b"a" * 3_000_000 + b"\xff", r"late.txt is not UTF-8: byte 3000000 is 0xff; save it as UTF-8"),
    ("half.txt", b"a" * 100 + "é".encode()[:1], r"byte 100 is 0xc3"),
    ("wide.txt", "wide".encode("utf-16"), r"wide.txt is not UTF-8: byte 0 is 0xff; .*iconv -f utf-16"),
    ("short.txt", b"too short", r"training text has 8 tokens, .* set model.block_size=7"),
    ("/dev/zero", None, r"data.path=/dev/zero is a pipe or a device"),
    ("torn.txt.gz", gzip.compress(b"text " * 1000)[:-20], r"torn.txt.gz cannot be decompressed"),
    ("torn.csv.zst", zstandard.compress(b"n,text\n" + b"1,a\n" * 1000)[:-1], r"torn.csv.zst cannot be decompressed"),
    ("surrogate.jsonl", b'{"text": "fine"}\n{"text": "\\ud83d"}\n', r"line 2 of surrogate.jsonl has a lone surrogate"),
    ("broken.jsonl", b'{"text": "fine"}\n{"text": oops}\n', r"line 2 of broken.jsonl is not valid JSON"),
    ("latin.jsonl", b'{"text": "caf\xe9"}\n', r"latin.jsonl is not UTF-8: byte 13 is 0xe9"),
    (
        "column.jsonl",
        b'{"words": "a"}\n',
        r"line 1 of column.jsonl has no column text; set data.text_column to one of w",
    ),
    ("numbers.jsonl", b'{"text": 1}\n', r"column text in line 1 of numbers.jsonl has type int"),
    ("array.jsonl", b'[{"text": "a"}]', r"line 1 of array.jsonl is not a JSON object"),
    ("nulls.jsonl", b'{"text": null}\n', r"there is no text in .*nulls.jsonl"),
    ("half.parquet", b"PAR1 and nothing else", r"half.parquet cannot be read as .parquet \(ArrowInvalid: .*\); repair"),
    (
        "long.csv",
        b"text,n\nhello, world,1\n",
        r"line 2 of long.csv has 3 fields, but the first line names 2 columns; put",
    ),
    ("open.csv", b'text,id\n"a,1\nb,2\n', r"line 4 of open.csv is not valid CSV \(unexpected end of data\); correct"),
    ("latin.csv", b"text,id\ncaf\xe9,1\n", r"latin.csv is not UTF-8: byte 11 is 0xe9"),
    ("head.csv", b"text,id\n", r"there is no text in .*head.csv"),
    ("BODY.CSV", b"body,id\na,1\nb,2\n", r"BODY.CSV has no column text; set data.text_column to one of body, id$"),
]


@pytest.mark.parametrize(("name", "content", "message"), UNREADABLE, ids=[name for name, *_ in UNREADABLE])
def test_unreadable_input_gives_one_sentence_and_leaves_no_folder(workdir, capfd, name, content, message):
    (workdir / "folder").mkdir()
    (workdir / "folder/code.py").write_text("x = 1")
    if content is not None:
        (workdir / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        prepare_text(replace(TEXT_SOURCE, path=name))
    assert "\n" not in str(error.value)
    assert not prepared_folders()
    assert capfd.readouterr().err == ""


def test_url_is_downloaded(workdir):
    """As for data=shakespeare_char, but from a server on this machine."""
    handler = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *a: None})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        config = replace(TEXT_SOURCE, name="there", source="url", path=None, url=f"{address}/text.txt")
        prepared = prepare_text(config, CHAR)
        assert prepared.meta["tokens"] == prepare_text(TEXT_SOURCE, CHAR).meta["tokens"]
        with pytest.raises(UserError, match=r"could not be downloaded .* data.path=FILE"):
            prepare_text(replace(config, url=f"{address}/missing.txt"), CHAR)
        server.shutdown()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_column": "body"}, r"some/texts.* has no column body; set data.text_column to one of text$"),
        (
            {"split": "test"},
            r"some/texts could not be read from the hub \(ValueError: Unknown split \"test\".*; correct",
        ),
        ({"config": "nope"}, r"some/texts could not be read from the hub \(ValueError: .*nope.*; correct data.repo, d"),
    ],
)
def test_missing_hub_column_split_or_config_is_reported(hub, change, message):
    with pytest.raises(UserError, match=message):
        prepare_text(replace(HUB, **change))


def write_repository(folder: Path, configs: str, files: dict[str, list[dict]]) -> str:
    for name, rows in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    return str(folder)


def declare_splits(config: str, **paths: str) -> str:
    """A configuration in the README of a data set."""
    files = "".join(f"  - split: {split}\n    path: {path}\n" for split, path in paths.items())
    return f"- config_name: {config}\n  data_files:\n{files}"


PAGES = [{"text": f"page {n} " * 9, "score": 3.1} for n in range(60)]
LINES = {split: [{"text": text} for text in ["", f" = {split} = \n", "", " A line of it . \n"] * 9] for split in
         ("train", "validation", "test")}  # fmt: skip
# The configurations and files of each repository, settings, and the numbers of documents to train on and to hold out.
PRESETS = {
    "openwebtext": (
        declare_splits("plain_text", train="plain_text/train-*"),
        {f"plain_text/train-0000{k}-of-00003.parquet": [{"text": f"page {k}.{n} " * 9} for n in range(40)]
         for k in range(3)},
        ["data.val_fraction=0.1"],
        (108, 12),
    ),
    "fineweb_edu": (
        declare_splits("default", train="data/*/*") + declare_splits("sample-10BT", train="sample/10BT/*"),
        {"data/CC/000.parquet": [{"text": "another config"}], "sample/10BT/000_00000.parquet": PAGES},
        ["data.val_documents=20"],
        (40, 20),
    ),
    "tinystories": (
        declare_splits("default", train="data/train-*", validation="data/validation-*"),
        {"data/train-00000-of-00001.parquet": [{"text": f"Story {n}, once upon a time. "} for n in range(50)],
         "data/validation-00000-of-00001.parquet": [{"text": f"Another {n}, once. "} for n in range(7)]},
        [],
        (50, 7),
    ),
    "wikitext": (
        declare_splits("wikitext-103-raw-v1", **{split: f"wikitext-103-raw-v1/{split}-*" for split in LINES}),
        {f"wikitext-103-raw-v1/{split}-00000-of-00001.parquet": lines for split, lines in LINES.items()},
        [],
        (1, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_read_data_sets_shaped_like_the_real_ones(workdir, monkeypatch, name, stream):
    configs, files, settings, documents = PRESETS[name]
    repo = write_repository(workdir / "repository", configs, files)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(workdir / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", workdir / "cache")
    if stream and name == "openwebtext":
        settings = ["data.val_documents=12"]
    config = parse_config(
        "prepare", "", [f"data={name}", f"data.repo={repo}", f"data.stream={str(stream).lower()}", *settings]
    )
    prepared = prepare_text(config.data)
    assert tuple(prepared.meta["documents"].values()) == documents
    column = {
        split: [row["text"] for file, rows in files.items() for row in rows if split in file and "data/CC" not in file]
        for split in ("train", "validation")
    }
    text, val = decode_split(prepared, "train"), decode_split(prepared, "val")
    if name in ("tinystories", "wikitext"):
        assert text == "".join(column["train"])
        assert val == "".join(column["validation"])
    else:
        assert not set(text.split("page")[1:]) & set(val.split("page")[1:])  # no document is in both
        assert prepared.tokens("train")[:].tolist().count(256) == documents[0]
