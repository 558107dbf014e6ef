"""Rules of DataConfig and TokenizerConfig, finding files (data/config.py, data/sources.py), and their hash."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from data_helpers import load_documents, mix, prepare_data, write_file, write_table
from helpers import BPE, BYTE, TEXT_SOURCE

from common.errors import UserError
from common.settings import check
from data import DataConfig, python_stdlib
from data.sources import hash_sources, resolve_sources

INVALID = [
    (DataConfig(), r"data.path.* set data.path"),
    (replace(TEXT_SOURCE, repo="a/b"), r"data.repo=a/b .*data=hub"),
    (DataConfig(source="hub"), r"data.repo.* set data.repo"),
    (replace(TEXT_SOURCE, prompt_column="text"), r"data.prompt_column=text .*text_column"),
    (replace(TEXT_SOURCE, val_fraction=1.0), r"data.val_fraction"),
    (DataConfig(source="mix"), r"data.mix.*docs/data.md"),
    (mix(one=TEXT_SOURCE, two=DataConfig()), r"data.mix.two.path.* set data.mix.two.path"),
    (
        mix(one=replace(TEXT_SOURCE, document_mask=True)),
        r"data.mix.one.document_mask.* set data.document_mask",
    ),
    (
        replace(mix(one=TEXT_SOURCE), max_documents=3),
        r"data.max_documents=3 .* set data.mix.NAME.max_documents",
    ),
    (
        replace(mix(one=TEXT_SOURCE), text_column="a"),
        r"data.text_column=a .* set data.mix.NAME.text_column",
    ),
]


@pytest.mark.parametrize(("config", "message"), INVALID)
def test_settings_that_do_not_fit_together_are_rejected(config, message):
    check(python_stdlib(), "data")
    with pytest.raises(UserError, match=message):
        check(config, "data")


def test_unknown_source_and_tokenizer_and_a_small_bpe_vocabulary_are_refused(workdir):
    with pytest.raises(UserError, match=r"data.source=pages is unknown; set one of python_stdlib"):
        prepare_data(DataConfig(source="pages"))
    with pytest.raises(UserError, match=r"tokenizer.name=words is unknown; set char"):
        prepare_data(TEXT_SOURCE, replace(BYTE, name="words"))
    with pytest.raises(UserError, match=r"tokenizer.vocab_size=100 must be above 256"):
        check(replace(BPE, vocab_size=100), "tokenizer")


def test_folders_patterns_and_lists_give_each_file_once_in_order(workdir):
    for name in (
        "b/part-10.txt",
        "b/part-9.txt",
        "b/deep/x.md",
        "b/.hidden/no.txt",
        "b/code.py",
        "runs/a.txt",
    ):
        write_file(name, name)
    for name in ("c/a[b].txt", "c/it's.txt", "c/é, x=1.txt", "c/st*r ?.txt", "c/{a}.txt"):
        assert load_documents(write_file(name, name)) == [name]  # an existing file is no pattern
    shutil.rmtree("c")
    write_table("b/t.parquet", text=["row 1", "row 2", "row 3"])
    Path("b/link.txt").symlink_to(Path("b/deep/x.md").resolve())
    Path("text.txt").unlink()
    expected = [
        "b/deep/x.md",
        "b/part-9.txt",
        "b/part-10.txt",
        "row 1",
        "row 2",
        "row 3",
    ]  # not runs/
    assert load_documents("b") == load_documents("b/") == load_documents(".") == expected
    assert load_documents("b/part*") == ["b/part-9.txt", "b/part-10.txt"]
    assert load_documents(["b/**/*.py", "b/deep", "b/code.py"]) == ["b/code.py", "b/deep/x.md"]
    assert load_documents("b/t.parquet", max_documents=2) == ["row 1", "row 2"]


def test_pattern_with_a_bracket_that_finds_nothing_gets_advice(workdir):
    write_file("notes [1]/a.txt", "a")
    with pytest.raises(UserError, match=r"no file to read .* write \[\[\] for the character \["):
        load_documents("notes [1]/*.txt")
    assert load_documents("notes [[]1]/*.txt") == ["a"]


def hub(split: str, val_split: str | None = None) -> DataConfig:
    return DataConfig(source="hub", repo="a/b", split=split, val_split=val_split)


def test_file_cannot_be_trained_on_and_held_out(workdir):
    for n in range(3):
        write_file(f"folder/{n}.txt", f"document {n} " * 20)
    Path("link").symlink_to("folder")
    every, one = DataConfig(path="folder"), DataConfig(path="link/1.txt")
    held_out = replace(one, val_path="folder/0.txt")
    both = [
        replace(every, val_path="link/1.txt"),
        mix(one=every, two=one),
        mix(one=every, two=held_out),
    ]
    both += [
        mix(one=one, two=one),
        hub("test", "test"),
        hub("a[:9]+b", "b[9:]"),
        mix(a=hub("a"), b=hub("a")),
    ]
    for config in both:
        with pytest.raises(
            UserError, match="would be used for both training and validation; remove it"
        ):
            prepare_data(config)
    both = mix(
        all=DataConfig(path=["folder/1.txt", "folder/2.txt"], val_path="folder/0.txt"), one=held_out
    )
    assert prepare_data(both).meta["documents"] == {"train": 3, "val": 2}


def test_hash_covers_everything_that_decides_the_documents(workdir):
    table = DataConfig(path=write_table("0.csv", x=["a", "b"], text=["document 0", "b"]))
    shutil.copy(write_table("1.csv", x=["a", "b"], text=["document 1", "b"]), "same.csv")
    changes = {
        "text_column": "x",
        "prompt_column": "x",
        "path": "1.csv",
        "val_path": "1.csv",
        "val_documents": 3,
    }
    changes |= {"max_documents": 9, "val_fraction": 0.2, "row_is_document": False}
    configs = [
        table,
        *(replace(table, **{key: value}) for key, value in changes.items()),
        hub("a"),
        hub("b"),
    ]
    configs += [hub("a", "b"), replace(hub("a"), config="x"), replace(hub("a"), revision="x")]
    assert len({hash_sources(resolve_sources(config)) for config in configs}) == len(configs)
    same = [
        replace(table, path=path, document_mask=True, weight=3.0) for path in ("1.csv", "same.csv")
    ]
    assert len({hash_sources(resolve_sources(config)) for config in same}) == 1
