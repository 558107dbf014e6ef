"""Prepared data: the tokens of a plain loop, complete splits, messages, kills and damage."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
from data_helpers import (
    UNUSUAL_TEXTS,
    any_text,
    decode_split,
    mix,
    prepare_data,
    prepared_folders,
    read_ids,
    write_documents,
    write_file,
    write_table,
)
from helpers import BPE, BYTE, CHAR, ROOT, TEXT_SOURCE, file_size_limit, run_command
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import TrainingFailed, UserError
from data import DataConfig, encode, python_stdlib, readers
from data.prepare import PreparedData, prepare
from data.sources import resolve_sources
from data.tokenizer import end_of_text

# The tokens of both splits

FILES = ["a/*.txt", "a/*.md.gz", "a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.zst", "a.parquet"]
documents = st.lists(any_text, max_size=8).map(
    lambda texts: ["the first text", *texts, "two", "three", "the last text"]
)
files = st.sampled_from(FILES)
tokenizers = st.sampled_from([CHAR, BYTE, BPE])
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
@settings(max_examples=20, deadline=None)
@example(BYTE, UNUSUAL_TEXTS, None, 0.4, 2**20)
@example(BPE, UNUSUAL_TEXTS, None, 0.4, 2**20)
@given(tokenizers, documents, limits, fractions, chunk_sizes)
def test_tokens_of_both_splits_are_those_of_a_plain_loop(
    path, tokenizer, texts, limit, fraction, chunk
):
    keys = {"max_documents": limit, "val_fraction": fraction}
    with prepared_texts(path, texts, tokenizer, chunk, **keys) as prepared:
        texts = without_mark(path, texts)[:limit]
        first = prepared.meta["documents"]["train"]
        check_split(prepared, "train", texts[:first])
        check_split(prepared, "val", texts[first:])


@settings(max_examples=20, deadline=None)
@given(files, documents, limits, st.integers(1, 3))
def test_val_documents_are_the_first_ones(path, texts, limit, number):
    with prepared_texts(path, texts, max_documents=limit, val_documents=number) as prepared:
        texts = without_mark(path, texts)[:limit]
        check_split(prepared, "train", texts[number:])
        check_split(prepared, "val", texts[:number])


@settings(max_examples=20, deadline=None)
@example("a.csv", BPE, UNUSUAL_TEXTS, UNUSUAL_TEXTS, None)
@given(files, st.sampled_from([CHAR, BYTE]), documents, st.lists(any_text, max_size=3), limits)
def test_val_path_is_complete_and_encoded_separately(path, tokenizer, texts, val_texts, limit):
    val_texts = [f"{text} of another text" for text in val_texts] + ["another text"] * 9
    with prepared_texts(
        path, texts, tokenizer, val_texts=val_texts, max_documents=limit
    ) as prepared:
        check_split(prepared, "train", without_mark(path, texts)[:limit])
        check_split(prepared, "val", without_mark(path, val_texts))


@settings(max_examples=30, deadline=None)
@given(documents, fractions)
def test_held_out_documents_are_the_fewest_that_have_the_fraction(texts, fraction):
    with prepared_texts("a.jsonl", texts, val_fraction=fraction) as prepared:
        first = prepared.meta["documents"]["train"]
    sizes = [len(text.encode()) for text in texts]
    wanted = fraction * sum(sizes)
    assert sum(sizes[first:]) >= wanted - 1e-6 or first == 1
    assert sum(sizes[first + 1 :]) < max(1, wanted) + 1e-6


@settings(max_examples=20, deadline=None)
@given(documents, fractions, st.one_of(st.none(), st.integers(1, 3)))
def test_both_splits_together_are_the_complete_file(texts, fraction, number):
    keys = {"val_fraction": fraction, "val_documents": number}
    with prepared_texts("a.jsonl", texts, **keys) as prepared:
        size = (prepared.folder / "text.bin").stat().st_size
        parts = prepared.meta["train"] + prepared.meta["val"]
    first, second = sorted((part["start"], part["start"] + part["tokens"]) for part in parts)
    assert (first[0], first[1], second[1] * 2) == (0, second[0], size)


# A single document

WIDE = "".join(map(chr, range(0x10000, 0x10000 + 70_000)))  # more than 65,536 characters


@pytest.mark.parametrize("tokenizer", [CHAR, BPE], ids=["char", "bpe"])
def test_single_text_file_is_cut_at_the_fraction(workdir, tokenizer):
    prepared = prepare_data(DataConfig(path="text.txt", val_fraction=0.2), tokenizer)
    ids = prepared.tokenizer.encode(Path("text.txt").read_text(encoding="utf-8"))
    cut = int(len(ids) * 0.8)
    assert (read_ids(prepared, "train"), read_ids(prepared, "val")) == (ids[:cut], ids[cut:])


def test_single_row_is_cut_and_ends_with_an_end_of_text_token(workdir):
    text = Path("text.txt").read_text(encoding="utf-8")
    prepared = prepare_data(DataConfig(path=write_table("one.parquet", text=[text])))
    ids = [*text.encode(), end_of_text(prepared.tokenizer)]
    assert read_ids(prepared, "train") + read_ids(prepared, "val") == ids


@pytest.mark.parametrize(
    ("text", "dtype"), [(WIDE[: 2**16], "uint16"), (WIDE[: 2**16 + 1], "uint32")]
)
def test_tokens_have_16_bits_unless_the_vocabulary_is_larger(workdir, text, dtype):
    prepared = prepare_data(DataConfig(path=write_file("wide.txt", text)), CHAR)
    assert prepared.meta["dtype"] == dtype
    assert decode_split(prepared, "train") + decode_split(prepared, "val") == text


# Mixes and the default data


@pytest.fixture
def rows(workdir) -> DataConfig:
    """A table of 30 documents, of which the first two are held out."""
    texts = [f"train {number} " for number in range(30)]
    return DataConfig(path=write_table("a.csv", text=texts), val_documents=2)


def test_sources_of_a_mix_are_separate(rows):
    prepared = prepare_data(mix(one=TEXT_SOURCE, two=rows), CHAR)
    one, two = (prepared.tokenizer.decode(tokens[:].tolist()) for tokens in prepared.train)
    text = Path("text.txt").read_text(encoding="utf-8")
    assert 0.8 * len(text) < len(one) and text.startswith(one)
    assert two.split("<|endoftext|>")[:-1] == [f"train {number} " for number in range(2, 30)]


def test_validation_of_a_mix_is_that_of_all_sources(rows):
    prepared = prepare_data(mix(one=TEXT_SOURCE, two=rows), CHAR)
    end_of_both = "no more; après tout, it's a line.\ntrain 0 train 1 "
    assert decode_split(prepared, "val").endswith(end_of_both)


def test_weights_of_a_mix_do_not_change_the_prepared_folder(rows):
    first = prepare_data(mix(one=TEXT_SOURCE, two=rows))
    second = prepare_data(mix(one=replace(TEXT_SOURCE, weight=3.0), two=rows))
    assert first.folder == second.folder
    assert (first.weights, second.weights) == ((1.0, 1.0), (3.0, 1.0))


def test_another_tokenizer_has_another_folder(workdir):
    assert prepare_data(TEXT_SOURCE, CHAR).folder != prepare_data(TEXT_SOURCE, BYTE).folder


def test_another_size_of_the_vocabulary_has_another_folder(workdir):
    larger = replace(BPE, vocab_size=310)
    assert prepare_data(TEXT_SOURCE, BPE).folder != prepare_data(TEXT_SOURCE, larger).folder


@pytest.fixture
def stdlib_files() -> list[str]:
    return resolve_sources(python_stdlib())[0].files


def test_standard_library_has_no_tests_and_no_installed_packages(stdlib_files):
    assert len(stdlib_files) > 200
    assert not [name for name in stdlib_files if "/test/" in name or "site-packages" in name]


def test_standard_library_is_not_in_alphabetical_order(stdlib_files):
    """So that the last files, which are held out, are a sample of all."""
    assert stdlib_files != sorted(stdlib_files)


def test_standard_library_files_are_complete_documents(workdir, stdlib_files):
    prepared = prepare_data(python_stdlib())
    held_out = stdlib_files[-prepared.meta["documents"]["val"] :]
    content = b"".join(Path(name).read_bytes() for name in held_out)
    assert decode_split(prepared, "val").encode() == content


# The token from which samples start


def book(line_end: str) -> str:
    """Sentences, one per line, so that BPE joins their last character and the line end."""
    return "".join(f"Sentence {n} of {n * n % 97} is short.{line_end}" for n in range(3000))


@pytest.mark.parametrize(
    ("tokenizer", "text", "start"),
    [
        (BPE, book("\n"), ".\n"),
        (BPE, book("\r\n"), ".\r\n"),
        (BPE, book("\r"), ".\r"),
        (BPE, book(" "), "Sentence"),  # no line ends: the first token of the text
        (CHAR, book("\n"), "\n"),
        (CHAR, book("\r\n"), "\n"),
        (BYTE, book(" "), "S"),
    ],
)
def test_samples_start_from_a_token_of_the_text(workdir, tokenizer, text, start):
    prepared = prepare_data(DataConfig(path=write_file("book.txt", text)), tokenizer)
    token = prepared.tokenizer.start_token
    assert prepared.tokenizer.decode([token]) == start
    assert token in read_ids(prepared, "train")


def test_samples_start_from_the_end_of_text_token_if_there_is_one(workdir):
    path = write_table("a.csv", text=["a document\n"] * 99)
    tokenizer = prepare_data(DataConfig(path=path)).tokenizer
    assert tokenizer.start_token == end_of_text(tokenizer)


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
    assert prepared.tokenizer.decode([prepared.tokenizer.start_token]) == "\n"


def test_start_of_samples_of_the_other_run_does_not_change_the_folder(spec):
    folders = {prepare_with(spec | {"start": start}, "text.txt").folder for start in (7, 8)}
    assert len(folders) == 1


def test_documents_that_get_no_end_of_text_token_are_reported(spec, capsys):
    prepare_with(spec, write_documents("a/*.txt", ["ab" * 30] * 3))
    assert "the vocabulary has no <|endoftext|> token" in capsys.readouterr().out


def test_documents_with_end_of_text_tokens_are_not_reported(workdir, capsys):
    prepare_data(DataConfig(path=write_documents("a/*.txt", ["ab" * 30] * 3)))
    assert "vocabulary" not in capsys.readouterr().out


# Messages about the splits

COPIES = "also in the training text: "


def printed(capsys, **keys) -> str:
    """What the preparation of a source prints."""
    capsys.readouterr()
    prepare_data(DataConfig(**keys))
    return capsys.readouterr().out


@pytest.fixture
def folder(workdir) -> str:
    """20 documents, of which the last two are held out."""
    for number in range(20):
        write_file(f"folder/{number}.txt", f"document {number} " * 9)
    return "folder"


def test_different_documents_are_not_reported_as_copies(folder, capsys):
    assert COPIES not in printed(capsys, path=folder)


def test_copies_of_training_documents_in_the_validation_split_are_reported(folder, capsys):
    write_file("folder/19.txt", "document 3 " * 9)
    assert f"{COPIES}1 of 2;" in printed(capsys, path=folder)


def test_copies_of_rows_are_reported(workdir, capsys):
    path = write_table("rows.csv", text=["a row", "another row"] * 50)
    assert f"{COPIES}10 of 10;" in printed(capsys, path=path)


def test_copies_in_several_pieces_are_reported(workdir, capsys, monkeypatch):
    monkeypatch.setattr(readers, "MAX_PIECE_CHARS", 7)
    path = write_table("rows.csv", text=["a long row", "another long row"] * 50)
    assert f"{COPIES}10 of 10;" in printed(capsys, path=path)


def test_rows_with_different_prompts_are_no_copies(workdir, capsys):
    prompts = [f"prompt {number}" for number in range(30)]
    path = write_table("rows.jsonl", prompt=prompts, text=["yes"] * 30)
    assert COPIES not in printed(capsys, path=path, prompt_column="prompt")


def test_empty_documents_are_no_copies(folder, capsys):
    write_file("folder/0.txt", "")
    write_file("folder/18.txt", "")
    assert COPIES not in printed(capsys, path=folder)


def test_rows_with_an_empty_prompt_and_text_are_no_copies(workdir, capsys):
    texts = [f"answer {n}" for n in range(30)]
    texts[0] = texts[29] = ""
    path = write_table("rows.jsonl", prompt=texts, text=texts)
    assert COPIES not in printed(capsys, path=path, prompt_column="prompt")


def write_sizes(sizes: list[int]) -> str:
    for number, size in enumerate(sizes):
        write_file(f"folder/{number}.txt", f"{number}" * size * 100)
    return "folder"


@pytest.mark.parametrize(
    ("sizes", "share"), [([90, 1], "1.1%"), ([1, 90], "98.9%"), ([5, 5], "50.0%")]
)
def test_share_that_is_far_from_the_fraction_is_reported(workdir, capsys, sizes, share):
    out = printed(capsys, path=write_sizes(sizes), val_fraction=0.1)
    assert f"{share} of text is held out instead of data.val_fraction=0.1" in out


@pytest.mark.parametrize("sizes", [[9, 1], [85, 15]])
def test_share_that_is_near_the_fraction_is_not_reported(workdir, capsys, sizes):
    assert "is held out" not in printed(capsys, path=write_sizes(sizes), val_fraction=0.1)


@pytest.mark.parametrize(("separator", "count"), [(r"\n", "400 documents"), ("@@", "1 document")])
def test_number_of_separated_documents_is_shown(workdir, capsys, separator, count):
    out = printed(capsys, path="text.txt", separator=separator)
    assert f"text has {count}, divided by" in out


# Text that is too short


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"path": "short.csv"}, "9 training .*model.block_size"),
        ({"path": "rows.csv", "val_documents": 9}, r"few documents \(9\) .*data.val_documents"),
        ({"path": "short.csv", "prompt_column": "n"}, r"few documents \(1\) .*data.val_path"),
    ],
    ids=["no window", "all held out", "one row with a prompt"],
)
def test_text_that_is_too_short_is_refused(workdir, keys, message):
    write_table("short.csv", n=["prompt"], text=["too short"])
    write_table("rows.csv", text=["a document"] * 9)
    with pytest.raises(UserError, match=message):
        prepare_data(DataConfig(**keys))


def test_one_training_window_and_one_validation_target_are_enough(workdir):
    path = write_file("short.txt", "a" * 19)
    prepared = prepare_data(DataConfig(path=path, val_fraction=0.1), block_size=16)
    assert prepared.meta["tokens"] == {"train": 17, "val": 2}


@pytest.mark.parametrize(
    ("fraction", "tokens"),
    [(0.15, "16 training tokens and 3 validation"), (0.05, "18 training tokens and 1 validation")],
)
def test_one_token_fewer_is_refused(workdir, fraction, tokens):
    path = write_file("short.txt", "a" * 19)
    with pytest.raises(UserError, match=f"{tokens} .*model.block_size"):
        prepare_data(DataConfig(path=path, val_fraction=fraction), block_size=16)


def test_source_of_a_mix_without_training_documents_is_refused(rows):
    write_table("two.csv", text=["a document"] * 2)
    with pytest.raises(UserError, match="two has too few documents"):
        prepare_data(mix(one=rows, two=replace(rows, path="two.csv")))


# Kills, full disks and changes

# Prepares a file, and prints the memory that this needed. The process dies in the chunk with a
# number, or in none.
PREPARE = f"""
import itertools, os, re, sys
import pyarrow.json, rustbpe
from data import DataConfig, TokenizerConfig, encode
from data.prepare import prepare

numbers = itertools.count()
encode_chunk = encode.TokenFile.encode_chunk

def encode_or_die(*arguments):
    if next(numbers) == int(sys.argv[2]):
        os._exit(9)
    return encode_chunk(*arguments)

def read_peak():  # not ru_maxrss, which a process inherits from the one that starts it
    if not os.path.exists("/proc/self/status"):
        return 0
    return 1024 * int(re.search("VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])

encode.TokenFile.encode_chunk = encode_or_die
before = read_peak()
prepare(DataConfig(path=sys.argv[1]), {BPE}, 16)
print("finished", read_peak() - before)
"""


def run_preparations(path: str, *dies_in_chunk: int) -> list[str]:
    """Run preparations at the same time, in other processes. Returns what they print."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    processes = []
    for chunk in dies_in_chunk:
        command = [sys.executable, "-c", PREPARE, path, str(chunk)]
        processes.append(
            subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE)
        )
    return [process.communicate(timeout=300)[0] for process in processes]


@pytest.fixture(scope="module")
def kills(tmp_path_factory) -> SimpleNamespace:
    """A preparation, two that are killed, and then two at the same time. All of the same text.

    files: content of the prepared files, by name, of the first and of the last preparation.
    complete: meta.json files after the kills.
    outputs: what the last two print.
    """

    def read_files() -> dict[str, bytes]:
        (folder,) = prepared_folders()
        return {path.name: path.read_bytes() for path in folder.iterdir()}

    complete = []
    with chdir(tmp_path_factory.mktemp("kills")):
        write_documents("a/*.txt", [f"document {n} says {n * n}; " * 10**5 for n in range(3)])
        run_preparations("a", -1)
        first = read_files()
        Path("data").rename("first")
        for chunk in (0, 3):
            run_preparations("a", chunk)
            complete += Path("data/prepared").glob("*/meta.json")
        outputs = run_preparations("a", -1, -1)
        return SimpleNamespace(files=(first, read_files()), complete=complete, outputs=outputs)


def test_killed_preparation_leaves_no_complete_folder(kills):
    assert kills.complete == []


def test_preparation_after_a_kill_has_identical_files(kills):
    first, last = kills.files
    assert first == last
    assert sorted(last) == ["meta.json", "text.bin"]


def test_only_one_of_two_processes_prepares_and_both_finish(kills):
    out = "".join(kills.outputs)
    assert (out.count("preparing text"), out.count("finished")) == (1, 2)


def test_full_disk_is_reported_and_leaves_no_folder(workdir, capsys):
    """A limit on the file size makes the system refuse to write, as on a full disk."""
    with file_size_limit(10_000):
        code = run_command("prepare", "data=text", "data.path=text.txt", "tokenizer=byte")
    message = capsys.readouterr().err
    assert code == 1
    assert "text.bin: File too large; " in message and message.count("\n") == 1
    assert not prepared_folders()


def test_interrupted_preparation_leaves_no_folder(workdir, monkeypatch):
    def interrupt(*arguments):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(encode.TokenFile, "encode_chunk", interrupt)
    with pytest.raises(KeyboardInterrupt):
        prepare_data(TEXT_SOURCE)
    assert not prepared_folders()


def test_text_that_changes_while_it_is_read_is_refused(workdir, monkeypatch):
    def change_text(tokenizer):
        write_file("text.txt", "changed " * 99)

    monkeypatch.setattr("data.encode.to_spec", change_text)
    with pytest.raises(UserError, match="changed while it was read"):
        prepare_data(TEXT_SOURCE)


# Damage


def remove(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:7])


def empty(path: Path) -> None:
    path.write_bytes(b"{}")


def lose_a_token(path: Path) -> None:
    """Remove the first token of the vocabulary. The file is still valid JSON."""
    path.write_bytes(path.read_bytes().replace(b'"AA==",', b""))


@pytest.mark.parametrize(
    ("file", "damage"),
    [
        ("text.bin", remove),
        ("text.bin", cut),
        ("meta.json", remove),
        ("meta.json", cut),
        ("meta.json", empty),
        ("meta.json", lose_a_token),
    ],
)
def test_damaged_folder_is_reported(workdir, file, damage):
    folder = prepare_data(TEXT_SOURCE).folder
    damage(folder / file)
    with pytest.raises(UserError, match=f"remove {folder}"):
        prepare_data(TEXT_SOURCE)


def test_token_outside_of_the_vocabulary_is_noticed_when_it_is_read(workdir):
    prepared = prepare_data(TEXT_SOURCE, CHAR)
    content = np.fromfile(prepared.folder / "text.bin", np.uint16)
    content[20] = prepared.meta["vocab_size"]
    content.tofile(prepared.folder / "text.bin")
    assert len(prepared.train[0][:20]) == 20
    with pytest.raises(TrainingFailed, match=r"text.bin is damaged; remove its folder"):
        prepared.train[0][10:30]


# Memory


def write_megabytes(name: str, megabytes: int, row_bytes: int) -> None:
    """Write a text, or a table with rows of this size."""
    num_words = row_bytes // 20
    words = "".join(f"the word {n} of a long text, and {n * n % 1009}; " for n in range(num_words))
    row = words[:row_bytes]
    if name.endswith(".jsonl"):
        row = f'{{"text": "{row}"}}\n'
    with open(name, "w", encoding="utf-8") as out:
        for _ in range(megabytes * 10**6 // len(row)):
            out.write(row)


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="NOT RUN: only Linux reports a process's memory"
)
@pytest.mark.parametrize(
    ("name", "row_bytes"), [("big.txt", 10**6), ("short.jsonl", 300), ("long.jsonl", 8 * 10**6)]
)
def test_memory_is_below_300_megabytes_and_does_not_grow_with_the_text(workdir, name, row_bytes):
    """Above the memory of the imports."""
    memory = {}
    for megabytes in (50, 100, 200):
        write_megabytes(name, megabytes, row_bytes)
        memory[megabytes] = int(run_preparations(name, -1)[0].split()[-1]) // 10**6
    print(name, memory)
    assert 0 < memory[100] < 300
    assert memory[200] < memory[50] + 50
