"""Documents are read exactly, from all types of files. Errors name the file and the row."""

import bz2
import gzip
import http.server
import lzma
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import yaml
import zstandard
from data_helpers import (
    UNUSUAL_TEXTS,
    build,
    decode_split,
    load_documents,
    prepare_data,
    prepared_folders,
    read_documents,
    read_ids,
    write_documents,
    write_file,
    write_table,
)
from helpers import BPE, GPT2, TEXT

from common.errors import UserError
from configs.cli import parse_config
from data import DataConfig, readers
from data.prepare import PreparedData
from data.readers import cut_into_pieces
from data.tokenizer import encode

# Files that are read exactly


@pytest.mark.parametrize("path", ["a.parquet", "a.jsonl", "a.csv"])
def test_tables_are_read_exactly(workdir, path):
    assert load_documents(write_documents(path, UNUSUAL_TEXTS)) == UNUSUAL_TEXTS


JSON_ROWS = b'{"text": "a"}\n{"text": "b"}\n'
TWO_GZIP_FILES = gzip.compress(b"one\r\n", mtime=0) + gzip.compress(b"two", mtime=0)


@pytest.mark.parametrize(
    ("path", "content", "documents"),
    [
        ("rows.csv", b'text\r\na\r\n \r\n""\r\n"  \t"\r\nb\r\n', ["a", " ", "", "  \t", "b"]),
        ("mark.csv", b"\xef\xbb\xbftext,n\na,1\n", ["a"]),
        ("empty_lines.csv", b"text,n\n\na,1\n\n", ["a"]),
        ("wide.csv", b"text\n" + b"x" * 5_000_000 + b"\n", ["x" * 5_000_000]),
        ("rows.tsv", b'id\ttext\n1\t"a, b\n2\t"c"\n3\td\n', ['"a, b', '"c"', "d"]),
        ("dates.jsonl", b'{"text": "2024-01-01"}\n\n{"text": "3"}', ["2024-01-01", "3"]),
        ("types.jsonl", b'{"n": 1, "text": "a"}\n{"n": "x", "text": "b", "m": [1]}', ["a", "b"]),
        ("null.jsonl", b'{"text": null}\r\n{"text": "a"}\r\n{}\r\n{"text": ""}\r\n', ["a", ""]),
        ("mark.jsonl", b'\xef\xbb\xbf{"text": "a"}\n', ["a"]),
        ("rows.ndjson", JSON_ROWS, ["a", "b"]),
        ("rows.jsonlines.gz", gzip.compress(JSON_ROWS, mtime=0), ["a", "b"]),
        ("rows.json", JSON_ROWS, ["a", "b"]),
        ("nul.jsonl", b'{"text": "a\\u0000b"}\n', ["a\0b"]),
        ("why?.jsonl.gz", gzip.compress(JSON_ROWS, mtime=0), ["a", "b"]),
        ("two.txt.gz", TWO_GZIP_FILES, ["one\r\ntwo"]),
        ("NAME.TXT", b"\xef\xbb\xbfone\r\n\r", ["one\r\n\r"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unusual_files_are_read_exactly(workdir, path, content, documents):
    (workdir / path).write_bytes(content)
    assert load_documents(path) == documents


@pytest.mark.parametrize(
    ("row_is_document", "expected"),
    [(True, ["one", "two", "", "three"]), (False, ["onetwothree"])],
    ids=["documents", "one document"],
)
def test_null_rows_of_parquet_are_skipped(workdir, row_is_document, expected):
    path = write_table("a.parquet", text=["one", None, "two", "", "three"])
    assert load_documents(path, row_is_document=row_is_document) == expected


def test_no_file_is_opened_after_max_documents(workdir):
    for number in range(3):
        write_file(f"folder/{number}.txt", f"document {number}")
    write_file("folder/3.parquet", b"no table")
    expected = ["document 0", "document 1", "document 2"]
    assert load_documents("folder", max_documents=3) == expected
    with pytest.raises(UserError, match=r"folder/3.parquet cannot be read"):
        load_documents("folder", max_documents=4)


# Prompts

PAIRS = DataConfig(path="rows.jsonl", prompt_column="question", text_column="answer")


def write_pairs(path: str, rows: list[tuple]) -> None:
    questions, answers = zip(*rows, strict=True)
    write_table(path, answer=list(answers), question=list(questions))


@pytest.mark.parametrize("path", ["rows.jsonl", "rows.parquet"])
def test_null_prompts_are_empty_and_null_completions_skipped(workdir, path):
    write_pairs(path, [("Q: ", "yes"), (None, "no"), ("Q: x", ""), ("Q", None), (None, None)])
    documents = [("Q: ", "yes"), ("", "no"), ("Q: x", "")]
    assert read_documents(replace(PAIRS, path=path)) == documents


def test_prompts_that_are_numbers_are_refused(workdir):
    write_pairs("rows.parquet", [(0, "zero"), (1, "one")])
    with pytest.raises(UserError, match=r"rows.parquet .*question contains int, .* row 1\)"):
        read_documents(replace(PAIRS, path="rows.parquet"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("text.txt", r"data.prompt_column is for tables"),
        ("rows.jsonl", r"there is no prompt in rows.jsonl; .*data.prompt_column"),
        ("rows.csv", r"rows.csv .*'q'.*data.prompt_column"),
        ("rows.parquet", r"rows.parquet .*'q'.*data.prompt_column"),
    ],
)
def test_prompt_column_that_does_not_exist_is_refused(workdir, path, message):
    if path != "text.txt":
        write_pairs(path, [("a" * 30, "b" * 30)] * 3)
    with pytest.raises(UserError, match=message):
        read_documents(replace(PAIRS, path=path, prompt_column="q"))


# Pieces

SPACES = "   ...\n\n  x\t y  \n z" * 300


@pytest.fixture(scope="module", params=[BPE, GPT2], ids=["bpe", "gpt2"])
def bpe(request):
    try:
        return build([TEXT + SPACES], request.param)
    except UserError as error:
        pytest.skip(f"NOT RUN: {error}")


def make_pieces(monkeypatch, text: str, size: int) -> list[readers.Piece]:
    monkeypatch.setattr(readers, "MAX_PIECE_CHARS", size)
    return list(cut_into_pieces([text[:77], text[77:]]))


LONG_TEXT = TEXT * 3 + SPACES


@pytest.mark.parametrize("size", [100, 301, 1000])
def test_document_in_short_pieces_has_the_same_text_and_tokens(monkeypatch, bpe, size):
    texts, ends, _ = zip(*make_pieces(monkeypatch, LONG_TEXT, size), strict=True)
    assert "".join(texts) == LONG_TEXT
    assert max(map(len, texts)) <= size
    assert ends == (False,) * (len(ends) - 1) + (True,)
    ids = np.concatenate([encode(bpe, text) for text in texts])
    assert np.array_equal(ids, encode(bpe, LONG_TEXT))


def test_text_without_spaces_is_cut_anywhere(monkeypatch):
    assert len(make_pieces(monkeypatch, "字" * 1000, 100)) == 10


# Documents between separators


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


# Files that cannot be read


TAR = b"a.txt".ljust(257, b"\0") + b"ustar" + b"A sentence. " * 999
PATHS = [
    ("missing.txt", None, "data.path=missing.txt"),
    ("none/*.txt", None, r"data.path=none/\*.txt"),
    ("folder", None, "data.path=folder .*a pattern"),
    ("/dev/zero", None, "data.path=/dev/zero"),
    ("hub:name", None, "hub:name"),
]
WITHOUT_TEXT = [
    ("empty.txt", b"", "no text in empty.txt"),
    ("empty.jsonl.gz", b"", "no text in empty.jsonl.gz"),
    ("column.jsonl", b'{"words": "a"}\n', "no text in column.jsonl.*data.text_column"),
    ("head.csv", b"text,id\n", "no text in head.csv"),
]
ENCODINGS = [
    ("late.txt", b"a" * 3_000_000 + b"\xff", "late.txt .*0xff.*UTF-8"),
    ("latin.jsonl", b'{"text": "caf\xe9"}\n' * 30, "latin.jsonl .*0xe9.*UTF-8"),
    ("latin.csv", b"text,id\na,1\ncaf\xe9,1\n", "latin.csv .*0xe9.*UTF-8"),
    ("mark.txt", "Sentences. ".encode("utf-16"), "mark.txt .*0xff.*UTF-8"),
]
COMPRESSED = [
    ("torn.txt.gz", gzip.compress(b"text " * 1000, mtime=0)[:-4], "torn.txt.gz .*Truncated"),
    ("torn.txt.zst", zstandard.compress(b"text " * 1000)[:-1], "torn.txt.zst .*Truncated"),
    ("torn.jsonl.gz", gzip.compress(JSON_ROWS * 500, mtime=0)[:-4], "torn.jsonl.gz .*Truncated"),
    ("torn.csv.zst", zstandard.compress(b"text\n" + b"a\n" * 1000)[:-1], "torn.csv.zst .*Trunc"),
    ("texts.tar", TAR, "texts.tar .*NUL bytes, as archives"),
    ("texts.tar.gz", gzip.compress(TAR, mtime=0), "texts.tar.gz .*NUL bytes, as archives"),
]


def compress_with_long_window(content: bytes) -> bytes:
    """A .zst file with a window of 2 GB, as of `zstd --long=31`."""
    parameters = zstandard.ZstdCompressionParameters(window_log=31, compression_level=1)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return compressor.compress(content) + compressor.flush()


COMPRESSED += [
    ("long.txt.zst", compress_with_long_window(b"text " * 99), "too much memory.*-d --long=31"),
    ("twice.txt.gz", gzip.compress(gzip.compress(b"text")), "0x8b.* once as .gz or .zst"),
    ("a.txt.xz", lzma.compress(b"text"), "0xfd.* once as .gz or .zst"),
    ("a.txt.bz2", bz2.compress(b"text"), "UTF-8.* once as .gz or .zst"),
]
MANY_ROWS = JSON_ROWS * 10_000
TABLES = [
    ("broken.jsonl", MANY_ROWS + b'{"text": oops}\n', "broken.jsonl .*line 20001 "),
    ("numbers.jsonl", b'{"text": "a"}\n{"text": 1}\n', "numbers.jsonl .*int, not text, in row 2"),
    ("half.jsonl", b'{"text": "\\ud83d"}\n', "half.jsonl .*surrogates"),
    ("array.json", b'\n [{"text": "a"},\n {"text": "b"}]', "array.json .*line 2 .*jq"),
    ("array.jsonl", b'[{"text": "a"}]\n', "array.jsonl .*line 1 .*jq"),
    ("long.csv", b"text,n\nhello, world,1\n", "long.csv .*line 2: .*not have 2 values"),
    ("short.csv", b'text,n\n"two\nlines",1\na\n', "short.csv .*line 4: .*not have 2 values"),
    (
        "open.csv",
        b'text,n\na,1\n"b\n,2\n' + b"c,3\n" * 99,
        "open.csv .*near line 2: ",
    ),
    ("lines.tsv", b'text\tn\n"two\nlines"\t1\n', "lines.tsv .*line 2: .*not have 2 values"),
    ("BODY.CSV", b"body,id\na,1\nb,2\n", "BODY.CSV .*'text'.*'body', 'id'"),
    ("twice.csv", b"text,n,text\na,1,b\n", "twice.csv .*'text', 'n', 'text'"),
    ("nameless.csv", b"A sentence.,1\nAnother one.,2\n", "first row .*'text'.*'A sentence.', '1'"),
    ("lines.csv", b'"The first\nline.",1\nB,2\n', r"first row .*'text'.*'The first.nline.', '1'"),
    ("torn.parquet", b"PAR1 and nothing else", "torn.parquet .*Parquet"),
]
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
POINTERS = [
    (name, POINTER, f"^{name} is a Git LFS pointer; .* git lfs pull")
    for name in ("pointer.txt", "pointer.jsonl.gz", "pointer.parquet")
]
UNREADABLE = [*POINTERS, *PATHS, *WITHOUT_TEXT, *ENCODINGS, *COMPRESSED, *TABLES]


@pytest.mark.parametrize(
    ("name", "content", "message"), UNREADABLE, ids=[name for name, *_ in UNREADABLE]
)
def test_unreadable_input_gives_one_sentence(workdir, capfd, name, content, message):
    write_file("folder/code.py", "x = 1")
    if content is not None:
        (workdir / name).write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        load_documents(name)
    assert "\n" not in str(error.value)
    assert capfd.readouterr().err == ""


# URLs


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(workdir) -> Iterator[str]:
    """A server of the current folder on this machine -> its address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), QuietHandler) as server:
        run = partial(server.serve_forever, poll_interval=0.01)
        threading.Thread(target=run, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_compressed_url_with_a_query_is_downloaded_and_decompressed(server):
    Path("rows.jsonl.gz").write_bytes(gzip.compress(JSON_ROWS, mtime=0))
    assert load_documents(f"{server}/rows.jsonl.gz?download=true") == ["a", "b"]


def test_url_that_does_not_exist_is_refused(server):
    with pytest.raises(UserError, match=rf"{server}/no.txt cannot be read .* data.path"):
        load_documents(f"{server}/no.txt")


# Data sets of the hub

LINES = ["", " = A title = \n", "", " A line of it . \n"] * 9
PAGES = [f"page {n} " * 9 for n in range(100, 220)]
# For each YAML file the data set: {(configuration, split): {file: documents}}.
REPOSITORIES = {
    "openwebtext": {("plain_text", "train"): {"0": PAGES[:40], "1": PAGES[40:]}},
    "tinystories": {
        ("default", "train"): {"data/train-0": PAGES[7:]},
        ("default", "validation"): {"data/val-0": PAGES[:7]},
    },
    "wikitext": {
        ("wikitext-103-raw-v1", split): {f"wiki/{split}-0": LINES}
        for split in ("train", "validation", "test")
    },
}
STREAMS = pytest.mark.parametrize("stream", ["data.stream=false", "data.stream=true"])


@pytest.fixture(scope="module")
def repositories(tmp_path_factory) -> Path:
    """A folder of data sets. `datasets` reads a local folder like a repository of the hub."""
    root = tmp_path_factory.mktemp("repositories")
    for name, splits in REPOSITORIES.items():
        configs = {}
        for (config, split), tables in splits.items():
            paths = [f"{table}.parquet" for table in tables]
            configs.setdefault(config, []).append({"split": split, "path": paths})
            for path, documents in zip(paths, tables.values(), strict=True):
                scores = [3.1] * len(documents)
                write_table(f"{root}/{name}/{path}", text=documents, score=scores)
        entries = [{"config_name": name, "data_files": files} for name, files in configs.items()]
        header = yaml.safe_dump({"configs": entries})
        write_file(f"{root}/{name}/README.md", f"---\n{header}---\n")
    return root


@pytest.fixture
def prepare_preset(workdir, monkeypatch, repositories):
    """prepare_preset("wikitext", "data.stream=true") prepares a data set with its YAML file."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", workdir / "cache")

    def prepare_preset(name: str, *words: str) -> PreparedData:
        words = (f"data={name}", f"data.repo={repositories}/{name}", *words)
        return prepare_data(parse_config("prepare", "", list(words)).data)

    return prepare_preset


@STREAMS
def test_openwebtext_is_read_from_several_files(prepare_preset, stream):
    prepared = prepare_preset("openwebtext", "data.val_fraction=0.1", stream)
    assert prepared.meta["documents"] == {"train": 108, "val": 12}
    assert decode_split(prepared, "train") + decode_split(prepared, "val") == "".join(PAGES)


@STREAMS
def test_tinystories_has_a_separate_validation_split(prepare_preset, stream):
    prepared = prepare_preset("tinystories", stream)
    assert decode_split(prepared, "train") == "".join(PAGES[7:])
    assert decode_split(prepared, "val") == "".join(PAGES[:7])
    assert read_ids(prepared, "train").count(256) == len(PAGES[7:])


@STREAMS
def test_lines_of_wikitext_are_one_document(prepare_preset, stream):
    prepared = prepare_preset("wikitext", stream)
    assert prepared.meta["documents"] == {"train": 1, "val": 1}
    assert decode_split(prepared, "train") == "".join(LINES)


@STREAMS
@pytest.mark.parametrize("word", ["text_column=body", "text_column=score", "split=nope"])
def test_wrong_key_of_a_hub_data_set_gives_one_sentence(prepare_preset, stream, word):
    with pytest.raises(UserError, match=r"repositories.* cannot be read .*data") as error:
        prepare_preset("tinystories", stream, f"data.{word}")
    assert "\n" not in str(error.value)
    assert not prepared_folders()


@pytest.mark.parametrize("encoding", ["UTF-16LE", "UTF-16BE", "UTF-32LE", "UTF-32BE"])
def test_text_in_another_encoding_without_a_mark_is_refused(tmp_path, encoding):
    path = tmp_path / "a.txt"
    path.write_bytes(("plain text " * 9).encode(encoding))
    with pytest.raises(UserError, match=rf"NUL bytes, .*{encoding}.*iconv -f ENCODING -t UTF-8"):
        load_documents(path)
