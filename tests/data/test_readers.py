"""Text in tables: local parquet, jsonl and csv files, the hub, and the recipe that trains on them."""

import gzip
import json
import lzma
import math
import shutil
from dataclasses import replace

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from helpers import BYTE, GPT2, TEXT_SOURCE

from common.errors import UserError
from configs.cli import parse_config, run_main
from data import prepare as data_prepare
from data import sources, tokenizer
from data.prepare import prepare

HUB = replace(TEXT_SOURCE, source="hub", path=None, repo="some/texts", split="train", revision="refs/convert/parquet")
DOCUMENTS = [f"Document {n} of the web says {n * n}, and après tout no more.\n" * 3 for n in range(60)]


@pytest.fixture
def tables(workdir):
    """One text in each kind of table, shaped like OpenWebText's: a column of strings, several row groups."""
    columns = {"text": DOCUMENTS, "id": list(range(60)), "title": ["a"] * 60}
    pq.write_table(pa.table(columns), "web.parquet", row_group_size=13)
    table = datasets.Dataset.from_dict(columns)
    table.to_json("web.jsonl")
    table.to_csv("web.csv")
    return workdir


@pytest.fixture
def hub(tables, monkeypatch):
    """A stand-in for the hub: for some/texts `datasets` reads a folder that is laid out as a converted data set is."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tables / "cache")
    monkeypatch.setattr(sources, "commit", lambda repo, revision: f"the commit of {revision}")
    folder, asked, load = tables / "hub", [], datasets.load_dataset
    for part in range(2):
        (folder / "plain_text/train").mkdir(parents=True, exist_ok=True)
        table = pa.table({"text": DOCUMENTS[part * 30 :][:30]})
        pq.write_table(table, folder / f"plain_text/train/000{part}.parquet", row_group_size=13)

    def from_the_folder(repo, **asked_for):
        asked.append((repo, asked_for))
        return load(str(folder), **asked_for | {"revision": None})

    monkeypatch.setattr(datasets, "load_dataset", from_the_folder)
    return asked


def quietly(config, kind=BYTE):
    return prepare(config, kind, 16, say=lambda line: None)


def documents_of(prepared) -> list[str]:
    ids = np.concatenate([prepared.tokens(split)[:] for split in ("train", "val")])
    ends = np.flatnonzero(ids == tokenizer.end_of_text(prepared.encoding))
    return [prepared.encoding.decode(part.tolist()[:-1]) for part in np.split(ids, ends + 1)[:-1]]


@pytest.mark.parametrize("name", ["web.parquet", "web.jsonl", "web.csv"])
def test_each_row_of_a_table_is_a_document_and_the_last_are_held_out_whole(tables, name):
    prepared = quietly(replace(TEXT_SOURCE, path=name))
    assert documents_of(prepared) == DOCUMENTS
    val = prepared.encoding.decode(prepared.tokens("val")[:].tolist()).split("<|endoftext|>")[:-1]
    assert val == DOCUMENTS[-len(val) :]
    assert len(val) == 6
    assert prepared.meta["source"]["documents"] == 60


def test_nulls_are_left_out(workdir):
    pq.write_table(pa.table({"text": ["one", None, "two", "", "three"]}), "holes.parquet")
    assert sources.documents(replace(TEXT_SOURCE, path="holes.parquet")) == ["one", "two", "", "three"]


def test_a_word_in_a_csv_is_a_word_and_no_null(workdir):
    (workdir / "words.csv").write_text("text,id\nNA,1\nnull,2\nNone,3\nfour,4\n")
    assert sources.documents(replace(TEXT_SOURCE, path="words.csv")) == ["NA", "null", "None", "four"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_data_set_of_the_hub_is_read_at_the_commit_of_its_revision(hub, stream):
    prepared = quietly(replace(HUB, stream=stream, val_documents=6))
    commit = "the commit of refs/convert/parquet"
    about = {"name": None, "split": "train", "revision": commit, "streaming": stream}
    assert hub and all(asked == ("some/texts", about) for asked in hub)
    assert prepared.meta["source"]["revisions"] == {"text": commit}
    assert sorted(documents_of(prepared)) == sorted(DOCUMENTS)
    hub.clear()
    assert quietly(replace(HUB, stream=stream, val_documents=6)).folder == prepared.folder
    assert not hub  # what is prepared needs no hub


def test_what_decides_the_rows_decides_the_folder(tables):
    def folder(config):
        return data_prepare._place(config, BYTE, None)[0]

    parquet = replace(TEXT_SOURCE, path="web.parquet")
    changes = {"repo": "x", "config": "x", "split": "x", "revision": "x", "text_column": "x", "stream": True,
               "row_is_document": False, "max_documents": 9, "val_documents": 3, "val_split": "x",
               "val_path": "text.txt"}  # fmt: skip
    first = replace(HUB, val_documents=2)
    configs = [first, *(replace(first, **{key: value}) for key, value in changes.items())]
    configs += [parquet, replace(parquet, text_column="title"), replace(parquet, path="web.csv"), TEXT_SOURCE,
                replace(TEXT_SOURCE, val_fraction=0.2)]  # fmt: skip
    assert len({folder(config) for config in configs}) == len(configs)
    shutil.copy("web.parquet", "same.parquet")
    assert folder(replace(parquet, path="same.parquet")) == folder(parquet)
    assert folder(replace(parquet, document_mask=True, weight=3.0)) == folder(parquet)  # which decide no token


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("half.parquet", None, r"half.parquet cannot be read as .parquet \(ArrowInvalid: .*\); mend it"),
        ("none.parquet", b"", r"none.parquet holds no text"),
        ("text.parquet", b"a text " * 100, r"text.parquet cannot be read as .parquet \(ArrowInvalid: "),
        ("bad.jsonl", b'{"text": "a"}\nnonsense\n', r"line 2 of bad.jsonl is no JSON"),
        ("bad.csv", b"text,id\na,1\nb,2,3,4\n", r"line 3 of bad.csv has 4 fields where the first names 2 columns; put"),
        ("long.csv", b"text,label\nhello, world,1\nb,2\n", r"line 2 of long.csv has 3 fields where the first names 2"),
        ("short.csv", b'text,id\n"a\nb",1\nb\n', r"line 4 of short.csv has 1 fields where the first names 2"),
        ("open.csv", b'text,id\n"a,1\nb,2\n', r"line 4 of open.csv is no CSV \(unexpected end of data\); mend it"),
        ("semi.csv", b"text;label\na;1\n", r"has no column text; .* one of text;label \(which commas separate\)$"),
        ("head.csv.gz", gzip.compress(b"", mtime=0), r"head.csv.gz holds no text"),
        (
            "twice.parquet.gz",
            gzip.compress(b"PAR1", mtime=0),
            r"twice.parquet.gz: .parquet is compressed in itself and",
        ),
        ("text.txt.xz", lzma.compress(b"a text"), r"text.txt.xz is packed, and of such files .gz and .zst are read"),
        ("latin.csv", b"text,id\ncaf\xe9,1\n", r"latin.csv is not UTF-8: byte 11 is 0xe9"),
        ("head.csv", b"text,id\n", r"head.csv holds no text"),
        ("BODY.CSV", b"body,id\na,1\nb,2\n", r"BODY.CSV has no column text; set data.text_column to one of body, id$"),
    ],
)
def test_tables_that_cannot_be_read(tables, capfd, name, content, said):
    whole = (tables / "web.parquet").read_bytes()
    (tables / name).write_bytes(whole[: len(whole) // 2] if content is None else content)
    with pytest.raises(UserError, match=said):
        quietly(replace(TEXT_SOURCE, path=name))
    assert not list((tables / "data/prepared").glob("[!.]*/"))
    assert "".join(capfd.readouterr()) == ""


def test_a_damaged_page_in_a_whole_looking_parquet_is_found(tables):
    content = bytearray((tables / "web.parquet").read_bytes())
    content[40:400] = b"\xff" * 360
    (tables / "damaged.parquet").write_bytes(content)
    with pytest.raises(UserError, match=r"damaged.parquet cannot be read as .parquet \(OSError: "):
        quietly(replace(TEXT_SOURCE, path="damaged.parquet"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"text_column": "body"}, r"some/texts.* has no column body; set data.text_column to one of text$"),
        ({"split": "test"}, r"some/texts could not be read from the hub \(ValueError: Unknown split \"test\".*; mend"),
        (
            {"config": "nope"},
            r"some/texts could not be read from the hub \(ValueError: .*nope.*; mend data.repo, data.c",
        ),
    ],
)
def test_what_the_hub_does_not_have(hub, change, said):
    with pytest.raises(UserError, match=said):
        quietly(replace(HUB, **change))


def test_a_hub_that_cannot_be_reached_says_what_to_do(workdir, monkeypatch):
    def unreachable(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'some/texts' on the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError, match=r"ConnectionError: .*check the network, or get the files .*=FILES$"):
        quietly(HUB)


@pytest.mark.parametrize(("key", "like"), [("repo", "OWNER/NAME"), ("split", "train")])
def test_a_hub_source_says_what_it_lacks(key, like):
    with pytest.raises(UserError, match=f"set data.{key}={like}, or data.path=FILE"):
        replace(HUB, **{key: None})


# The recipe


def test_gpt2_124m_is_nanogpts_recipe_at_half_a_million_tokens_on_any_number_of_devices(workdir):
    config = parse_config("train", "", ["experiment=gpt2_124m"])
    model, tuned, schedule = config.model, config.optimizer, config.schedule
    assert (model.n_layer, model.n_head, model.n_embd, model.block_size) == (12, 12, 768, 1024)
    assert (tuned.name, tuned.lr, tuned.betas, tuned.weight_decay) == ("adamw", 6e-4, [0.9, 0.95], 0.1)
    assert (schedule.name, schedule.warmup_steps, schedule.final_fraction) == ("cosine", 2000, 0.1)
    assert (config.train.steps, config.train.grad_clip, config.eval.every) == (600_000, 1.0, 1000)
    assert (config.data.repo, config.tokenizer.name) == ("Skylion007/openwebtext", "gpt2")
    for world_size in (1, 2, 4, 8):
        micro, accumulation = config.train.plan(world_size)
        assert micro * accumulation * world_size * model.block_size == 524_288


def test_gpt2_124m_shrunken_trains_on_a_local_parquet(tables):
    from train import main

    try:
        tokenizer.build(tokenizer.Corpus(["x"], several=False), GPT2)
        kind = "gpt2"
    except UserError:
        kind = "byte"
    code = run_main(main, parse_config("train", "", [
        "experiment=gpt2_124m", "data.path=web.parquet", f"tokenizer={kind}", "name=a", "model.n_layer=2",
        "model.n_head=2", "model.n_embd=16", "model.block_size=32", "train.steps=2", "train.batch_size=4",
        "train.micro_batch_size=2", "eval.sample.max_new_tokens=4", "wandb.mode=disabled", "device=cpu",
    ]))  # fmt: skip
    assert code == 0
    rows = [json.loads(line) for line in (tables / "runs/a/metrics.jsonl").read_text().splitlines()]
    losses = [row[key] for row in rows for key in ("train/loss", "val/loss") if key in row]
    assert len(losses) == 4
    vocabulary = json.loads((tables / "runs/a/summary.json").read_text())["vocab_size"]
    assert all(math.isfinite(loss) and abs(loss - math.log(vocabulary)) < 0.5 for loss in losses)
