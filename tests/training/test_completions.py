"""Training and scoring with data.prompt_column: the loss counts only the tokens of completions."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import load, metrics, read_jsonl, summary

from data.loader import Loader
from data.prepare import PreparedData, read_meta
from generation.load import load_run

ROWS = [("Ask " * (n % 7) + f"{n}? ", f"It is {n * n}." * (n % 3)) for n in range(40)]
COLUMNS = ["data.prompt_column=question", "data.text_column=answer"]
PAIRS = ["data.path=rows.jsonl", *COLUMNS, "eval.sample.max_new_tokens=0"]
FROZEN = ["optimizer=adamw", "optimizer.lr=1e-30"]  # the weights stay the initial ones


def write_rows(path: str, rows: list[tuple[str, str]]) -> None:
    Path(path).write_text(
        "".join(json.dumps({"question": a, "answer": b}) + "\n" for a, b in rows), encoding="utf-8"
    )


@pytest.fixture(autouse=True)
def rows(workdir):
    write_rows("rows.jsonl", ROWS)


def completion_losses(
    model, tokenizer, prompt: str, completion: str, is_first: bool = False
) -> list[float]:
    """Loss of each token of a completion and of the end-of-text token after it. The reference: one row per forward.

    is_first: no end-of-text token is before the prompt.
    """
    end = tokenizer.eot_token
    prompt_ids, ids = tokenizer.encode(prompt), tokenizer.encode(completion)
    tokens = torch.tensor([*([] if is_first else [end]), *prompt_ids, *ids, end])
    logits = model(tokens[None, :-1])[0]
    return F.cross_entropy(logits, tokens[1:], reduction="none")[-len(ids) - 1 :].tolist()


def test_validation_loss_is_that_of_the_completions(train):
    rows = [("What is 4? ", "It is 16."), ("Ask? ", ""), ("", "It is 1.")]
    write_rows("val.jsonl", rows)
    settings = [
        "model.block_size=64",
        "data.val_path=val.jsonl",
        "data.document_mask=true",
        "eval.windows=null",
    ]
    assert train("name=a", *PAIRS, *settings) == 0
    model, tokenizer = load_run("a", checkpoint="last")
    nats = [
        loss
        for i, row in enumerate(rows)
        for loss in completion_losses(model, tokenizer, *row, is_first=i == 0)
    ]
    n_bytes = sum(len(completion) for _, completion in rows)
    assert metrics("a")[-1]["val/loss"] == pytest.approx(sum(nats) / len(nats), abs=1e-5)
    assert metrics("a")[-1]["val/bpb"] == pytest.approx(sum(nats) / math.log(2) / n_bytes, abs=1e-5)


def test_training_loss_is_the_mean_over_all_targets_of_a_step(train, workdir):
    """Also if the micro batches have different numbers of targets."""
    for size in (4, 2, 1):
        assert train(f"name=frozen{size}", f"train.micro_batch_size={size}", *PAIRS, *FROZEN) == 0
        assert train(f"name=a{size}", f"train.micro_batch_size={size}", *PAIRS) == 0
    model, _ = load_run("frozen4", checkpoint="last")
    folder = Path(summary("frozen4")["data"])
    loader = Loader(
        PreparedData(folder, read_meta(folder)), 16, seed=load("frozen4")["config"]["seed"]
    )
    counts = set()
    for step in range(6):
        x, y, _ = loader.batch("train", 4 * step, 4)
        counts |= {tuple((y >= 0).sum(1).tolist())}
        losses = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="none")
        expected = losses.sum().item() / int((y >= 0).sum())
        for size in (4, 2, 1):
            assert metrics(f"frozen{size}")[step + 1]["train/loss"] == pytest.approx(
                expected, abs=1e-5
            )
    assert len({number for numbers in counts for number in numbers}) > 1
    for size in (2, 1):
        for a, b in zip(metrics("a4")[1:], metrics(f"a{size}")[1:], strict=True):
            assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-5)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4)


def test_resumed_run_is_bit_identical(train):
    settings = [
        *PAIRS,
        "schedule.warmup_steps=100",
        "train.micro_batch_size=2",
        "data.document_mask=true",
    ]
    assert train("name=whole", "train.steps=6", *settings) == 0
    assert train("name=parts", "train.steps=3", *settings) == 0
    assert train("name=parts", "train.steps=6", *settings) == 0
    whole, parts = (load(name)["model"] for name in ("whole", "parts"))
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())
    assert [row.get("train/loss") for row in metrics("whole")] == [
        row.get("train/loss") for row in metrics("parts")
    ]


def test_steps_without_a_target_have_loss_0_and_such_an_evaluation_is_refused(train, capsys):
    write_rows("rows.jsonl", [("a long prompt " * 5, "x")] * 30)
    settings = ["train.batch_size=1", "train.steps=12", *PAIRS]
    assert train("name=b", "eval.windows=1", *settings) == 2
    assert "the 1 validation windows have only prompts" in capsys.readouterr().err
    assert train("name=a", "eval.windows=null", *settings) == 0
    rows = metrics("a")[1:]
    empty = [row for row in rows if row["train/loss"] == 0]
    assert 0 < len(empty) < len(rows)
    assert all(row["grad_norm"] == 0 for row in empty)
    assert all(math.isfinite(row["train/loss"]) and math.isfinite(row["grad_norm"]) for row in rows)


def test_loss_of_documents_counts_completions(train, evaluate):
    """Also of a prompt that is longer than the context."""
    assert train("name=a", "model.block_size=64", "tokenizer=byte", *PAIRS) == 0
    write_rows(
        "scored.jsonl",
        [("What is 4? ", "It is 16."), ("Ask? ", ""), ("Ask " * 40, "1"), ("", "1?")],
    )
    evaluate("run=a", "data.path=scored.jsonl", *COLUMNS, "out=o.jsonl")
    *results, _ = read_jsonl("o.jsonl")
    assert (
        [result["tokens"] for result in results]
        == [result["bytes"] for result in results]
        == [9, 0, 1, 2]
    )
    model, tokenizer = load_run("a")
    for result, row in ((results[0], ("What is 4? ", "It is 16.")), (results[3], ("", "1?"))):
        losses = completion_losses(model, tokenizer, *row)[:-1]
        assert result["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
    assert results[1]["loss"] is None
