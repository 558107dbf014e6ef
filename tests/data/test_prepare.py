"""Prepared data: the tokens of a plain loop, complete splits, messages, kills and damage."""

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from data_helpers import (
    UNUSUAL_TEXTS,
    any_text,
    decode_split,
    prepare_data,
    prepared_folders,
    read_ids,
    write_documents,
    write_file,
    write_table,
)
from helpers import BPE, BYTE, CHAR, ROOT, TEXT, TEXT_SOURCE
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import TrainingFailed, UserError
from common.process import cpu_count
from data import DataConfig, encode, python_stdlib, readers, sources
from data.prepare import PreparedData, prepare
from data.sources import resolve_source
from data.tokenizer import end_of_text

# The tokens of both splits

FILES = ["a/*.txt", "a/*.md.gz", "a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.zst", "a.parquet"]
documents = st.lists(any_text, max_size=8).map(
    lambda texts: ["the first text", "two", "three", "four", *texts, "the last text"]
)
files = st.sampled_from(FILES)
fractions = st.floats(0.05, 0.9)
limits = st.one_of(st.none(), st.integers(5, 9))
chunk_sizes = st.sampled_from([1, 2**20])


@contextmanager
def prepared_texts(
    path: str, texts: list[str], tokenizer=BYTE, chunk=2**20, val_texts=None, **keys
) -> Iterator[PreparedData]:
    """Context manager: write the documents, and prepare them in small chunks and pieces."""
    # BPE has the same tokens only if words are not cut
    piece = 2**20 if tokenizer is BPE else 7
    with TemporaryDirectory() as folder, chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "CHUNK_CHARS", chunk)
        patch.setattr(readers, "MAX_PIECE_CHARS", piece)
        write_documents(path, texts)
        if val_texts is not None:
            keys["val_path"] = write_documents(f"val_{path}", val_texts)
        yield prepare_data(DataConfig(path=path, **keys), tokenizer, 1)


def without_mark(path: str, texts: list[str]) -> list[str]:
    """The documents as they are read: a byte order mark at the start of a text file is no text."""
    return [text.removeprefix("\ufeff") for text in texts] if "*" in path else texts


def without_empty(texts: list[str]) -> list[str]:
    """The documents that have text."""
    return list(filter(None, texts))


def check_split(prepared: PreparedData, split: str, texts: list[str]) -> None:
    """A split has these documents, and an end-of-text token after each."""
    ids = []
    for text in texts:
        ids += prepared.tokenizer.encode(text, disallowed_special=())
        ids.append(end_of_text(prepared.tokenizer))
    assert read_ids(prepared, split) == ids
    counts = {key: prepared.meta[key][split] for key in ("tokens", "bytes", "documents")}
    size = len("".join(texts).encode())
    assert counts == {"tokens": len(ids), "bytes": size, "documents": len(texts)}


@pytest.mark.parametrize("path", FILES)
@settings(max_examples=5, deadline=None)
@example(BYTE, UNUSUAL_TEXTS, None, 0.4, 2**20)
@example(BPE, UNUSUAL_TEXTS, None, 0.4, 2**20)
@given(st.sampled_from([CHAR, BYTE]), documents, limits, fractions, chunk_sizes)
def test_tokens_of_both_splits_are_those_of_a_plain_loop(
    path, tokenizer, texts, limit, fraction, chunk
):
    keys = {"max_documents": limit, "val_fraction": fraction}
    with prepared_texts(path, texts, tokenizer, chunk, **keys) as prepared:
        texts = without_empty(without_mark(path, texts)[:limit])
        first = prepared.meta["documents"]["train"]
        check_split(prepared, "train", texts[:first])
        check_split(prepared, "val", texts[first:])
        size = (prepared.folder / "text.bin").stat().st_size
        assert 2 * sum(prepared.meta["tokens"].values()) == size


@settings(max_examples=10, deadline=None)
@given(files, documents, limits, st.integers(1, 3))
def test_val_documents_are_the_first_ones(path, texts, limit, number):
    with prepared_texts(path, texts, max_documents=limit, val_documents=number) as prepared:
        texts = without_empty(without_mark(path, texts)[:limit])
        check_split(prepared, "train", texts[number:])
        check_split(prepared, "val", texts[:number])


@settings(max_examples=10, deadline=None)
@example("a.csv", BPE, UNUSUAL_TEXTS, UNUSUAL_TEXTS, None)
@given(files, st.sampled_from([CHAR, BYTE]), documents, st.lists(any_text, max_size=3), limits)
def test_val_path_is_complete_and_encoded_separately(path, tokenizer, texts, val_texts, limit):
    val_texts = [f"{text} of another text" for text in val_texts] + ["another text"] * 9
    with prepared_texts(
        path, texts, tokenizer, val_texts=val_texts, max_documents=limit
    ) as prepared:
        check_split(prepared, "train", without_empty(without_mark(path, texts)[:limit]))
        check_split(prepared, "val", without_mark(path, val_texts))


def test_separate_validation_files_do_not_change_a_bpe_vocabulary(workdir):
    specs = []
    for text in ("the cat and the hat " * 99, "\u2603 a bell and a ball " * 99):
        path = write_file("val.txt", text)
        prepared = prepare_data(replace(TEXT_SOURCE, val_path=path), BPE)
        assert decode_split(prepared, "val") == text
        specs.append(prepared.meta["tokenizer"])
    assert specs[0] == specs[1]


@settings(max_examples=10, deadline=None)
@given(documents, fractions)
def test_held_out_documents_are_the_fewest_that_have_the_fraction(texts, fraction):
    with prepared_texts("a.jsonl", texts, val_fraction=fraction) as prepared:
        first = prepared.meta["documents"]["train"]
    sizes = [len(text.encode()) for text in without_empty(texts)]
    wanted = fraction * sum(sizes)
    assert sum(sizes[first:]) >= wanted - 1e-6 or first == 1
    assert sum(sizes[first + 1 :]) < max(1, wanted) + 1e-6


def test_few_chunks_are_in_memory():
    chunks = itertools.count()
    assert next(encode.parallel_map(str, chunks)) == "0"
    assert next(chunks) <= 2 * cpu_count() + 1


# A single document


def test_single_text_file_is_cut_at_the_fraction(workdir):
    prepared = prepare_data(DataConfig(path="text.txt", val_fraction=0.2), BPE)
    ids = prepared.tokenizer.encode(Path("text.txt").read_text(encoding="utf-8"))
    cut = int(len(ids) * 0.8)
    assert (read_ids(prepared, "train"), read_ids(prepared, "val")) == (ids[:cut], ids[cut:])


def test_single_row_is_cut_and_ends_with_an_end_of_text_token(workdir):
    text = Path("text.txt").read_text(encoding="utf-8")
    prepared = prepare_data(DataConfig(path=write_table("one.parquet", text=[text])))
    ids = [*text.encode(), end_of_text(prepared.tokenizer)]
    assert read_ids(prepared, "train") + read_ids(prepared, "val") == ids


def test_tokens_have_32_bits_if_the_vocabulary_is_large(workdir):
    text = "".join(map(chr, range(0x10000, 0x10000 + 2**16 + 1)))
    prepared = prepare_data(DataConfig(path=write_file("wide.txt", text)), CHAR)
    assert prepared.meta["dtype"] == "uint32"
    assert decode_split(prepared, "train") + decode_split(prepared, "val") == text


# Empty documents


@pytest.mark.parametrize("path", ["a.csv", "a.jsonl", "a.parquet", "a/*.txt"])
def test_empty_documents_are_skipped(workdir, path):
    texts = ["", "", "one " * 9, "", "two " * 9, "three " * 9, ""]
    prepared = prepare_data(DataConfig(path=write_documents(path, texts), val_documents=1), BPE)
    check_split(prepared, "val", [texts[2]])
    check_split(prepared, "train", [texts[4], texts[5]])


def test_single_document_among_empty_files_is_cut(workdir):
    path = write_documents("a/*.txt", ["", "", "a" * 99])
    assert prepare_data(DataConfig(path=path)).meta["bytes"] == {"train": 89, "val": 10}


def test_row_with_a_prompt_and_an_empty_completion_is_kept(workdir):
    path = write_table("a.csv", n=["question" * 9, "", ""], text=["", "answer" * 9, ""])
    prepared = prepare_data(DataConfig(path=path, prompt_column="n"))
    assert prepared.meta["documents"] == {"train": 1, "val": 1}


# The default data


def test_another_tokenizer_has_another_folder(workdir):
    tokenizers = [CHAR, BYTE, BPE, replace(BPE, vocab_size=310)]
    assert len({prepare_data(TEXT_SOURCE, tokenizer).folder for tokenizer in tokenizers}) == 4


def test_empty_files_of_the_standard_library_stay_documents(workdir, monkeypatch):
    """So that runs of earlier versions have the same tokens."""
    files = [write_file(f"{name}.py", "" if name == "b" else name * 99) for name in "abc"]
    monkeypatch.setitem(sources.SOURCES, "python_stdlib", lambda config: files)
    assert prepare_data(python_stdlib()).meta["documents"] == {"train": 2, "val": 1}


def test_standard_library_is_a_fair_sample_of_complete_files(workdir):
    source = resolve_source(python_stdlib())
    assert len(source.files) > 200
    assert not [name for name in source.files if "/test/" in name or "site-packages" in name]
    assert source.files != sorted(source.files)  # the last ones are held out
    prepared = prepare_data(python_stdlib())
    held_out = source.files[-prepared.meta["documents"]["val"] :]
    content = b"".join(Path(name).read_bytes() for name in held_out)
    assert decode_split(prepared, "val").encode() == content


# The token from which samples start


def book(line_end: str) -> str:
    """Sentences, one per line, so that BPE joins their last character and the line end."""
    return "".join(f"Sentence {n} of {n * n % 97} is short.{line_end}" for n in range(900))


@pytest.mark.parametrize(
    ("tokenizer", "text", "start"),
    [
        (BPE, book("\n"), ".\n"),
        (BPE, book("\r"), ".\r"),
        (BPE, book(" "), "Sentence"),  # no line ends: the first token of the text
        (CHAR, book("\r\n"), "\n"),
        (BYTE, book(" "), "S"),
    ],
)
def test_samples_start_from_a_token_of_the_text(workdir, tokenizer, text, start):
    prepared = prepare_data(DataConfig(path=write_file("book.txt", text)), tokenizer)
    token = prepared.tokenizer.start_token
    assert prepared.tokenizer.decode([token]) == start
    assert token in read_ids(prepared, "train")


# Text that is encoded with the tokenizer of another run


def prepare_with(spec: dict, path: str) -> PreparedData:
    return prepare(DataConfig(path=path), replace(BYTE, name="run", run="one"), 16, spec)


@pytest.fixture
def spec(workdir) -> dict:
    """The tokenizer of one document, which has no end-of-text token."""
    return prepare_data(TEXT_SOURCE, BYTE).meta["tokenizer"]


def test_start_of_samples_is_chosen_for_the_text_and_not_for_that_of_the_vocabulary(spec):
    write_file("two.txt", "Is it a number?\n" * 900)
    prepared = prepare_with(spec | {"start": 7}, "two.txt")
    assert prepare_with(spec | {"start": 8}, "two.txt").folder == prepared.folder
    assert prepared.tokenizer.decode([prepared.tokenizer.start_token]) == "\n"


def test_documents_that_get_no_end_of_text_token_are_reported(spec, capsys):
    path = write_documents("a/*.txt", ["ab" * 30] * 3)
    prepare_data(DataConfig(path=path))
    assert "<|endoftext|>" not in capsys.readouterr().out
    prepare_with(spec, path)
    assert "no <|endoftext|> token" in capsys.readouterr().out


# Text that is too short


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"path": "short.csv"}, "9 training .*model.block_size"),
        ({"path": "rows.csv", "val_documents": 9}, r"few documents \(9\) .*data.val_documents"),
        ({"path": "short.csv", "prompt_column": "n"}, r"few documents \(1\) .*data.val_path"),
        (
            {"path": "pairs.csv", "prompt_column": "n", "val_documents": 2},
            "validation tokens of 0 bytes of text .* hold out another part",
        ),
    ],
    ids=["no window", "all held out", "one row with a prompt", "no completion held out"],
)
def test_text_that_is_too_short_is_refused(workdir, keys, message):
    write_table("short.csv", n=["prompt"], text=["too short"])
    write_table("rows.csv", text=["a document"] * 9)
    write_table("pairs.csv", n=["prompt"] * 9, text=["", "", *["a document"] * 7])
    with pytest.raises(UserError, match=message):
        prepare_data(DataConfig(**keys))


def test_one_training_window_and_one_validation_target_are_enough(workdir):
    config = DataConfig(path=write_file("short.txt", "a" * 19), val_fraction=0.1)
    assert prepare_data(config, block_size=16).meta["tokens"] == {"train": 17, "val": 2}


@pytest.mark.parametrize("fraction", [0.15, 0.05], ids=["16 and 3", "18 and 1"])
def test_one_token_fewer_is_refused(workdir, fraction):
    config = DataConfig(path=write_file("short.txt", "a" * 19), val_fraction=fraction)
    with pytest.raises(UserError, match=r"too few.*model.block_size"):
        prepare_data(config, block_size=16)


# Kills and changes

# Prepares a text, and dies in the second chunk.
PREPARE = f"""
import itertools, os
from data import DataConfig, TokenizerConfig, encode, readers
from data.prepare import prepare

numbers = itertools.count()
encode_chunk = encode.TokenFile.encode_chunk
encode.CHUNK_CHARS = readers.MAX_PIECE_CHARS = 10_000

def encode_or_die(*arguments):
    if next(numbers) == 1:
        os._exit(9)
    return encode_chunk(*arguments)

encode.TokenFile.encode_chunk = encode_or_die
prepare(DataConfig(path="long.txt"), {BPE}, 16)
"""


def test_preparation_after_a_kill_has_the_files_of_an_undisturbed_one(workdir):
    write_file("long.txt", TEXT)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", PREPARE], env=environment)
    assert killed.returncode == 9
    assert not list(workdir.glob("data/prepared/*/meta.json"))
    files = []
    for _ in range(2):
        folder = prepare_data(DataConfig(path="long.txt"), BPE).folder
        assert prepared_folders() == [folder]
        files.append({path.name: path.read_bytes() for path in folder.iterdir()})
        shutil.rmtree("data")
    assert files[0] == files[1]
    assert sorted(files[0]) == ["meta.json", "text.bin"]


# Damage


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("text.bin", None),
        ("text.bin", lambda content: content[:7]),
        ("meta.json", None),
        ("meta.json", lambda content: content[:7]),
        ("meta.json", lambda content: b"{}"),
        ("meta.json", lambda content: content.replace(b'"AA==",', b"")),  # a token is missing
    ],
)
def test_damaged_folder_is_reported(workdir, file, change):
    folder = prepare_data(TEXT_SOURCE).folder
    content = (folder / file).read_bytes()
    (folder / file).unlink()
    if change is not None:
        (folder / file).write_bytes(change(content))
    with pytest.raises(UserError, match=f"remove {folder}"):
        prepare_data(TEXT_SOURCE)


def test_token_outside_of_the_vocabulary_is_noticed_when_it_is_read(workdir):
    prepared = prepare_data(TEXT_SOURCE, CHAR)
    content = np.fromfile(prepared.folder / "text.bin", np.uint16)
    content[20] = prepared.meta["vocab_size"]
    content.tofile(prepared.folder / "text.bin")
    assert len(prepared.train[:20]) == 20
    with pytest.raises(TrainingFailed, match=r"text.bin is damaged; remove its folder"):
        prepared.train[10:30]
