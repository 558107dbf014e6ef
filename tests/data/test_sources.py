"""Any text, exactly: from every kind of source through every kind of tokenizer and back."""

import csv
import gzip
import json
import re
import time
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from helpers import BPE, BYTE, CHAR, GPT2, TEXT_SOURCE
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data import sources, tokenizer
from data import text as data_text
from data.config import DataConfig, TokenizerConfig
from data.fast_bpe import FastBPE, linear
from data.prepare import prepare
from data.splits import TextStats
from data.text import chunk_document, slice_documents


def empty_mix(**changed) -> DataConfig:
    """As configs/data/mix.yaml has it, but for what is changed."""
    mix = {"name": "mix", "path": None, "source": "mix", "text_column": None, "val_fraction": None}
    return replace(TEXT_SOURCE, **mix | changed)


ODD = ["", "emoji 😀 and 👩‍👩‍👧", "Windows\r\nlines\rand old Macs", "NUL \x00 bytes \x00\x00",
       "NA", "null", "007", '"quoted", text',
       " blanks ", "\n", "<|endoftext|> is text", "\u2028\x85\x0c\x1a", "e\u0301", "\ufeff in between"]  # fmt: skip
any_text = st.one_of(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), st.sampled_from(ODD))
some_documents = st.lists(any_text, max_size=8).map(lambda texts: ["there is text ahead", *texts, "and behind"])


def parquet(path: Path, documents: list[str]) -> None:
    pq.write_table(pa.table({"id": range(len(documents)), "text": documents}), path)


def jsonl(path: Path, documents: list[str]) -> None:
    lines = [json.dumps({"text": text, "n": n}, ensure_ascii=n % 2 == 0) + "\n" for n, text in enumerate(documents)]
    path.write_text("".join(lines), encoding="utf-8", newline="")


def comma_separated(path: Path, documents: list[str]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as f:
        csv.writer(f).writerows([["n", "text"], *enumerate(documents)])


def compressed(path: Path) -> None:
    raw = path.read_bytes()
    Path(f"{path}.gz").write_bytes(gzip.compress(raw))
    Path(f"{path}.zst").write_bytes(zstandard.compress(raw))


TABLES = {"parquet": parquet, "jsonl": jsonl, "csv": comma_separated}


def decoded(prepared) -> list[str]:
    """The documents that the tokens of both splits are of, an end of text behind each."""
    ids = np.concatenate([prepared.tokens(split)[:] for split in ("train", "val")])
    end = tokenizer.end_of_text(prepared.encoding)
    ends = np.flatnonzero(ids == end)
    assert ends[-1] == len(ids) - 1
    return [prepared.encoding.decode(part[:-1].tolist()) for part in np.split(ids, ends + 1)[:-1]]


def there_and_back(table: str, kind: TokenizerConfig, documents: list[str]) -> None:
    with TemporaryDirectory() as folder, chdir(folder):
        TABLES[table](Path(f"texts.{table}"), documents)
        config = replace(TEXT_SOURCE, path=f"texts.{table}", val_fraction=0.4)
        assert decoded(prepare(config, kind, 2, say=lambda line: None)) == documents


def there_and_back_as_a_file(kind: TokenizerConfig, text: str) -> None:
    with TemporaryDirectory() as folder, chdir(folder):
        Path("text.md").write_text(text, encoding="utf-8", newline="")
        prepared = prepare(replace(TEXT_SOURCE, path="text.md", val_fraction=0.4), kind, 1, say=lambda line: None)
        ids = [prepared.tokens(split)[:] for split in ("train", "val")]
        end = tokenizer.end_of_text(prepared.encoding)
        assert prepared.encoding.decode([i for i in np.concatenate(ids).tolist() if i != end]) == text


@pytest.mark.parametrize("table", TABLES)
@settings(max_examples=16, deadline=None)
@example(kind=CHAR, documents=[*ODD, "and behind"])
@example(kind=BYTE, documents=[*ODD, "and behind"])
@example(kind=BPE, documents=[*ODD, "and behind"])
@given(kind=st.sampled_from([CHAR, BYTE, BPE]), documents=some_documents)
def test_tables_come_back_to_the_letter(table, kind, documents):
    there_and_back(table, kind, documents)


@pytest.mark.parametrize("kind", [CHAR, BYTE, BPE], ids=lambda kind: kind.name)
@settings(max_examples=25, deadline=None)
@example(text="".join(ODD) + "and behind")
@given(text=some_documents.map("".join))
def test_a_text_file_comes_back_to_the_letter(kind, text):
    there_and_back_as_a_file(kind, text)


def test_gpt2s_tokens_come_back_to_the_letter():
    if tokenizer.needs_download(GPT2):
        pytest.skip("NOT RUN: needs GPT-2's vocabulary")
    for table in TABLES:
        there_and_back(table, GPT2, [*ODD, "and behind"])
    there_and_back_as_a_file(GPT2, "".join(ODD) + "and behind")


@pytest.mark.parametrize("table", TABLES)
def test_a_table_of_ones_own_is_read_without_a_network(workdir, monkeypatch, table):
    """`datasets`, left to itself, counts each read on a server, and waits for it where there is none."""
    TABLES[table](Path(f"texts.{table}"), ODD)
    asked = []
    monkeypatch.setattr("socket.getaddrinfo", lambda host, *rest, **options: asked.append(host) or [])
    assert sources.documents(replace(TEXT_SOURCE, path=f"texts.{table}")) == ODD
    assert not asked


def test_blank_rows_of_a_table_of_one_column_are_rows(workdir):
    documents = ["a", " ", "", "  \t", "b"]
    with open("one.csv", "w", encoding="utf-8", newline="") as f:
        csv.writer(f).writerows([["text"], *([text] for text in documents)])
    assert sources.documents(replace(TEXT_SOURCE, path="one.csv")) == documents


def test_lines_of_json_are_read_for_their_text_alone(workdir):
    """Whatever other columns hold, and also where all texts look like dates."""
    rows = [
        {"text": "2024-01-01", "n": 1},
        {"n": "x", "text": "2024-01-02", "more": [1]},
        {"text": None},
        {"text": "3"},
    ]
    Path("a.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    assert sources.documents(replace(TEXT_SOURCE, path="a.jsonl")) == ["2024-01-01", "2024-01-02", "3"]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_compressed_files_are_read_as_what_is_in_them(workdir, name, suffix):
    documents = ["one\r\n😀" * 30, "two", "three\x00" * 9]
    path = workdir / name
    if name == "a.txt":
        documents = documents[:1]
        path.write_text(documents[0], encoding="utf-8", newline="")
    else:
        TABLES[path.suffix[1:]](path, documents)
    compressed(path)
    assert sources.documents(replace(TEXT_SOURCE, path=f"{name}{suffix}")) == documents


def test_lines_that_all_begin_with_a_space_are_cut_in_linear_time(workdir):
    begun = time.perf_counter()
    assert "".join(text for text, _ in chunk_document(["x\n " * 700_000])) == "x\n " * 700_000
    assert time.perf_counter() - begun < 3


def test_a_line_of_ten_megabytes_and_long_runs_come_back(workdir):
    """In words, in no words, and in blanks, which overflow the stack of a tokenizer's regex."""
    line = "".join(f"word{n} " for n in range(900_000))
    assert len(line) > 9e6
    text = line + "\n" + "x" * 1_100_000 + " " * 1_100_000 + "日本語" * 100_000 + "\n" * 100_000
    (workdir / "long.txt").write_text(text, encoding="utf-8")
    for kind in (BYTE, BPE):
        prepared = prepare(replace(TEXT_SOURCE, path="long.txt"), kind, 16, say=lambda line: None)
        ids = np.concatenate([prepared.tokens(split)[:] for split in ("train", "val")])
        # Of bytes the ids are the text; a list of ten million would be half a gigabyte.
        back = ids.astype(np.uint8).tobytes() if kind is BYTE else prepared.encoding.decode_bytes(ids.tolist())
        assert back == text.encode()


@pytest.mark.parametrize("kind", [BPE, GPT2], ids=lambda kind: kind.name)
def test_a_document_in_pieces_has_the_tokens_of_the_whole(workdir, monkeypatch, kind):
    if tokenizer.needs_download(kind):
        pytest.skip("NOT RUN: needs GPT-2's vocabulary")
    text = (workdir / "text.txt").read_text() * 3 + "   ...\n\n  x\t y  \n z" * 300
    encoding = tokenizer.build(tokenizer.Corpus([text], several=False), kind)
    whole = tokenizer.encode(encoding, text)
    for size in (100, 301, 1000):
        monkeypatch.setattr(data_text, "PIECE", size)
        pieces = list(chunk_document([text[:77], text[77:]]))
        assert "".join(piece for piece, _ in pieces) == text
        assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]
        assert max(len(piece) for piece, _ in pieces) <= size
        assert np.array_equal(np.concatenate([tokenizer.encode(encoding, piece) for piece, _ in pieces]), whole)


GPT4 = (  # cl100k_base's and o200k_base's, of tiktoken 0.14
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
GPT2S = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
OLD_GPT2S = r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@pytest.fixture(scope="module")
def merges() -> list[bytes]:
    """Tokens for text full of blanks, so that another cut is another sequence of ids."""
    text = "".join(f" {word}\n  {word}'s\t\t{word} \r\n\n{word}.\n\n" for word in ("ab", "abc", "9", "99 ")) * 20
    encoding = tokenizer.build(tokenizer.Corpus([text], several=False), replace(BPE, vocab_size=400))
    return [encoding.decode_single_token_bytes(i) for i in range(encoding.n_vocab)]


@pytest.mark.parametrize(
    "pattern", [tokenizer.BPE_PATTERN, GPT2S, OLD_GPT2S, *GPT4], ids=["ours", "gpt2", "older", "cl", "o2"]
)
@settings(max_examples=150, deadline=None)
@given(text=st.text(st.sampled_from(list("  \n\r\tabc9.,'sé/\u3000\xa0\x85\x1e\x1c\x0b")), max_size=14))
@example(text="a\n" + " " * 1001)
def test_encoding_in_linear_time_gives_the_same_ids(merges, pattern, text):
    encoding = tokenizer._encoding("x", pattern, merges, {})
    fast = FastBPE.of(encoding)
    assert fast is not None
    for each in (text, text * 9):
        assert np.array_equal(tokenizer.encode(encoding, each, fast=fast), tokenizer.encode(encoding, each))


@pytest.mark.parametrize("pattern", [tokenizer.EACH_CHARACTER, r"a(?=b)|\s+(?!\S)|\s", r"\w+|\s+(?!\S)|x"])
def test_patterns_of_another_kind_are_left_as_they_are(pattern):
    assert linear(pattern) is None


pieces_of = st.lists(st.lists(st.text("ab", max_size=4), min_size=1, max_size=3), min_size=1, max_size=5).map(
    lambda documents: [(text, n == len(texts) - 1) for texts in documents for n, text in enumerate(texts)]
)


@settings(max_examples=200)
@given(pieces=pieces_of, data=st.data())
def test_a_cut_anywhere_leaves_two_parts_that_are_the_whole(pieces, data):
    lengths, length = [], 0
    for text, ends in pieces:
        length += len(text)
        if ends:
            lengths.append(length)
            length = 0
    document = data.draw(st.integers(0, len(lengths) - 1))
    cut = (document, data.draw(st.integers(0, lengths[document] - 1)) if lengths[document] else 0)
    first, second = list(slice_documents(pieces, (0, 0), cut)), list(slice_documents(pieces, cut, None))
    assert "".join(text for text, _ in first + second) == "".join(text for text, _ in pieces)
    assert sum(len(text) for text, _ in first) == sum(lengths[:document]) + cut[1]
    assert sum(ends for _, ends in first) == document
    assert sum(ends for _, ends in second) == len(lengths) - document


@settings(max_examples=100, deadline=None)
@given(documents=st.lists(st.text("abc", max_size=9), min_size=2, max_size=40), fraction=st.floats(0.05, 0.9))
def test_documents_are_held_out_whole_and_enough_of_them(documents, fraction):
    survey = TextStats().add((text, True) for text in documents)
    if not survey.characters:
        return
    (first, character), _ = survey.find_val_cut(fraction)
    assert character == 0 and 0 < first < len(documents)
    held_out = sum(map(len, documents[first:]))
    assert held_out >= survey.characters * fraction or first == 1
    assert sum(map(len, documents[first + 1 :])) < max(1, survey.characters * fraction)  # and no more than that


def test_many_documents_are_divided_without_keeping_the_length_of_each(monkeypatch):
    monkeypatch.setattr("data.splits.MOST_LENGTHS", 64)
    survey = TextStats().add(("abcd", True) for _ in range(10_007))
    assert len(survey.lengths) <= 64 and survey.documents == 10_007
    (first, _), ahead = survey.find_val_cut(0.25)
    assert abs(first - 7505) <= survey.each
    assert abs(ahead - first / 10_007) < 1e-3


# What a path names


def test_a_folder_a_pattern_and_a_list_name_files_in_order(workdir):
    for name in ("b/part-10.txt", "b/part-9.txt", "b/deep/x.md", "b/.hidden/no.txt", "b/code.py", "c.txt"):
        (workdir / name).parent.mkdir(parents=True, exist_ok=True)
        (workdir / name).write_text(name)
    parquet(workdir / "b/t.parquet", ["row 1", "row 2"])

    def documents(path):
        return sources.documents(replace(TEXT_SOURCE, path=path))

    assert documents("b") == ["b/deep/x.md", "b/part-9.txt", "b/part-10.txt", "row 1", "row 2"]
    assert documents("b/*.txt") == ["b/part-9.txt", "b/part-10.txt"]
    assert documents("b/**/*.py") == ["b/code.py"]
    assert documents(["c.txt", "b/deep", "c.txt"]) == ["c.txt", "b/deep/x.md"]
    (workdir / "runs/a").mkdir(parents=True)
    (workdir / "runs/a/notes.txt").write_text("made by a run")
    (workdir / "text.txt").unlink()
    assert documents(".")[-1] == "c.txt"
    (workdir / "more.jsonl").write_text('{"text": "1"}\n{"text": "2"}\n{"text": "3"}\n')
    assert sources.documents(replace(TEXT_SOURCE, path="more.jsonl", max_documents=2)) == ["1", "2"]


REFUSED = [
    ("missing.txt", None, "missing.txt does not exist"),
    ("none/*.txt", None, "matches no file"),
    ("folder", None, r"has no file in .txt, .md, .parquet, .jsonl, .csv, nor compressed .* \(but 1 .py\)"),
    ("[a.txt,b.txt]", None, r"a list of files takes quotes: data.path="),
    ("empty.txt", b"", "empty.txt holds no text"),
    ("latin.txt", b"caf\xe9 " * 100, r"latin.txt is not UTF-8: byte 3 is 0xe9; save it as UTF-8"),
    ("late.txt", b"a" * 3_000_000 + b"\xff", r"byte 3000000 is 0xff"),
    ("half.txt", b"a" * 100 + "é".encode()[:1], r"byte 100 is 0xc3"),
    ("wide.txt", "wide".encode("utf-16"), r"wide.txt is UTF-16, not UTF-8 \(byte 0 is 0xff\)"),
    ("picture.png", b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\x01\x00\x00", r"picture.png is binary, not text"),
    ("surrogate.txt", b"abc \xed\xa0\x80 def", r"byte 4 begins a lone surrogate"),
    ("short.txt", b"too short", r"training text has 8 tokens, .* set model.block_size=7"),
    ("surrogate.jsonl", b'{"text": "fine"}\n{"text": "\\ud83d"}\n', r"line 2 of surrogate.jsonl has a lone surrogate"),
    ("broken.jsonl", b'{"text": "fine"}\n{"text": oops}\n', r"line 2 of broken.jsonl is no JSON"),
    ("latin.jsonl", b'{"text": "caf\xe9"}\n', r"latin.jsonl is not UTF-8: byte 13 is 0xe9"),
    ("corrupt.parquet", b"PAR1 and nothing else of it PAR1", r"corrupt.parquet cannot be read as .parquet"),
    (
        "column.jsonl",
        b'{"words": "a"}\n',
        r"column.jsonl has no column text in line 1; set data.text_column to one of words",
    ),
    ("numbers.jsonl", b'{"text": 1}\n', r"column text of numbers.jsonl holds no text but int in line 1"),
    ("nulls.jsonl", b'{"text": null}\n', r"nulls.jsonl holds no text"),
    ("none.jsonl", b"", r"none.jsonl holds no text"),
    ("torn.txt.gz", gzip.compress(b"text " * 1000)[:-20], r"torn.txt.gz cannot be decompressed"),
    ("torn.txt.zst", zstandard.compress(b"text " * 1000)[:-1], r"torn.txt.zst cannot be decompressed"),
    ("torn.csv.zst", zstandard.compress(b"n,text\n" + b"1,a\n" * 1000)[:-1], r"torn.csv.zst cannot be decompressed"),
    ("torn.jsonl.zst", zstandard.compress(b'{"text": "a"}\n' * 1000)[:-1], r"torn.jsonl.zst cannot be decompressed"),
    ("empty.jsonl.gz", gzip.compress(b""), r"empty.jsonl.gz holds no text"),
    ("array.jsonl", b'[{"text": "a"}]', r"line 1 of array.jsonl is no object"),
    ("~nosuch/x.txt", None, r"does not exist"),
    ("no.txt.gz", b"this is no gzip", r"no.txt.gz cannot be decompressed"),
    ("no.txt.zst", b"this is no zstd", r"no.txt.zst cannot be decompressed"),
]


@pytest.mark.parametrize(("name", "content", "said"), REFUSED, ids=[name for name, _, _ in REFUSED])
def test_what_cannot_be_read_is_refused_in_a_sentence_and_leaves_nothing(workdir, name, content, said):
    (workdir / "folder").mkdir()
    (workdir / "folder/code.py").write_text("x = 1")
    if content is not None:
        (workdir / name).write_bytes(content)
    with pytest.raises(UserError) as refused:
        prepare(replace(TEXT_SOURCE, path=name), BYTE, 16, say=lambda line: None)
    assert re.search(said, str(refused.value)), refused.value
    assert "\n" not in str(refused.value)
    assert not list((workdir / "data/prepared").glob("[!.]*/"))


def test_a_parquet_file_that_is_cut_short_is_refused(workdir):
    parquet(workdir / "a.parquet", [f"document {n}" * 99 for n in range(2000)])
    whole = (workdir / "a.parquet").read_bytes()
    (workdir / "a.parquet").write_bytes(whole[:3000] + b"\0" * 3000 + whole[6000:])  # where the rows are
    with pytest.raises(UserError, match=r"cannot be read as \.parquet"):
        prepare(replace(TEXT_SOURCE, path="a.parquet"), BYTE, 16, say=lambda line: None)
    assert not list((workdir / "data/prepared").glob("[!.]*/"))


# The hub's data sets, from folders shaped like their repositories


def repository(folder: Path, configs: str, files: dict[str, list[dict]]) -> str:
    for name, rows in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows), folder / name)
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    return str(folder)


PRESETS = {
    "openwebtext": (
        "- config_name: plain_text\n  data_files:\n  - split: train\n    path: plain_text/train-*\n",
        {f"plain_text/train-0000{k}-of-00003.parquet": [{"text": f"page {k}.{n} " * 9} for n in range(40)]
         for k in range(3)},
        ["data.val_fraction=0.1"],
        (108, 12),
    ),
    "fineweb_edu": (
        "- config_name: default\n  data_files:\n  - split: train\n    path: data/*/*\n"
        "- config_name: sample-10BT\n  data_files:\n  - split: train\n    path: sample/10BT/*\n",
        {"data/CC/000.parquet": [{"text": "another config", "score": 1.0}],
         "sample/10BT/000_00000.parquet": [
             {"text": f"page {n} " * 9, "id": f"<{n}>", "url": "u", "language_score": 0.9, "token_count": 9,
              "score": 3.1, "int_score": 3} for n in range(60)]},
        ["data.val_documents=20"],
        (40, 20),
    ),
    "tinystories": (
        "- config_name: default\n  data_files:\n  - split: train\n    path: data/train-*\n"
        "  - split: validation\n    path: data/validation-*\n",
        {"data/train-00000-of-00001.parquet": [{"text": f"Story {n}, once upon a time. "} for n in range(50)],
         "data/validation-00000-of-00001.parquet": [{"text": f"Another {n}, once. "} for n in range(7)]},
        [],
        (50, 7),
    ),
    "wikitext": (
        "- config_name: wikitext-103-raw-v1\n  data_files:\n  - split: test\n    path: wikitext-103-raw-v1/test-*\n"
        "  - split: train\n    path: wikitext-103-raw-v1/train-*\n  - split: validation\n"
        "    path: wikitext-103-raw-v1/validation-*\n",
        {f"wikitext-103-raw-v1/{split}-00000-of-00001.parquet":
         [{"text": line} for line in ["", f" = {split} = \n", "", " A line of it . \n"] * 9]
         for split in ("train", "validation", "test")},
        [],
        (1, 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", PRESETS)
def test_presets_read_data_sets_shaped_like_the_real_ones(workdir, monkeypatch, name, stream):

    from configs.cli import parse_config

    configs, files, settings, documents = PRESETS[name]
    repo = repository(workdir / "repository", configs, files)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(workdir / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", workdir / "cache")
    if stream and name == "openwebtext":
        settings = ["data.val_documents=12"]
    config = parse_config(
        "prepare", "", [f"data={name}", f"data.repo={repo}", f"data.stream={str(stream).lower()}", *settings]
    )
    prepared = prepare(config.data, BYTE, 16, say=lambda line: None)
    assert tuple(prepared.meta["documents"].values()) == documents
    column = {split: [row["text"] for file, rows in files.items() for row in rows
                      if split in file and "data/CC" not in file] for split in ("train", "validation")}  # fmt: skip
    ids = prepared.tokens("train")[:].tolist()
    text = prepared.encoding.decode([i for i in ids if i != 256])
    if name in ("tinystories", "wikitext"):
        assert text == "".join(column["train"])
        val = [i for i in prepared.tokens("val")[:].tolist() if i != 256]
        assert prepared.encoding.decode(val) == "".join(column["validation"])
    else:
        val = prepared.encoding.decode([i for i in prepared.tokens("val")[:].tolist() if i != 256])
        assert not set(text.split("page")[1:]) & set(val.split("page")[1:])  # no document is in both
        assert ids.count(256) == documents[0]


def test_a_repository_on_the_disk_that_changes_is_read_anew(workdir):
    configs, files, _, _ = PRESETS["tinystories"]
    repo = repository(workdir / "repository", configs, files)
    config = replace(TEXT_SOURCE, source="hub", path=None, repo=repo, split="train")
    first = prepare(config, BYTE, 16, say=lambda line: None)
    repository(workdir / "repository", configs, {name: rows[::-1] for name, rows in files.items()})
    second = prepare(config, BYTE, 16, say=lambda line: None)
    assert second.folder != first.folder
    assert second.encoding.decode(second.tokens("train")[:9].tolist()) == "Story 49,"


def test_a_split_that_is_not_there_is_named(workdir):
    configs, files, _, _ = PRESETS["tinystories"]
    repo = repository(workdir / "repository", configs, files)
    config = replace(TEXT_SOURCE, source="hub", path=None, repo=repo, split="trian")
    with pytest.raises(UserError, match=r"could not be read from the hub .*trian.* mend data.repo"):
        prepare(config, BYTE, 16, say=lambda line: None)


# What is held out


def test_validation_can_be_a_text_of_its_own_or_the_first_documents(workdir):
    parquet(workdir / "a.parquet", [f"train {n} " for n in range(30)])
    (workdir / "val.txt").write_text("something else " * 10)

    def texts(**changed):
        prepared = prepare(replace(TEXT_SOURCE, path="a.parquet", **changed), BYTE, 4, say=lambda line: None)
        return {split: prepared.encoding.decode([i for i in prepared.tokens(split)[:].tolist() if i != 256])
                for split in ("train", "val")}  # fmt: skip

    own = texts(val_path="val.txt")
    assert own == {"train": "".join(f"train {n} " for n in range(30)), "val": "something else " * 10}
    first = texts(val_documents=4)
    assert first["val"] == "train 0 train 1 train 2 train 3 "
    assert first["train"].startswith("train 4 ") and first["train"].endswith("train 29 ")
    some = texts(max_documents=10, val_fraction=0.2)
    assert some["train"] + some["val"] == "".join(f"train {n} " for n in range(10))
    with pytest.raises(UserError, match=r"data\.val_documents=30 leaves nothing to train on, as text has 30 in all"):
        texts(val_documents=30)


def test_where_whole_documents_are_more_than_was_asked_for_it_is_said(workdir):
    said = []
    (workdir / "long.txt").write_text("a longer text " * 3000)
    prepare(replace(TEXT_SOURCE, path=["text.txt", "long.txt"]), BYTE, 4, said.append)
    assert any(line.startswith("62% of text is held out, not data.val_fraction=0.1, since documents") for line in said)


@pytest.mark.parametrize(("split", "val_split"), [("train+test", "test"), ("train[:90%]", "train[50%:]")])
def test_a_split_is_not_held_out_from_itself(workdir, split, val_split):
    parquet(workdir / "train.parquet", [f"train {n} " for n in range(30)])
    parquet(workdir / "test.parquet", [f"test {n} " for n in range(30)])
    config = replace(TEXT_SOURCE, source="hub", path=None, repo=".", split=split, val_split=val_split)
    with pytest.raises(UserError, match=r", split (test|train) would be both trained on and held out; leave it out"):
        prepare(config, BYTE, 4, say=lambda line: None)


def test_files_of_a_data_set_that_change_places_are_another_text(workdir):
    Path("set").mkdir()
    for name in ("train", "validation"):
        parquet(workdir / f"set/{name}.parquet", [f"{name} {n} " for n in range(30)])
    config = replace(TEXT_SOURCE, source="hub", path=None, repo="set", split="train")
    first = prepare(config, BYTE, 4, say=lambda line: None)
    Path("set/train.parquet").rename("set/test.parquet")
    Path("set/validation.parquet").rename("set/train.parquet")  # behind it, in order of their names, before and after
    second = prepare(config, BYTE, 4, say=lambda line: None)
    assert first.folder != second.folder
    assert second.encoding.decode(second.tokens("train")[:5].tolist()) == "valid"


def test_a_mix_may_be_of_one_text(workdir):
    said = []
    prepared = prepare(empty_mix(mix={"only": TEXT_SOURCE}), CHAR, 4, said.append)
    assert said[0].startswith("preparing mix: 1 text (only) -> ")
    assert prepared.meta["tokens"] == prepare(TEXT_SOURCE, CHAR, 4, said.append).meta["tokens"]


def test_of_texts_that_are_mixed_none_is_held_out_by_one_and_trained_on_by_another(workdir):
    for n in range(4):
        Path(f"{n}.txt").write_text(f"document {n} " * 20)
    all_of_them, one = replace(TEXT_SOURCE, path="?.txt"), replace(TEXT_SOURCE, path="1.txt", weight=3.0)
    with pytest.raises(UserError, match=r"1.txt is in data.mix.all and in data.mix.one, and what the one holds out"):
        prepare(empty_mix(mix={"all": all_of_them, "one": one}), BYTE, 4, say=lambda line: None)
    held_out = replace(one, val_path="0.txt")
    with pytest.raises(UserError, match=r"0.txt would be both trained on and held out"):
        prepare(empty_mix(mix={"all": all_of_them, "one": held_out}), BYTE, 4, say=lambda line: None)
    both = {"all": replace(TEXT_SOURCE, path=["1.txt", "2.txt"], val_path="0.txt"), "one": held_out}
    assert prepare(empty_mix(mix=both), BYTE, 4, say=lambda line: None).meta["documents"] == {"train": 3, "val": 2}


@pytest.mark.parametrize("key", ["path", "val_path", "val_documents", "val_fraction", "max_documents", "text_column"])
def test_a_key_of_each_text_is_not_the_mixes(key):
    value = {"path": "a", "val_path": "a", "val_fraction": 0.3, "text_column": "a"}.get(key, 3)
    with pytest.raises(
        UserError, match=rf"data.mix has texts of its own; set data.mix.NAME.{key} instead of data.{key}"
    ):
        empty_mix(mix={"one": TEXT_SOURCE}, **{key: value})


def test_what_is_made_from_texts_is_none_and_linked_folders_are_read_once(workdir):
    for path in ("a/one.md", "b/deep/two.md", "data/prepared/x/meta.md", "runs/y/three.md", "a/.hidden/four.md"):
        Path(path).parent.mkdir(parents=True)
        Path(path).write_text(path)
    Path("a/link").symlink_to(Path("b").resolve())
    Path("b/deep/loop").symlink_to(Path("b").resolve())
    for path in ("a", "**/*.md"):
        assert sorted(sources.documents(replace(TEXT_SOURCE, path=path))) == ["a/one.md", "b/deep/two.md"]
    for name in ("again", "and again"):  # of which there are more ways through than anyone could go
        Path("a", name).symlink_to(Path("a").resolve())
    assert sorted(sources.documents(replace(TEXT_SOURCE, path="a"))) == ["a/one.md", "b/deep/two.md"]


def test_a_tokenizer_that_cannot_mark_documents_says_so(workdir):
    said = []
    for n in range(3):
        Path(f"{n}.txt").write_text("The 1th line says 1.\n" * 30)
    spec = tokenizer.to_spec(tokenizer.build(tokenizer.Corpus(["".join(map(chr, range(128)))], several=False), CHAR))
    prepare(replace(TEXT_SOURCE, path="?.txt"), replace(CHAR, name="run", run="x"), 4, said.append, spec)
    assert any("the tokenizer of run x has no <|endoftext|>" in line for line in said)


def test_a_long_row_takes_no_more_time_than_it_has_pieces(monkeypatch):
    monkeypatch.setattr(data_text, "PIECE", 1000)
    text = "a word " * 2_000_000
    begun = time.process_time()
    whole = "".join(piece for piece, _ in chunk_document([text]))
    assert (
        time.process_time() - begun < 3
    )  # a copy of all that is left, for each of 14,000 pieces, takes five times that
    assert whole == text


def test_nothing_is_both_trained_on_and_held_out(workdir):
    (workdir / "folder").mkdir()
    (workdir / "folder/text.txt").write_text("a text " * 50)
    (workdir / "loop").symlink_to("folder")
    with pytest.raises(UserError, match=r"folder/text.txt would be both trained on and held out"):
        held_out = str(workdir / "loop/text.txt")  # by another path
        prepare(replace(TEXT_SOURCE, path="folder", val_path=held_out), BYTE, 4, say=lambda line: None)
    assert sources.documents(replace(TEXT_SOURCE, path=["folder", "loop/*.txt"])) == ["a text " * 50]


def test_a_text_of_a_mix_that_has_nothing_to_train_on_is_named(workdir):
    (workdir / "tiny.txt").write_text("x")
    mix = {"one": TEXT_SOURCE, "two": replace(TEXT_SOURCE, path="tiny.txt")}
    with pytest.raises(UserError, match=r"data.mix.two has no text to train on"):
        prepare(empty_mix(mix=mix), BYTE, 4, say=lambda line: None)
    mix["two"] = replace(TEXT_SOURCE, path="no.txt")
    with pytest.raises(UserError, match=r"data.mix.two: data.path=no.txt does not exist"):
        prepare(empty_mix(mix=mix), BYTE, 4, say=lambda line: None)


def test_an_unknown_character_is_named_with_its_document(workdir):
    for n in range(5):
        (workdir / f"{n}.txt").write_text("a" * 100 + "\u2603" * (n == 3))
    spec = tokenizer.to_spec(tokenizer.build(tokenizer.Corpus(["a"], several=True), CHAR))
    with pytest.raises(UserError, match=r"document 4 of text has the character '\u2603' at position 100"):
        prepare(replace(TEXT_SOURCE, path="?.txt"), replace(CHAR, name="run", run="x"), 4, lambda line: None, spec)


def test_a_mix_has_each_text_apart_and_one_vocabulary(workdir):
    parquet(workdir / "a.parquet", [f"train {n} " for n in range(30)])
    mix = {"one": replace(TEXT_SOURCE, weight=3.0), "two": replace(TEXT_SOURCE, path="a.parquet", val_fraction=0.5)}
    config = replace(empty_mix(mix=mix), name="both")
    prepared = prepare(config, CHAR, 16, say=lambda line: None)
    assert prepared.weights == (3.0, 1.0)
    assert [part["name"] for part in prepared.meta["parts"]] == ["one", "two"]
    tokens, whole = prepared.tokens("train"), ""
    for (first, count), begins in zip(prepared.train_parts, ("The 0th line", "train 0 "), strict=True):
        text = prepared.encoding.decode(tokens[first : first + count].tolist())
        assert text.startswith(begins)
        whole += text
    assert len(tokens) == sum(count for _, count in prepared.train_parts)
    again = prepare(replace(config, mix=mix | {"one": TEXT_SOURCE}), CHAR, 16, say=lambda line: None)
    assert again.folder == prepared.folder and again.weights == (1.0, 1.0)  # weights decide no token
