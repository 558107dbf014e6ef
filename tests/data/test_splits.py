"""The split plan: which text is held out, and that no text is both trained on and held out."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from data_helpers import STDLIB, decode_split, load_documents, make_mix, prepare_text, write_parquet
from helpers import BYTE, CHAR, TEXT_SOURCE
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data.sources import resolve_sources
from data.splits import TextStats
from data.tokenizer import end_of_text


@settings(max_examples=100, deadline=None)
@given(documents=st.lists(st.text("abc", max_size=9), min_size=2, max_size=40), fraction=st.floats(0.05, 0.9))
def test_val_cut_holds_out_complete_documents(documents, fraction):
    stats = TextStats().add((text, True, False) for text in documents)
    if not stats.characters:
        return
    (first, character), _ = stats.find_val_cut(fraction)
    assert character == 0 and 0 < first < len(documents)
    held_out = sum(map(len, documents[first:]))
    assert held_out >= stats.characters * fraction or first == 1
    assert sum(map(len, documents[first + 1 :])) < max(1, stats.characters * fraction)  # not more than necessary


def test_standard_library_files_are_complete_documents(workdir):
    files = [file.address for file in resolve_sources(STDLIB)[0].files]
    assert len(files) > 200
    assert not any("/test/" in file or "site-packages" in file for file in files)
    prepared = prepare_text(replace(STDLIB, val_fraction=0.05), BYTE, 16)
    val = prepared.tokens("val")[:]
    ends = np.flatnonzero(val == end_of_text(prepared.tokenizer))
    assert ends[-1] == len(val) - 1
    last = prepared.tokenizer.decode(val[ends[-2] + 1 : -1].tolist())
    with open(files[-1], encoding="utf-8", newline="") as f:
        assert last == f.read()


def test_validation_can_be_separate_files_or_the_first_documents(workdir):
    write_parquet(workdir / "a.parquet", [f"train {n} " for n in range(30)])
    (workdir / "val.txt").write_text("something else " * 10)

    def texts(**changed):
        prepared = prepare_text(replace(TEXT_SOURCE, path="a.parquet", **changed))
        return {split: decode_split(prepared, split) for split in ("train", "val")}

    separate = texts(val_path="val.txt")
    assert separate == {"train": "".join(f"train {n} " for n in range(30)), "val": "something else " * 10}
    first = texts(val_documents=4)
    assert first["val"] == "train 0 train 1 train 2 train 3 "
    assert first["train"].startswith("train 4 ") and first["train"].endswith("train 29 ")
    some = texts(max_documents=10, val_fraction=0.2)
    assert some["train"] + some["val"] == "".join(f"train {n} " for n in range(10))
    with pytest.raises(UserError, match=r"data\.val_documents=30 leaves nothing to train on, as text has 30 documents"):
        texts(val_documents=30)


def test_file_cannot_be_trained_on_and_held_out(workdir):
    (workdir / "folder").mkdir()
    (workdir / "folder/text.txt").write_text("a text " * 50)
    (workdir / "loop").symlink_to("folder")
    with pytest.raises(UserError, match=r"folder/text.txt would be used for both training and validation"):
        held_out = str(workdir / "loop/text.txt")  # the same file by another path
        prepare_text(replace(TEXT_SOURCE, path="folder", val_path=held_out))
    assert load_documents(replace(TEXT_SOURCE, path=["folder", "loop/*.txt"])) == ["a text " * 50]


def test_mix_cannot_train_on_files_that_another_source_holds_out(workdir):
    for n in range(4):
        Path(f"{n}.txt").write_text(f"document {n} " * 20)
    all_of_them, one = replace(TEXT_SOURCE, path="?.txt"), replace(TEXT_SOURCE, path="1.txt", weight=3.0)
    with pytest.raises(
        UserError, match=r"1.txt is in data.mix.all and in data.mix.one, so that one would train on text"
    ):
        prepare_text(make_mix(mix={"all": all_of_them, "one": one}))
    held_out = replace(one, val_path="0.txt")
    with pytest.raises(UserError, match=r"0.txt would be used for both training and validation"):
        prepare_text(make_mix(mix={"all": all_of_them, "one": held_out}))
    both = {"all": replace(TEXT_SOURCE, path=["1.txt", "2.txt"], val_path="0.txt"), "one": held_out}
    assert prepare_text(make_mix(mix=both)).meta["documents"] == {"train": 3, "val": 2}


def test_mix_keeps_sources_separate_with_one_vocabulary(workdir):
    write_parquet(workdir / "a.parquet", [f"train {n} " for n in range(30)])
    mix = {"one": replace(TEXT_SOURCE, weight=3.0), "two": replace(TEXT_SOURCE, path="a.parquet", val_fraction=0.5)}
    config = replace(make_mix(mix=mix), name="both")
    prepared = prepare_text(config, CHAR, 16)
    assert prepared.weights == (3.0, 1.0)
    assert [source["name"] for source in prepared.meta["mix"]] == ["one", "two"]
    tokens, whole = prepared.tokens("train"), ""
    for (first, count), begins in zip(prepared.train_ranges, ("The 0th line", "train 0 "), strict=True):
        text = prepared.tokenizer.decode(tokens[first : first + count].tolist())
        assert text.startswith(begins)
        whole += text
    assert len(tokens) == sum(count for _, count in prepared.train_ranges)
    again = prepare_text(replace(config, mix=mix | {"one": TEXT_SOURCE}), CHAR, 16)
    assert again.folder == prepared.folder and again.weights == (1.0, 1.0)  # weights do not change the tokens


@pytest.mark.parametrize(("split", "val_split"), [("train+test", "test"), ("train[:90%]", "train[50%:]")])
def test_hub_split_cannot_be_held_out_from_itself(workdir, split, val_split):
    write_parquet(workdir / "train.parquet", [f"train {n} " for n in range(30)])
    write_parquet(workdir / "test.parquet", [f"test {n} " for n in range(30)])
    config = replace(TEXT_SOURCE, source="hub", path=None, repo=".", split=split, val_split=val_split)
    with pytest.raises(UserError, match=r", split (test|train) would be used for both training and validation"):
        prepare_text(config)
