"""Documents are read exactly, from all types of files. Errors name the file and the row."""

import gzip
import http.server
import io
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import replace
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
from helpers import BPE, CHAR, GPT2, TEXT

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


@pytest.mark.parametrize("path", ["a.parquet", "a.jsonl", "a.csv"])
def test_local_tables_are_read_without_network_access(workdir, monkeypatch, path):
    hosts = []

    def resolve_host(host, *rest, **options):
        hosts.append(host)
        return []

    monkeypatch.setattr("socket.getaddrinfo", resolve_host)
    load_documents(write_documents(path, ["a", "b"]))
    assert not hosts


JSON_ROWS = b'{"text": "a"}\n{"text": "b"}\n'
NULS = b"alice 1\0bob 22\0" * 99  # many, as in records between NULs
TWO_GZIP_FILES = gzip.compress(b"one\r\n", mtime=0) + gzip.compress(b"two", mtime=0)


@pytest.mark.parametrize(
    ("path", "content", "documents"),
    [
        ("rows.csv", b'text\r\na\r\n \r\n""\r\n"  \t"\r\nb\r\n', ["a", " ", "", "  \t", "b"]),
        ("mark.csv", b"\xef\xbb\xbftext,n\na,1\n", ["a"]),
        ("empty_lines.csv", b"text,n\n\na,1\n\n", ["a"]),
        ("wide.csv", b"text\n" + b"x" * 5_000_000 + b"\n", ["x" * 5_000_000]),
        ("rows.tsv", b'id\ttext\n1\ta, b\n2\t"two\nlines"\n', ["a, b", "two\nlines"]),
        ("dates.jsonl", b'{"text": "2024-01-01"}\n\n{"text": "3"}', ["2024-01-01", "3"]),
        ("types.jsonl", b'{"n": 1, "text": "a"}\n{"n": "x", "text": "b", "m": [1]}', ["a", "b"]),
        ("null.jsonl", b'{"text": null}\r\n{"text": "a"}\r\n{}\r\n{"text": ""}\r\n', ["a", ""]),
        ("mark.jsonl", b'\xef\xbb\xbf{"text": "a"}\n', ["a"]),
        ("rows.ndjson", JSON_ROWS, ["a", "b"]),
        ("rows.jsonlines.gz", gzip.compress(JSON_ROWS, mtime=0), ["a", "b"]),
        ("rows.json", JSON_ROWS, ["a", "b"]),
        ("two.txt.gz", TWO_GZIP_FILES, ["one\r\ntwo"]),
        ("NAME.TXT", b"\xef\xbb\xbfone\r\n\r", ["one\r\n\r"]),
        ("nuls.txt", NULS, [NULS.decode()]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unusual_files_are_read_exactly(workdir, path, content, documents):
    (workdir / path).write_bytes(content)
    assert load_documents(path) == documents


def test_null_rows_of_parquet_are_skipped(workdir):
    path = write_table("a.parquet", text=["one", None, "two", "", "three"])
    assert load_documents(path) == ["one", "two", "", "three"]


def test_rows_can_be_one_document(workdir):
    path = write_table("a.parquet", text=["one", None, "two", "", "three"])
    assert load_documents(path, row_is_document=False) == ["onetwothree"]


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
def test_null_prompts_are_empty(workdir, path):
    write_pairs(path, [("Q: ", "yes"), (None, "no"), ("Q: x", "")])
    documents = [("Q: ", "yes"), ("", "no"), ("Q: x", "")]
    assert read_documents(replace(PAIRS, path=path)) == documents


@pytest.mark.parametrize("path", ["rows.jsonl", "rows.parquet"])
def test_rows_without_completion_are_skipped(workdir, path):
    write_pairs(path, [("Q: ", "yes"), ("Q", None), (None, None)])
    assert read_documents(replace(PAIRS, path=path)) == [("Q: ", "yes")]


def test_prompts_that_are_numbers_are_refused(workdir):
    write_pairs("rows.parquet", [(0, "zero"), (1, "one")])
    with pytest.raises(UserError, match=r"rows.parquet .*column question contains int, not text"):
        read_documents(replace(PAIRS, path="rows.parquet"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("rows.jsonl", r"there is no prompt in rows.jsonl; .*data.prompt_column"),
        ("rows.csv", r"rows.csv .*'q'.*data.prompt_column"),
        ("rows.parquet", r"rows.parquet .*'q'.*data.prompt_column"),
    ],
)
def test_prompt_column_that_does_not_exist_is_refused(workdir, path, message):
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
def test_pieces_are_short_and_together_the_document(monkeypatch, size):
    texts, ends, _ = zip(*make_pieces(monkeypatch, LONG_TEXT, size), strict=True)
    assert "".join(texts) == LONG_TEXT
    assert max(map(len, texts)) <= size
    assert ends == (False,) * (len(ends) - 1) + (True,)


@pytest.mark.parametrize("size", [100, 301, 1000])
def test_document_in_pieces_has_the_same_tokens(monkeypatch, bpe, size):
    pieces = make_pieces(monkeypatch, LONG_TEXT, size)
    ids = np.concatenate([encode(bpe, piece.text) for piece in pieces])
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


def test_separated_documents_get_an_end_of_text_token(workdir):
    prepared = prepare_data(DataConfig(path="text.txt", separator="\n"))
    lines = Path("text.txt").read_text(encoding="utf-8").splitlines()
    ids = read_ids(prepared, "train") + read_ids(prepared, "val")
    assert ids.count(256) == len(lines)
    assert decode_split(prepared, "train") + decode_split(prepared, "val") == "".join(lines)


# Files that cannot be read


def make_tar(text: bytes) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        entry = tarfile.TarInfo("a.txt")
        entry.size = len(text)
        archive.addfile(entry, io.BytesIO(text))
    return content.getvalue()


TAR = make_tar(b"A sentence. " * 9999)
SENTENCES = "Sentences. " * 99
RUSSIAN = "Это простой текст. " * 99
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
    ("late.txt", b"a" * 3_000_000 + b"\xff", "late.txt .*not UTF-8: byte 0xff after b'aaa"),
    ("first.txt", b"\xe9t\xe9 " * 99, "first.txt .*not UTF-8: byte 0xe9;"),
    ("latin.jsonl", b'{"text": "caf\xe9"}\n' * 30, "latin.jsonl .*byte 0xe9 after b'caf'"),
    ("latin.csv", b"text,id\na,1\ncaf\xe9,1\n", "latin.csv .*byte 0xe9 after .*caf"),
    ("little.txt", SENTENCES.encode("utf-16-le"), "little.txt has NUL bytes"),
    ("big.txt", SENTENCES.encode("utf-16-be"), "big.txt has NUL bytes"),
    ("russian.txt", RUSSIAN.encode("utf-16-le"), "russian.txt has NUL bytes"),
    ("mark.txt", "Sentences. ".encode("utf-16"), "mark.txt .*iconv"),
    ("table.csv", f"text\n{SENTENCES}\n".encode("utf-16"), "table.csv has NUL bytes"),
    ("rows.jsonl", (JSON_ROWS.decode() * 99).encode("utf-16-le"), "rows.jsonl has NUL bytes"),
]
COMPRESSED = [
    ("torn.txt.gz", gzip.compress(b"text " * 1000, mtime=0)[:-4], "torn.txt.gz .*Truncated"),
    ("torn.txt.zst", zstandard.compress(b"text " * 1000)[:-1], "torn.txt.zst .*Truncated"),
    ("torn.jsonl.gz", gzip.compress(JSON_ROWS * 500, mtime=0)[:-4], "torn.jsonl.gz .*Truncated"),
    ("torn.csv.zst", zstandard.compress(b"text\n" + b"a\n" * 1000)[:-1], "torn.csv.zst .*Trunc"),
    ("texts.tar", TAR, "texts.tar is an archive; unpack it"),
    ("texts.tar.gz", gzip.compress(TAR, mtime=0), "texts.tar.gz is an archive; unpack it"),
]
MANY_ROWS = JSON_ROWS * 100_000  # 200,000 lines
TABLES = [
    ("broken.jsonl", MANY_ROWS + b'{"text": oops}\n', "broken.jsonl .*200001"),
    ("numbers.jsonl", b'{"text": "a"}\n{"text": 1}\n', "numbers.jsonl .*string to number.* 2"),
    ("twice.jsonl", b'{"text": "a", "text": "b"}\n', "twice.jsonl .*twice"),
    ("array.json", b'\n [{"text": "a"},\n {"text": "b"}]', "array.json is a JSON array.*jq"),
    ("array.jsonl", b'[{"text": "a"}]\n', "array.jsonl is a JSON array.*jq"),
    ("long.csv", b"text,n\nhello, world,1\n", "long.csv .*line 2 has 3 values instead of 2"),
    ("short.csv", b'text,n\n"two\nlines",1\na\n', "short.csv .*line 4 has 1 values instead of 2"),
    ("open.csv", b'text,n\na,1\n"b\n,2\n' + b"c,3\n" * 99, "open.csv .*line 3 has wrong quotes"),
    ("BODY.CSV", b"body,id\na,1\nb,2\n", "BODY.CSV .*'text'.*'body', 'id'"),
    ("twice.csv", b"text,n,text\na,1,b\n", "twice.csv .*'text', 'n', 'text'"),
    ("nameless.csv", b"A sentence.,1\nAnother one.,2\n", "'A sentence.', '1'.* names in the first"),
    ("lines.csv", b'"The first\nline.",1\nB,2\n', "'The first.nline.', '1'.* names in the first"),
    ("half.parquet", b"PAR1 and nothing else", "half.parquet .*Parquet"),
]
UNREADABLE = [*PATHS, *WITHOUT_TEXT, *ENCODINGS, *COMPRESSED, *TABLES]


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


@pytest.mark.parametrize("tokenizer", [CHAR, BPE], ids=["char", "bpe"])
@pytest.mark.parametrize(
    ("name", "content"),
    [("late.txt", b"a" * 3_000_000 + b"\xff"), ("empty.txt", b""), ("a.jsonl", b'{"text": 1}\n')],
)
def test_unreadable_input_leaves_no_folder(workdir, tokenizer, name, content):
    (workdir / name).write_bytes(content)
    with pytest.raises(UserError, match=name):
        prepare_data(DataConfig(path=name), tokenizer)
    assert not prepared_folders()


def test_column_of_numbers_is_refused(workdir):
    path = write_table("a.parquet", text=[1, 2, 3])
    with pytest.raises(UserError, match=r"a.parquet .*column text contains int, not text"):
        load_documents(path)


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
def test_advice_for_another_encoding_converts_the_text(workdir):
    text = "Sätze, one per line.\n" * 99
    (workdir / "other.txt").write_bytes(text.encode("utf-16"))
    with pytest.raises(UserError) as error:
        load_documents("other.txt")
    command = str(error.value).rpartition("with ")[2]
    subprocess.run(f"{command} other.txt > converted.txt", shell=True, check=True)
    assert load_documents("converted.txt") == [text]


# URLs


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture
def server(workdir) -> Iterator[str]:
    """A server of the current folder on this machine -> its address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), QuietHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_url_is_downloaded(server):
    text = Path("text.txt").read_text(encoding="utf-8")
    assert load_documents(f"{server}/text.txt") == [text]


def test_compressed_url_with_a_query_is_decompressed(server):
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
    "fineweb_edu": {
        ("default", "train"): {"data/0": ["another configuration"]},
        ("sample-10BT", "train"): {"sample/0": PAGES},
    },
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
def test_fineweb_edu_is_read_from_its_configuration(prepare_preset, stream):
    prepared = prepare_preset("fineweb_edu", "data.val_documents=20", stream)
    assert prepared.meta["documents"] == {"train": 100, "val": 20}
    assert decode_split(prepared, "val") + decode_split(prepared, "train") == "".join(PAGES)


@STREAMS
def test_tinystories_has_a_separate_validation_split(prepare_preset, stream):
    prepared = prepare_preset("tinystories", stream)
    assert decode_split(prepared, "train") == "".join(PAGES[7:])
    assert decode_split(prepared, "val") == "".join(PAGES[:7])


def test_each_row_of_a_hub_data_set_gets_an_end_of_text_token(prepare_preset):
    prepared = prepare_preset("tinystories")
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


def test_unknown_configuration_of_a_hub_data_set_gives_one_sentence(prepare_preset):
    with pytest.raises(UserError, match=r"repositories.* cannot be read .*data") as error:
        prepare_preset("fineweb_edu", "data.config=nope")
    assert "\n" not in str(error.value)


def test_keys_of_a_hub_data_set_do_not_apply_to_a_local_text(workdir):
    config = parse_config("prepare", "", ["data=wikitext", "data.path=text.txt"]).data
    assert config.row_is_document is False
    assert prepare_data(config).meta["documents"] == {"train": 1, "val": 1}
