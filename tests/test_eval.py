"""eval.py: the loss of documents."""

import json
import math
import sys
from contextlib import chdir, redirect_stdout

import pytest
import torch
import torch.nn.functional as F
from helpers import TEXT, metrics, read_jsonl, run_command, train_here

from configs.cli import parse_config
from generation.load import load_for_inference, load_run
from model.attention import flex

VAL_START = TEXT.index(
    "\n", round(len(TEXT) * 0.9)
)  # the validation split begins with this newline


@pytest.fixture(scope="module")
def validated(tmp_path_factory):
    """A folder with a run that is validated on its complete validation split, and val.txt."""
    folder = tmp_path_factory.mktemp("validated")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    (folder / "val.txt").write_text(TEXT[VAL_START + 1 :], encoding="utf-8")
    fraction = 1 - (VAL_START + 0.5) / len(TEXT)
    with chdir(folder):
        assert train_here("name=a", "eval.windows=null", f"data.val_fraction={fraction}") == 0
    return folder


@pytest.mark.parametrize("batch_size", [1, 32])
def test_loss_of_the_validation_text_is_the_validation_loss(
    evaluate, validated, monkeypatch, tmp_path, batch_size
):
    """Documents are scored after a newline, which is the start token of this text."""
    monkeypatch.chdir(validated)
    out = tmp_path / "o.jsonl"
    settings = ["run=a", "checkpoint=last", "data.path=val.txt", f"batch_size={batch_size}"]
    evaluate(*settings, f"out={out}")
    row, _ = read_jsonl(out)
    expected = metrics("a")[-1]
    assert row["tokens"] == len(TEXT) - VAL_START - 1
    assert row["loss"] == pytest.approx(expected["val/loss"], abs=2e-5)
    assert row["bits_per_byte"] == pytest.approx(expected["val/bpb"], abs=2e-5)


DOCUMENTS = [f"line {i} says {i * i}" for i in range(30)] + [""]


@pytest.fixture(scope="module")
def scored(tmp_path_factory):
    """A folder with a run on DOCUMENTS, which it scores: o.jsonl and the printed table, o.txt."""
    folder = tmp_path_factory.mktemp("scored")
    lines = [json.dumps({"text": document}) + "\n" for document in DOCUMENTS]
    (folder / "t.jsonl").write_text("".join(lines), encoding="utf-8")
    with chdir(folder):
        assert train_here("name=a", "data.path=t.jsonl", "model.block_size=32") == 0
        with open("o.txt", "w", encoding="utf-8") as file, redirect_stdout(file):
            assert run_command("eval", "run=a", "data.path=t.jsonl", "out=o.jsonl") == 0
    return folder


@pytest.fixture
def rows(scored, monkeypatch):
    """The rows of the documents, and of all. The current folder has their run."""
    monkeypatch.chdir(scored)
    return read_jsonl("o.jsonl")


def test_each_document_has_a_row(rows):
    assert [row["document"] for row in rows] == [*range(1, 32), "all"]


def test_rows_count_tokens_and_bytes(rows):
    """Each character of these documents is one token and one byte."""
    lengths = [len(document) for document in DOCUMENTS]
    assert [row["tokens"] for row in rows] == [*lengths, sum(lengths)]
    assert [row["bytes"] for row in rows] == [*lengths, sum(lengths)]


def test_loss_of_a_document_is_that_of_one_window(rows):
    """The reference is one forward pass per document, after an end-of-text token."""
    model, tokenizer = load_run("a")
    for document, row in zip(DOCUMENTS[:-1], rows, strict=False):
        tokens = torch.tensor([tokenizer.eot_token, *tokenizer.encode(document)])
        loss = F.cross_entropy(model(tokens[None, :-1])[0], tokens[1:])
        assert row["loss"] == pytest.approx(loss.item(), abs=1e-5)


def test_loss_of_all_documents_is_the_mean_over_tokens(rows):
    *documents, total = rows
    nats = sum(row["loss"] * row["tokens"] for row in documents if row["tokens"] > 0)
    assert total["loss"] == pytest.approx(nats / total["tokens"], abs=1e-5)


def test_perplexity_is_the_exponential_of_the_loss(rows):
    for row in rows:
        if row["tokens"] > 0:
            assert row["perplexity"] == pytest.approx(math.exp(row["loss"]))


def test_document_without_tokens_has_no_loss(rows):
    assert rows[30]["loss"] is None


def test_table_has_the_first_20_documents_and_all(rows, scored):
    table = (scored / "o.txt").read_text(encoding="utf-8").splitlines()
    lines = [line.split() for line in table if line.split()][2:]  # after the header
    numbers_and_losses = [(line[0], line[-3]) for line in lines]
    shown = [*rows[:20], rows[-1]]
    expected = [(str(row["document"]), f"{row['loss']:.4f}") for row in shown]
    assert numbers_and_losses == expected


def test_missing_figure_is_a_dash_in_the_table(scored, monkeypatch, capsys):
    monkeypatch.chdir(scored)
    (scored / "empty.jsonl").write_text('{"text": ""}\n{"text": "line"}\n', encoding="utf-8")
    assert run_command("eval", "run=a", "data.path=empty.jsonl") == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" 1 ")]
    assert line.split() == ["1", "0", "0", "-", "-", "-"]


@pytest.fixture(scope="module")
def longer_run(tmp_path_factory):
    """A folder with a run of 30 steps, and its loss in float32."""
    folder = tmp_path_factory.mktemp("longer")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    with chdir(folder):
        assert train_here("name=a", "train.steps=30") == 0
        assert run_command("eval", "run=a", "data.path=text.txt", "out=float32.jsonl") == 0
    return folder


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("bfloat16", 1e-2), ("float16", 1e-3), ("int8", 3e-2)]
)
def test_low_precision_weights_change_the_loss_only_slightly(
    longer_run, monkeypatch, tmp_path, dtype, tolerance
):
    if dtype == "int8" and "fbgemm" not in torch.backends.quantized.supported_engines:
        pytest.skip("NOT RUN: int8 needs an x86 CPU")
    monkeypatch.chdir(longer_run)
    out = tmp_path / "o.jsonl"
    assert run_command("eval", "run=a", "data.path=text.txt", f"dtype={dtype}", f"out={out}") == 0
    loss = read_jsonl(out)[0]["loss"]
    expected = read_jsonl("float32.jsonl")[0]["loss"]
    assert loss != expected
    assert loss == pytest.approx(expected, abs=tolerance)


def test_scoring_needs_no_backend_that_supports_positions(trained, monkeypatch):
    """It decodes nothing. On CPUs, flex supports no positions."""
    monkeypatch.setenv("CXX", sys.executable)  # any program
    config = parse_config("eval", "", ["run=a", "attention=flex", "device=cpu", "data.path=a"])
    model, *_ = load_for_inference(config, decodes_batches=False)
    assert model.blocks[0].attn.attend is flex


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([], "data.path=null has no documents; set a file"),
        (["run=no/where", "data.path=text.txt"], "run=no/where has no checkpoint"),
        (["data.path=nothing.txt"], "data.path=nothing.txt has no file to read"),
        (["data.path=unknown.txt"], "document 1 has characters that are not in the vocabulary"),
        (["data.path=text.txt", "out=text.txt"], "out=text.txt exists, or"),
        (["data.path=text.txt", "data.val_path=text.txt"], "data.val_path=text.txt is not scored"),
        (["dtype=int4"], "dtype=int4 is unknown (did you mean int8?)"),
    ],
)
def test_invalid_settings_are_refused(trained, workdir, capsys, overrides, message):
    (workdir / "unknown.txt").write_text("The\nÜ\n", encoding="utf-8")
    assert run_command("eval", *overrides) == 2
    assert message in capsys.readouterr().err
