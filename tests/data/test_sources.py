"""Finding the files of paths and configs, and the fingerprint of their content."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from data_helpers import HUB, load_documents, write_csv, write_parquet
from helpers import BPE, BYTE, CHAR, TEXT_SOURCE

from data.prepare import Preparation


@pytest.mark.parametrize("name", ["a[b].txt", "it's.txt", "é, x=1.txt", "st*r ?.txt", "{a}.txt"])
def test_existing_file_names_are_not_patterns(workdir, name):
    (workdir / name).write_text("line one\nline two\n" * 20)
    (workdir / "ab.txt").write_text("a decoy for the pattern")
    assert load_documents(replace(TEXT_SOURCE, path=name)) == ["line one\nline two\n" * 20]


def test_folders_patterns_and_lists_give_files_in_order(workdir):
    for name in ("b/part-10.txt", "b/part-9.txt", "b/deep/x.md", "b/.hidden/no.txt", "b/code.py", "c.txt"):
        (workdir / name).parent.mkdir(parents=True, exist_ok=True)
        (workdir / name).write_text(name)
    write_parquet(workdir / "b/t.parquet", ["row 1", "row 2"])

    def documents(path):
        return load_documents(replace(TEXT_SOURCE, path=path))

    assert documents("b") == ["b/deep/x.md", "b/part-9.txt", "b/part-10.txt", "row 1", "row 2"]
    assert documents("b/*.txt") == ["b/part-9.txt", "b/part-10.txt"]
    assert documents("b/**/*.py") == ["b/code.py"]
    assert documents(["c.txt", "b/deep", "c.txt"]) == ["c.txt", "b/deep/x.md"]
    (workdir / "runs/a").mkdir(parents=True)
    (workdir / "runs/a/notes.txt").write_text("made by a run")
    (workdir / "text.txt").unlink()
    assert documents(".")[-1] == "c.txt"
    (workdir / "more.jsonl").write_text('{"text": "1"}\n{"text": "2"}\n{"text": "3"}\n')
    assert load_documents(replace(TEXT_SOURCE, path="more.jsonl", max_documents=2)) == ["1", "2"]


def test_output_folders_are_skipped_and_linked_folders_read_once(workdir):
    for path in ("a/one.md", "b/deep/two.md", "data/prepared/x/meta.md", "runs/y/three.md", "a/.hidden/four.md"):
        Path(path).parent.mkdir(parents=True)
        Path(path).write_text(path)
    Path("a/link").symlink_to(Path("b").resolve())
    Path("b/deep/loop").symlink_to(Path("b").resolve())
    Path("a/three.md").symlink_to(Path("b/deep/two.md").resolve())
    for path in ("a", "**/*.md"):
        assert sorted(load_documents(replace(TEXT_SOURCE, path=path))) == ["a/one.md", "b/deep/two.md"]
    for name in ("again", "and again"):  # without a check, the number of paths is infinite
        Path("a", name).symlink_to(Path("a").resolve())
    assert sorted(load_documents(replace(TEXT_SOURCE, path="a"))) == ["a/one.md", "b/deep/two.md"]
    Path("links").mkdir()
    Path("links/only").symlink_to(Path("b").resolve())
    assert load_documents(replace(TEXT_SOURCE, path="links")) == ["b/deep/two.md"]


def test_fingerprint_covers_everything_that_decides_the_tokens(workdir):
    for number in range(2):
        write_parquet(workdir / f"{number}.parquet", [f"document {number}"])
    write_csv(workdir / "0.csv", ["document 0"])

    def fingerprint(config, tokenizer=BYTE):
        return Preparation.from_config(config, tokenizer, None).fingerprint

    parquet = replace(TEXT_SOURCE, path="0.parquet")
    texts = ("repo", "config", "split", "revision", "text_column", "prompt_column", "val_split")
    changes = dict.fromkeys(texts, "x") | {"val_path": "text.txt", "val_documents": 3, "max_documents": 9}
    changes |= {"stream": True, "row_is_document": False}
    first = replace(HUB, val_documents=2)
    configs = [first, *(replace(first, **{key: value}) for key, value in changes.items())]
    configs += [parquet, replace(parquet, text_column="title"), replace(parquet, path="1.parquet")]
    configs += [replace(parquet, path="0.csv"), TEXT_SOURCE, replace(TEXT_SOURCE, val_fraction=0.2)]
    fingerprints = {fingerprint(config) for config in configs} | {fingerprint(parquet, CHAR), fingerprint(parquet, BPE)}
    assert len(fingerprints) == len(configs) + 2
    shutil.copy("0.parquet", "same.parquet")
    assert fingerprint(replace(parquet, path="same.parquet")) == fingerprint(parquet)
    assert fingerprint(replace(parquet, document_mask=True, weight=3.0)) == fingerprint(parquet)
