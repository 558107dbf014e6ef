"""Documents are read exactly, from all types of files, URLs and hub data sets. Errors name the file and the row."""

import gzip
import http.server
import io
import json
import shutil
import subprocess
import sys
import tarfile
import threading

import data_helpers as helpers
import numpy as np
import pytest
import yaml
import zstandard
from data_helpers import build, decode_split, load_documents, prepare_data, prepared_folders
from helpers import BPE, CHAR, GPT2

from common.errors import UserError
from configs.cli import parse_config
from data import DataConfig, readers
from data.readers import cut_into_pieces
from data.tokenizer import encode


@pytest.mark.parametrize("path", ["a.parquet", "a.jsonl", "a.csv"])
def test_local_tables_are_read_without_network_access(workdir, monkeypatch, path):
    hosts = []
    monkeypatch.setattr(
        "socket.getaddrinfo", lambda host, *rest, **options: hosts.append(host) or []
    )
    assert (
        load_documents(helpers.write_documents(path, helpers.UNUSUAL_TEXTS))
        == helpers.UNUSUAL_TEXTS
    )
    assert not hosts


@pytest.mark.parametrize(
    ("path", "content", "documents"),
    [
        ("one.csv", b'text\r\na\r\n \r\n""\r\n"  \t"\r\nb\r\n', ["a", " ", "", "  \t", "b"]),
        ("mark.csv", b"\xef\xbb\xbftext,n\na,1\n", ["a"]),
        (
            "types.jsonl",
            b'{"text": "2024-01-01", "n": 1}\n\n{"n": "x", "text": "3", "m": [1]}',
            ["2024-01-01", "3"],
        ),
        ("null.jsonl", b'{"text": null}\r\n{"text": "a"}\r\n{}\r\n{"text": ""}\r\n', ["a", ""]),
        ("mark.jsonl", b'\xef\xbb\xbf{"text": "a"}\n', ["a"]),
        (
            "two.txt.gz",
            gzip.compress(b"one\r\n", mtime=0) + gzip.compress(b"two", mtime=0),
            ["one\r\ntwo"],
        ),
        ("NAME.TXT", b"\xef\xbb\xbfone\r\n\r", ["one\r\n\r"]),
        ("records.txt", b"alice 1\0bob 22\0" * 99, ["alice 1\0bob 22\0" * 99]),
        (
            "some.txt",
            b"a few \0 NULs\0 in " + b"text " * 100,
            ["a few \0 NULs\0 in " + "text " * 100],
        ),
        ("rows.ndjson", b'{"text": "a"}\n{"text": "b"}\n', ["a", "b"]),
        (
            "rows.jsonlines.gz",
            gzip.compress(b'{"text": "a"}\n{"text": "b"}\n', mtime=0),
            ["a", "b"],
        ),
        ("rows.json", b'{"text": "a"}\n{"text": "b"}\n', ["a", "b"]),
        ("rows.tsv", b'id\ttext\n1\ta, b\n2\t"two\nlines"\n', ["a, b", "two\nlines"]),
        ("wide.csv", b"text\n" + b"x" * 5_000_000 + b"\n", ["x" * 5_000_000]),
    ],
)
def test_unusual_files_are_read_exactly(workdir, path, content, documents):
    (workdir / path).write_bytes(content)
    assert load_documents(path) == documents


def test_null_rows_of_parquet_are_skipped_and_rows_can_be_one_document(workdir):
    path = helpers.write_table("a.parquet", text=["one", None, "two", "", "three"])
    assert load_documents(path) == ["one", "two", "", "three"]
    assert load_documents(path, row_is_document=False) == ["onetwothree"]


@pytest.mark.parametrize("config", [BPE, GPT2], ids=lambda config: config.name)
def test_document_in_pieces_has_the_same_tokens(workdir, monkeypatch, config):
    text = (workdir / "text.txt").read_text(encoding="utf-8") * 3 + "   ...\n\n  x\t y  \n z" * 300
    try:
        tokenizer = build([text], config)
    except UserError as error:
        pytest.skip(f"NOT RUN: {error}")
    for size in (100, 301, 1000):
        monkeypatch.setattr(readers, "MAX_PIECE_CHARS", size)
        pieces, ends, _ = zip(*cut_into_pieces([text[:77], text[77:]]), strict=True)
        assert "".join(pieces) == text and max(map(len, pieces)) <= size
        assert ends == (False,) * (len(ends) - 1) + (True,)
        assert np.array_equal(
            np.concatenate([encode(tokenizer, piece) for piece in pieces]), encode(tokenizer, text)
        )


def make_tar(text: bytes) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        entry = tarfile.TarInfo("a.txt")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))
    return content.getvalue()


TAR = make_tar(b"A sentence. " * 9999)
UNREADABLE = [
    ("missing.txt", None, r"data.path=missing.txt"),
    ("none/*.txt", None, r"data.path=none/\*.txt"),
    ("folder", None, r"data.path=folder .*a pattern"),
    ("/dev/zero", None, r"data.path=/dev/zero"),
    ("hub:name", None, r"hub:name"),
    ("empty.txt", b"", r"no text in empty.txt"),
    ("empty.jsonl.gz", b"", r"no text in empty.jsonl.gz"),
    ("column.jsonl", b'{"words": "a"}\n', r"no text in column.jsonl.*data.text_column"),
    ("head.csv", b"text,id\n", r"no text in head.csv"),
    ("BODY.CSV", b"body,id\na,1\nb,2\n", r"BODY.CSV .*'text'"),
    ("late.txt", b"a" * 3_000_000 + b"\xff", r"late.txt .*not UTF-8: byte 0xff after b'aaa"),
    ("first.txt", b"\xe9t\xe9 " * 99, r"first.txt .*not UTF-8: byte 0xe9;"),
    (
        "latin.jsonl",
        b'{"text": "caf\xe9"}\n' * 30,
        r"latin.jsonl .*not UTF-8: byte 0xe9 after b'caf'",
    ),
    ("latin.csv", b"text,id\na,1\ncaf\xe9,1\n", r"latin.csv .*not UTF-8: byte 0xe9 after .*caf"),
    ("torn.txt.gz", gzip.compress(b"text " * 1000, mtime=0)[:-4], r"torn.txt.gz .*Truncated"),
    ("torn.txt.zst", zstandard.compress(b"text " * 1000)[:-1], r"torn.txt.zst .*Truncated"),
    (
        "torn.jsonl.gz",
        gzip.compress(b'{"text": "a"}\n' * 1000, mtime=0)[:-4],
        r"torn.jsonl.gz .*Truncated",
    ),
    (
        "torn.csv.zst",
        zstandard.compress(b"n,text\n" + b"1,a\n" * 1000)[:-1],
        r"torn.csv.zst .*Truncated",
    ),
    (
        "broken.jsonl",
        b'{"text": "fine"}\n' * 200_000 + b'{"text": oops}\n',
        r"broken.jsonl .*200001",
    ),
    ("numbers.jsonl", b'{"text": "a"}\n{"text": 1}\n', r"numbers.jsonl .*string to number.* 2"),
    (
        "long.csv",
        b"text,n\nhello, world,1\n",
        r"long.csv .*the row at line 2 has 3 values instead of 2",
    ),
    ("half.parquet", b"PAR1 and nothing else", r"half.parquet .*Parquet"),
    (
        "little.txt",
        ("Sentences. " * 99).encode("utf-16-le"),
        r"little.txt has NUL bytes, .*iconv -f UTF-16LE",
    ),
    (
        "big.txt",
        ("Sentences. " * 99).encode("utf-16-be"),
        r"big.txt has NUL bytes",
    ),
    (
        "russian32.txt",
        ("Это простой текст. " * 99).encode("utf-32-be"),
        r"russian32.txt has NUL bytes",
    ),
    (
        "wide.txt",
        ("Sentences. " * 99).encode("utf-32-le"),
        r"wide.txt has NUL bytes",
    ),
    (
        "mark.txt",
        "Sentences. ".encode("utf-16"),
        r"mark.txt .*iconv",
    ),
    ("texts.tar", TAR, r"texts.tar is an archive; unpack it"),
    ("texts.tar.gz", gzip.compress(TAR, mtime=0), r"texts.tar.gz is an archive; unpack it"),
    ("table.csv", ("text\nA sentence.\n" * 99).encode("utf-16"), r"table.csv has NUL bytes"),
    (
        "rows.jsonl",
        ('{"text": "A sentence."}\n' * 99).encode("utf-16-le"),
        r"rows.jsonl has NUL bytes",
    ),
    (
        "array.json",
        b'\n [{"text": "a"},\n {"text": "b"}]',
        r"array.json is a JSON array.*python -c .* < array.json",
    ),
    ("array.jsonl", b'[{"text": "a"}]\n', r"array.jsonl is a JSON array"),
    (
        "open.csv",
        b'text,n\na,1\n"b\n,2\n' + b"c,3\n" * 99,
        r"open.csv .*row at line 3 opens a quote that is never",
    ),
    ("twice.csv", b"text,n,text\na,1,b\n", r"twice.csv has 2 columns named 'text'; rename them"),
    ("twice.jsonl", b'{"text": "a", "text": "b"}\n', r"twice.jsonl .*twice"),
    (
        "nameless.csv",
        b"The first sentence.,1\nThe second one.,2\n",
        r"'The first sentence.', '1'; .* names in the first",
    ),
    (
        "lines.csv",
        b'"The first\nsentence.",1\nThe second one.,2\n',
        r"lines.csv .*first.nsentence.', '1'; .* names in",
    ),
]


@pytest.mark.parametrize(
    ("name", "content", "message"), UNREADABLE, ids=[name for name, *_ in UNREADABLE]
)
def test_unreadable_input_gives_one_sentence_and_leaves_no_folder(
    workdir, capfd, name, content, message
):
    helpers.write_file("folder/code.py", "x = 1")
    if content is not None:
        (workdir / name).write_bytes(content)
    for tokenizer in (CHAR, BPE):
        with pytest.raises(UserError, match=message) as error:
            prepare_data(DataConfig(path=name), tokenizer)
        assert "\n" not in str(error.value)
    assert not prepared_folders()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.csv", b"text,n\na,1,2\n"), ("b.csv", b'text\n"a\n'), ("c.jsonl", b'{"text": oops}\n')],
)
def test_advice_for_a_broken_row_is_not_another_column(workdir, name, content):
    (workdir / name).write_bytes(content)
    with pytest.raises(UserError, match="correct the file") as error:
        load_documents(name)
    assert "text_column" not in str(error.value)


@pytest.mark.skipif(shutil.which("iconv") is None, reason="NOT RUN: needs iconv")
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le"])
def test_advice_for_utf_16_converts_the_text(workdir, encoding):
    text = "Sätze, one per line.\n" * 99
    (workdir / "other.txt").write_bytes(text.encode(encoding))
    with pytest.raises(UserError) as error:
        load_documents("other.txt")
    command = str(error.value).rpartition("with ")[2]
    subprocess.run(f"{command} other.txt > converted.txt", shell=True, check=True)
    assert load_documents("converted.txt") == [text]


def test_keys_of_a_hub_data_set_do_not_apply_to_a_local_text(workdir):
    config = parse_config("prepare", "", ["data=wikitext", "data.path=text.txt"]).data
    assert config.row_is_document is False
    assert prepare_data(config).meta["documents"] == {"train": 1, "val": 1}


def test_converted_json_array_is_read(workdir):
    """The command that the message shows converts it."""
    (workdir / "it's an array.json").write_text(
        json.dumps([{"text": "été\n"}, "b"]), encoding="utf-8"
    )
    with pytest.raises(UserError) as error:
        load_documents("it's an array.json")
    command = str(error.value).partition("convert it: python ")[2]
    subprocess.run(f"{sys.executable} {command}", shell=True, check=True)
    assert load_documents("new.jsonl") == ["été\n", "b"]


@pytest.mark.parametrize(("key", "value"), [("text_column", "body"), ("row_is_document", False)])
def test_keys_of_tables_are_refused_for_files_without_columns(workdir, key, value):
    message = rf"data.{key}=.* has no effect, because text.txt has no columns; .* or data.{key}=(text|true)$"
    with pytest.raises(UserError, match=message):
        prepare_data(DataConfig(path="text.txt", **{key: value}))


def test_no_file_is_opened_after_max_documents(workdir):
    for number in range(3):
        helpers.write_file(f"folder/{number}.txt", f"document {number}")
    helpers.write_file("folder/3.parquet", b"no table")
    assert load_documents("folder", max_documents=3) == ["document 0", "document 1", "document 2"]
    with pytest.raises(UserError, match=r"folder/3.parquet cannot be read"):
        load_documents("folder", max_documents=4)


@pytest.mark.parametrize(
    ("separator", "content"),
    [
        ("\n", "one\n two\n\nthree"),
        ("\\n", "one\r\n two\r\n\r\nthree\r\n"),
        ("<|endoftext|>", "one<|endoftext|> two<|endoftext|>three"),
        (r"\n\n", "\n\none\r\n\r\n two\n\nthree\n\n"),
    ],
)
@pytest.mark.parametrize("piece_chars", [1, 3, 2**20])
def test_separator_divides_a_text_file_into_documents(
    workdir, monkeypatch, separator, content, piece_chars
):
    monkeypatch.setattr(readers, "MAX_PIECE_CHARS", piece_chars)
    (workdir / "items.txt").write_bytes(content.encode())
    assert load_documents("items.txt", separator=separator) == ["one", " two", "three"]


def test_separated_documents_get_an_end_of_text_token(workdir):
    prepared = prepare_data(DataConfig(path="text.txt", separator="\n"))
    lines = (workdir / "text.txt").read_text(encoding="utf-8").splitlines()
    assert sum(prepared.meta["documents"].values()) == len(lines)
    assert decode_split(prepared, "train") + decode_split(prepared, "val") == "".join(lines)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"path": "rows.csv", "separator": "#"},
            r"data.separator is for text files, and rows.csv is a table",
        ),
    ],
)
def test_separator_without_effect_is_refused(workdir, settings, message):
    helpers.write_table("rows.csv", text=["a#b", "c#d"])
    with pytest.raises(UserError, match=message):
        prepare_data(DataConfig(**settings))


def test_rows_that_are_too_few_or_no_text_are_refused(workdir):
    with pytest.raises(UserError, match=r"9 training .*model.block_size"):
        prepare_data(DataConfig(path=helpers.write_table("a.csv", text=["too short"])))
    with pytest.raises(UserError, match=r"too few documents \(9\) .* data.val_documents"):
        prepare_data(
            DataConfig(path=helpers.write_table("a.csv", text=["a document"] * 9), val_documents=9)
        )
    with pytest.raises(UserError, match=r"a.parquet cannot be read"):
        prepare_data(DataConfig(path=helpers.write_table("a.parquet", text=[1, 2, 3])))


def test_url_is_downloaded(workdir):
    """As for data=shakespeare_char, but from a server on this machine."""
    handler = type(
        "Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *a: None}
    )
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert load_documents(f"{address}/text.txt") == [
            (workdir / "text.txt").read_text(encoding="utf-8")
        ]
        with pytest.raises(UserError, match=rf"{address}/no.txt cannot be read .* data.path"):
            load_documents(f"{address}/no.txt")
        server.shutdown()


LINES, PAGES = (
    ["", " = A title = \n", "", " A line of it . \n"] * 9,
    [f"page {n} " * 9 for n in range(100, 220)],
)
# The files of each repository by configuration and split, settings, and the numbers of documents of both splits.
WIKITEXT = {
    ("wikitext-103-raw-v1", split): {f"wiki/{split}-0": LINES}
    for split in ("train", "validation", "test")
}
OPENWEBTEXT = {("plain_text", "train"): {"0": PAGES[:40], "1": PAGES[40:]}}
FINEWEB = {
    ("default", "train"): {"data/0": ["another config"]},
    ("sample-10BT", "train"): {"sample/0": PAGES},
}
STORIES = {
    ("default", "train"): {"data/train-0": PAGES[7:]},
    ("default", "validation"): {"data/val-0": PAGES[:7]},
}
PRESETS = {
    "openwebtext": (OPENWEBTEXT, ["data.val_fraction=0.1"], (108, 12)),
    "fineweb_edu": (FINEWEB, ["data.val_documents=20"], (100, 20)),
    "tinystories": (STORIES, [], (113, 7)),
    "wikitext": (WIKITEXT, [], (1, 1)),
}


def prepare_data_set(name: str, *words: str):
    """Write a repository, and prepare it with a preset. `datasets` reads a folder like a repository."""
    splits, settings, _ = PRESETS[name]
    configs = {config: [] for config, _ in splits}
    for (config, split), files in splits.items():
        configs[config].append({"split": split, "path": [f"{file}.parquet" for file in files]})
        for file, documents in files.items():
            helpers.write_table(
                f"repository/{file}.parquet", text=documents, score=[3.1] * len(documents)
            )
    readme = [{"config_name": config, "data_files": files} for config, files in configs.items()]
    helpers.write_file("repository/README.md", f"---\n{yaml.safe_dump({'configs': readme})}---\n")
    return prepare_data(
        parse_config(
            "prepare", "", [f"data={name}", "data.repo=./repository", *settings, *words]
        ).data
    )


@pytest.mark.parametrize("stream", ["data.stream=false", "data.stream=true"])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_read_data_sets_shaped_like_the_real_ones(workdir, monkeypatch, name, stream):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", workdir / "cache")
    prepared = prepare_data_set(name, stream)
    assert tuple(prepared.meta["documents"].values()) == PRESETS[name][2]
    splits = decode_split(prepared, "train"), decode_split(prepared, "val")
    if name == "wikitext":
        assert splits == ("".join(LINES), "".join(LINES))
    else:
        assert "".join(splits if name == "openwebtext" else splits[::-1]) == "".join(PAGES)
        assert helpers.read_ids(prepared, "train").count(256) == PRESETS[name][2][0]
    for setting in ("text_column=body", "text_column=score", "split=nope", "config=nope"):
        with pytest.raises(UserError, match=r"repository.* cannot be read .*data") as error:
            prepare_data_set(name, stream, f"data.{setting}")
        assert "\n" not in str(error.value)
    assert prepared_folders() == [prepared.folder]
