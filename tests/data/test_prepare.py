"""Prepared data: the tokens of a plain loop, complete splits, and preparations that are killed or disturbed."""

import copy
import os
import pickle
import signal
import subprocess
import sys
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import data_helpers as helpers
import numpy as np
import pytest
from data_helpers import decode_split, mix, prepare_data, prepared_folders, read_ids
from helpers import BPE, BYTE, CHAR, ROOT, TEXT_SOURCE, file_size_limit, run_command
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import TrainingFailed, UserError
from data import DataConfig, encode, python_stdlib, readers
from data.prepare import prepare
from data.sources import resolve_sources
from data.tokenizer import end_of_text

FILES = ["a/*.txt", "a/*.md.gz", "a.jsonl", "a.jsonl.gz", "a.csv", "a.csv.zst", "a.parquet"]
EXAMPLE = {"texts": helpers.UNUSUAL_TEXTS, "limit": None, "fraction": 0.4, "chunk": 2**20}


@pytest.mark.parametrize("path", FILES)
@settings(max_examples=20, deadline=None)
@example(tokenizer=BYTE, held_out=None, **EXAMPLE)
@example(tokenizer=BPE, held_out=helpers.UNUSUAL_TEXTS, **EXAMPLE)
@given(
    tokenizer=st.sampled_from([CHAR, BYTE, BPE]),
    texts=st.lists(helpers.any_text, max_size=8),
    held_out=st.one_of(
        st.none(), st.integers(1, 3), st.lists(helpers.any_text, max_size=3)
    ),  # number, or documents
    limit=st.one_of(st.none(), st.integers(5, 9)),
    fraction=st.floats(0.05, 0.9),
    chunk=st.sampled_from([1, 2**20]),
)
def test_tokens_of_both_splits_are_those_of_a_plain_loop(
    path, tokenizer, texts, held_out, limit, fraction, chunk
):
    texts = ["the first text", *texts, "two", "three", "the last text"]
    config = DataConfig(path=path, max_documents=limit, val_fraction=fraction)
    with TemporaryDirectory() as folder, chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode, "CHUNK_CHARS", chunk)
        patch.setattr(
            readers, "MAX_PIECE_CHARS", 2**20 if tokenizer is BPE else 7
        )  # long words are cut
        helpers.write_documents(path, texts)
        if "*" in path:  # a byte order mark at the start of a text file is no text
            texts = [text.removeprefix("\ufeff") for text in texts]
        if isinstance(held_out, list):
            held_out = [f"{text} of another text" for text in held_out] + ["another text"] * 9
            config = replace(config, val_path=helpers.write_documents(f"val_{path}", held_out))
            train, val = (
                texts[:limit],
                [text.removeprefix("\ufeff" * ("*" in path)) for text in held_out],
            )
        elif held_out is not None:
            config = replace(config, val_documents=held_out)
            train, val = texts[held_out:limit], texts[:held_out]
        prepared = prepare_data(config, tokenizer, 1)
        meta, (file,) = prepared.meta, prepared.folder.glob("*.bin")
        if held_out is None:
            train, val = (
                texts[: meta["documents"]["train"]],
                texts[meta["documents"]["train"] : limit],
            )
            wanted = fraction * len("".join(train + val).encode())
            assert len("".join(val).encode()) >= wanted - 1e-6 or len(train) == 1
            assert len("".join(val[1:]).encode()) < max(1, wanted) + 1e-6  # not more than necessary
        for split, documents in (("train", train), ("val", val)):
            ids = [prepared.tokenizer.encode(text, disallowed_special=()) for text in documents]
            assert read_ids(prepared, split) == [
                i for part in ids for i in (*part, end_of_text(prepared.tokenizer))
            ]
            counts = [
                sum(map(len, ids)) + len(ids),
                len("".join(documents).encode()),
                len(documents),
            ]
            assert counts == [meta[key][split] for key in ("tokens", "bytes", "documents")]
        first, last = sorted(
            (part["start"], part["start"] + part["tokens"]) for part in meta["train"] + meta["val"]
        )
        assert (first[0], first[1], last[1] * 2) == (0, last[0], file.stat().st_size)


@pytest.mark.parametrize(
    ("tokenizer", "path"), [(CHAR, "wide.txt"), (BPE, "text.txt"), (BPE, "one.parquet")]
)
def test_single_document_is_cut_at_the_fraction(workdir, tokenizer, path):
    text = (workdir / "text.txt").read_text(encoding="utf-8")
    helpers.write_table("one.parquet", text=[text])
    if path == "wide.txt":  # more than 65,536 tokens
        helpers.write_file(path, text := "".join(map(chr, range(0x10000, 0x10000 + 70_000))) * 2)
    prepared = prepare_data(DataConfig(path=path, val_fraction=0.2), tokenizer)
    assert prepared.meta["dtype"] == ("uint32" if path == "wide.txt" else "uint16")
    ids = prepared.tokenizer.encode(text) + [end_of_text(prepared.tokenizer)] * (
        path == "one.parquet"
    )
    cut = int(len(ids) * 0.8)
    assert (read_ids(prepared, "train"), read_ids(prepared, "val")) == (ids[:cut], ids[cut:])


def test_mix_keeps_sources_separate_with_one_vocabulary(workdir):
    rows = DataConfig(
        path=helpers.write_table("a.csv", text=[f"train {n} " for n in range(30)]), val_documents=2
    )
    prepared = prepare_data(mix(one=replace(TEXT_SOURCE, weight=3.0), two=rows), CHAR)
    texts = [prepared.tokenizer.decode(tokens[:].tolist()) for tokens in prepared.train]
    assert texts[0] == (workdir / "text.txt").read_text(encoding="utf-8")[: len(texts[0])]
    assert texts[1].split("<|endoftext|>")[:-1] == [f"train {n} " for n in range(2, 30)]
    assert decode_split(prepared, "val").endswith(
        "no more; après tout, it's a line.\ntrain 0 train 1 "
    )
    again = prepare_data(mix(one=TEXT_SOURCE, two=rows), CHAR)
    assert (again.folder, again.weights, prepared.weights) == (
        prepared.folder,
        (1.0, 1.0),
        (3.0, 1.0),
    )
    assert prepare_data(mix(one=TEXT_SOURCE, two=rows), BYTE).folder != prepared.folder


def test_standard_library_files_are_complete_documents(workdir):
    files = resolve_sources(python_stdlib())[0].files
    assert len(files) > 200 and not any(
        "/test/" in file or "site-packages" in file for file in files
    )
    assert files != sorted(files), "the last ones, which are held out, are a sample of all"
    prepared = prepare_data(python_stdlib())
    held_out = files[-prepared.meta["documents"]["val"] :]
    assert decode_split(prepared, "val").encode() == b"".join(
        Path(file).read_bytes() for file in held_out
    )


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
    (workdir / "book.txt").write_bytes(text.encode())
    prepared = prepare_data(DataConfig(path="book.txt"), tokenizer)
    token = prepared.tokenizer.start_token
    assert prepared.tokenizer.decode([token]) == start
    assert token in read_ids(prepared, "train")


@pytest.mark.parametrize(
    "duplicate", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))]
)
def test_copied_tokenizer_has_the_same_start(workdir, duplicate):
    (workdir / "book.txt").write_bytes(book("\n").encode())
    tokenizer = prepare_data(DataConfig(path="book.txt"), BPE).tokenizer
    again = duplicate(tokenizer)
    assert again.decode([again.start_token]) == ".\n"
    assert again.encode("Sentence 7") == tokenizer.encode("Sentence 7")


def test_samples_start_from_the_end_of_text_token_if_there_is_one(workdir):
    prepared = prepare_data(
        DataConfig(path=helpers.write_table("a.csv", text=["a document\n"] * 99))
    )
    assert prepared.tokenizer.start_token == end_of_text(prepared.tokenizer)


def test_start_of_samples_is_chosen_for_the_text_and_not_for_that_of_the_vocabulary(workdir):
    (workdir / "one.txt").write_text(book("\n"), encoding="utf-8")
    (workdir / "two.txt").write_text(
        "".join(f"Is {n} a number?\n" for n in range(900)), encoding="utf-8"
    )
    first = prepare_data(DataConfig(path="one.txt"), BYTE)
    spec = first.meta["tokenizer"] | {"start": 7}
    second = prepare(DataConfig(path="two.txt"), replace(BYTE, name="run", run="one"), 16, spec)
    assert second.tokenizer.start_token == 10
    again = prepare(
        DataConfig(path="two.txt"), replace(BYTE, name="run", run="one"), 16, spec | {"start": 8}
    )
    assert again.folder == second.folder


def prepare_and_read(capsys, *arguments, **settings) -> str:
    """Prepare data. Returns what that prints."""
    capsys.readouterr()
    prepare_data(DataConfig(**settings), *arguments)
    return capsys.readouterr().out


@pytest.fixture
def folder(workdir) -> str:
    """20 documents, of which the last two are held out."""
    for number in range(20):
        helpers.write_file(f"folder/{number}.txt", f"document {number} " * 9)
    return "folder"


def test_different_documents_are_not_reported_as_copies(folder, capsys):
    assert "also in the training text" not in prepare_and_read(capsys, path=folder)


def test_copies_of_training_documents_in_the_validation_split_are_reported(folder, capsys):
    helpers.write_file("folder/19.txt", "document 3 " * 9)
    assert "1 of 2 validation documents is also in the training text" in prepare_and_read(
        capsys, path=folder
    )


def test_copies_of_rows_are_reported(workdir, capsys):
    path = helpers.write_table("rows.csv", text=["a row", "another row"] * 50)
    assert "10 of 10 validation documents are also in the training" in prepare_and_read(
        capsys, path=path
    )


def test_empty_documents_are_no_copies(folder, capsys):
    helpers.write_file("folder/0.txt", "")
    helpers.write_file("folder/18.txt", "")
    assert "also in the training text" not in prepare_and_read(capsys, path=folder)


def test_rows_with_an_empty_prompt_and_text_are_no_copies(workdir, capsys):
    texts = [f"answer {n}" for n in range(30)]
    texts[0] = texts[29] = ""
    path = helpers.write_table("rows.jsonl", prompt=texts, text=texts)
    assert "also in the training text" not in prepare_and_read(
        capsys, path=path, prompt_column="prompt"
    )


@pytest.mark.parametrize(
    ("sizes", "share"), [([90, 1], "1.1%"), ([1, 90], "98.9%"), ([5, 5], "50.0%")]
)
def test_share_that_is_held_out_is_reported_if_it_is_far_from_the_fraction(
    workdir, capsys, sizes, share
):
    for number, size in enumerate(sizes):
        helpers.write_file(f"folder/{number}.txt", f"{number}" * size * 100)
    out = prepare_and_read(capsys, path="folder", val_fraction=0.1)
    assert f"{share} of text is held out instead of data.val_fraction=0.1" in out


@pytest.mark.parametrize("sizes", [[9, 1], [85, 15]])
def test_share_that_is_held_out_is_not_reported_if_it_is_near_the_fraction(workdir, capsys, sizes):
    for number, size in enumerate(sizes):
        helpers.write_file(f"folder/{number}.txt", f"{number}" * size * 100)
    assert "is held out" not in prepare_and_read(capsys, path="folder", val_fraction=0.1)


def test_documents_that_get_no_end_of_text_token_are_reported(workdir, capsys):
    path = helpers.write_documents("a/*.txt", ["ab" * 30] * 3)
    spec = prepare_data(TEXT_SOURCE).meta["tokenizer"]
    config = DataConfig(path=path)
    prepare(config, replace(BYTE, name="run", run="x"), 16, spec)
    assert "the vocabulary has no <|endoftext|> token" in capsys.readouterr().out
    assert "the vocabulary" not in prepare_and_read(capsys, path=config.path)


@pytest.mark.parametrize(("separator", "count"), [(r"\n", "400 documents"), ("@@", "1 document")])
def test_number_of_separated_documents_is_shown(workdir, capsys, separator, count):
    assert f"text has {count}, divided by" in prepare_and_read(
        capsys, path="text.txt", separator=separator
    )


def test_text_with_end_of_text_markers_gets_a_hint(workdir, capsys):
    text = "A document.<|endoftext|>Another one." * 50
    helpers.write_file("marked.txt", text)
    helpers.write_table("marked.csv", text=[text] * 20)
    out = prepare_and_read(capsys, path="marked.txt")
    assert "contains <|endoftext|> 50 times" in out
    assert "set data.separator='<|endoftext|>'" in out
    assert "times" not in prepare_and_read(capsys, path="marked.txt", separator="<|endoftext|>")
    assert "times" not in prepare_and_read(capsys, path="marked.csv")


def test_advice_for_a_text_whose_tokens_are_too_few_is_a_smaller_vocabulary(workdir):
    (workdir / "ones.txt").write_text("1" * 3000, encoding="utf-8")
    with pytest.raises(UserError, match=r"a smaller tokenizer.vocab_size, or tokenizer=char"):
        prepare_data(DataConfig(path="ones.txt"), replace(BPE, vocab_size=10_000), 3000)


# Prepares a file and prints the memory that this needed. The process dies in the chunk with a number, or in none.
PREPARE = f"""
import itertools, os, re, sys
import pyarrow.json, rustbpe
from data import DataConfig, TokenizerConfig, encode
from data.prepare import prepare

numbers, encode_chunk = itertools.count(), encode.TokenFile.encode_chunk
def encode_or_die(*arguments):
    return os._exit(9) if next(numbers) == int(sys.argv[2]) else encode_chunk(*arguments)
encode.TokenFile.encode_chunk = encode_or_die
def read_peak():  # not ru_maxrss, which a process inherits from the one that starts it
    status = open("/proc/self/status").read() if os.path.exists("/proc/self/status") else "VmHWM: 0"
    return 1024 * int(re.search("VmHWM:\\s+(\\d+)", status)[1])
before = read_peak()
prepare(DataConfig(path=sys.argv[1]), {BPE}, 16)
print("finished", read_peak() - before)
"""


def run_preparations(path: str, *dies_in_chunk: int) -> list[str]:
    """Run preparations at the same time, in other processes. Returns what they print."""
    environment, options = (
        os.environ | {"PYTHONPATH": str(ROOT)},
        {"text": True, "stdout": subprocess.PIPE},
    )
    command = [sys.executable, "-c", PREPARE, path]
    processes = [
        subprocess.Popen([*command, str(chunk)], env=environment, **options)
        for chunk in dies_in_chunk
    ]
    return [process.communicate(timeout=300)[0] for process in processes]


def test_killed_preparation_is_repeated_with_identical_files_also_by_two_processes(workdir):
    helpers.write_documents("a/*.txt", [f"document {n} says {n * n}; " * 10**5 for n in range(3)])
    assert "finished" in run_preparations("a", -1)[0]
    (folder,) = prepared_folders()
    folder.rename("expected")
    for chunk in (0, 3):
        assert "finished" not in run_preparations("a", chunk)[0]
        assert not list(Path("data/prepared").glob("*/meta.json"))
    outputs = run_preparations("a", -1, -1)
    assert ["".join(outputs).count(word) for word in ("preparing text", "finished")] == [1, 2]
    assert prepared_folders() == [folder] and sorted(os.listdir(folder)) == [
        "meta.json",
        "text.bin",
    ]
    assert all(
        path.read_bytes() == Path("expected", path.name).read_bytes() for path in folder.iterdir()
    )


def test_full_disk_is_reported_and_leaves_no_folder(workdir, capsys):
    """A limit on the file size makes the system refuse to write, as on a full disk."""
    with file_size_limit(10_000):
        code = run_command("prepare", "data=text", "data.path=text.txt", "tokenizer=byte")
    message = capsys.readouterr().err
    assert code == 1 and message.count("\n") == 1 and "text.bin: File too large; " in message
    assert not prepared_folders()


def test_interrupted_preparation_leaves_no_folder(workdir, monkeypatch):
    monkeypatch.setattr(
        encode.TokenFile, "encode_chunk", lambda *_: signal.raise_signal(signal.SIGINT)
    )
    with pytest.raises(KeyboardInterrupt):
        prepare_data(TEXT_SOURCE)
    assert not prepared_folders()


def test_text_that_changes_while_it_is_read_is_refused(workdir, monkeypatch):
    monkeypatch.setattr(
        "data.encode.to_spec",
        lambda tokenizer: Path("text.txt").write_text("changed " * 99, encoding="utf-8"),
    )
    with pytest.raises(UserError, match="changed while it was read"):
        prepare_data(TEXT_SOURCE)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("text.bin", None), ("text.bin", b"short"), ("meta.json", None), ("meta.json", b'{"a": '), ("meta.json", b"{}"),
        ("meta.json", lambda content: content.replace(b'"AA==",', b"")),  # the first token of the vocabulary
    ],
)  # fmt: skip
def test_damaged_folder_is_reported(workdir, file, content):
    path = prepare_data(TEXT_SOURCE).folder / file
    path.unlink() if content is None else path.write_bytes(
        content(path.read_bytes()) if callable(content) else content
    )
    with pytest.raises(UserError, match=rf"{path.parent} .*remove the folder"):
        prepare_data(TEXT_SOURCE)


def test_token_outside_of_the_vocabulary_is_noticed_when_it_is_read(workdir):
    prepared = prepare_data(TEXT_SOURCE, CHAR)
    content = np.fromfile(prepared.folder / "text.bin", np.uint16)
    content[20] = prepared.meta["vocab_size"]
    content.tofile(prepared.folder / "text.bin")
    assert len(prepared.train[0][:20]) == 20
    with pytest.raises(TrainingFailed, match=r"text.bin is damaged; remove its folder"):
        prepared.train[0][10:30]


@pytest.mark.slow
@pytest.mark.skipif(
    not Path("/proc/self/status").exists(), reason="NOT RUN: only Linux reports a process's memory"
)
@pytest.mark.parametrize(
    ("name", "row_bytes"), [("big.txt", 10**6), ("short.jsonl", 300), ("long.jsonl", 8 * 10**6)]
)
def test_memory_is_below_300_megabytes_and_does_not_grow_with_the_text(workdir, name, row_bytes):
    """Above the memory of the imports."""
    words = "".join(
        f"the word {n} of a long text, and {n * n % 1009}; " for n in range(row_bytes // 20)
    )
    row = words[:row_bytes] if name == "big.txt" else f'{{"text": "{words[:row_bytes]}"}}\n'
    memory = {}
    for megabytes in (50, 100, 200):
        with open(name, "w", encoding="utf-8") as file:
            file.writelines(row for _ in range(megabytes * 10**6 // len(row)))
        memory[megabytes] = int(run_preparations(name, -1)[0].split()[-1]) // 10**6
    print(name, memory)
    assert 0 < memory[100] < 300 and memory[200] < memory[50] + 50, memory
