"""Training and scoring with data.prompt_column: the loss counts only the tokens of completions."""

import json
import math
from contextlib import chdir
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import load, metrics, read_jsonl, run_command, summary
from run_helpers import train_in

from data.loader import Loader
from data.prepare import PreparedData, read_meta
from generation.load import load_run

Rows = list[tuple[str, str]]  # prompt and completion
ROWS: Rows = [("Ask " * (n % 7) + f"{n}? ", f"It is {n * n}." * (n % 3)) for n in range(40)]
COLUMNS = ["data.prompt_column=question", "data.text_column=answer"]
PAIRS = ["data.path=rows.jsonl", *COLUMNS, "eval.sample.max_new_tokens=0"]
FROZEN = ["optimizer=adamw", "optimizer.lr=1e-30"]  # the weights stay the initial ones


def write_rows(path: Path, rows: Rows) -> None:
    lines = [json.dumps({"question": prompt, "answer": text}) for prompt, text in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.fixture
def rows(workdir) -> None:
    write_rows(workdir / "rows.jsonl", ROWS)


def completion_losses(
    model, tokenizer, row: tuple[str, str], is_first: bool = False
) -> list[float]:
    """Loss of each token of a completion and of the end-of-text token after it.

    The reference: one row per forward pass.
    is_first: no end-of-text token is before the prompt.
    """
    end = tokenizer.eot_token
    prompt, completion = (tokenizer.encode(text) for text in row)
    before = [] if is_first else [end]
    tokens = torch.tensor([*before, *prompt, *completion, end])
    logits = model(tokens[None, :-1])[0]
    losses = F.cross_entropy(logits, tokens[1:], reduction="none")
    return losses[-len(completion) - 1 :].tolist()


# Validation


VAL_ROWS: Rows = [("What is 4? ", "It is 16."), ("Ask? ", ""), ("", "It is 1.")]


def test_validation_counts_only_the_completions(tmp_path):
    write_rows(tmp_path / "rows.jsonl", ROWS)
    write_rows(tmp_path / "val.jsonl", VAL_ROWS)
    settings = ["data.val_path=val.jsonl", "data.document_mask=true", "eval.windows=null"]
    train_in(tmp_path, "name=a", "model.block_size=64", *PAIRS, *settings)
    with chdir(tmp_path):
        model, tokenizer = load_run("a", checkpoint="last")
        last = metrics("a")[-1]
    nats: list[float] = []
    for i, row in enumerate(VAL_ROWS):
        nats += completion_losses(model, tokenizer, row, is_first=i == 0)
    num_bytes = sum(len(completion) for _, completion in VAL_ROWS)
    assert last["val/loss"] == pytest.approx(sum(nats) / len(nats), abs=1e-5)
    assert last["val/bpb"] == pytest.approx(sum(nats) / math.log(2) / num_bytes, abs=1e-5)


def test_evaluation_without_a_completion_is_refused(train, workdir, capsys):
    write_rows(workdir / "rows.jsonl", [("a long prompt " * 5, "x")] * 30)
    assert train("name=a", "eval.windows=1", *PAIRS) == 2
    assert "the 1 validation windows have only prompts" in capsys.readouterr().err


# Training


@pytest.fixture(scope="module")
def split(tmp_path_factory) -> Path:
    """Runs with 4 and 1 sequences in a micro batch: a4, a1 and frozen1."""
    folder = tmp_path_factory.mktemp("split")
    write_rows(folder / "rows.jsonl", ROWS)
    settings = ["eval.every=6", *PAIRS]
    for size in (4, 1):
        train_in(folder, f"name=a{size}", f"train.micro_batch_size={size}", *settings)
    train_in(folder, "name=frozen1", "train.micro_batch_size=1", *settings, *FROZEN)
    return folder


def test_training_loss_is_the_mean_over_all_targets_of_a_step(split, monkeypatch):
    monkeypatch.chdir(split)
    model, _ = load_run("frozen1", checkpoint="last")
    folder = Path(summary("frozen1")["data"]).absolute()
    seed = load("frozen1")["config"]["seed"]
    loader = Loader(PreparedData(folder, read_meta(folder), ""), 16, seed=seed)
    expected = []
    counts = set()
    for step in range(6):
        x, y, _ = loader.batch("train", 4 * step, 4)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=-100)
        expected.append(loss.item())
        counts |= set((y >= 0).sum(dim=1).tolist())
    assert len(counts) > 1, "sequences have different numbers of targets"
    losses = [row["train/loss"] for row in metrics("frozen1")[1:]]
    assert losses == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("key", ["train/loss", "grad_norm"])
def test_micro_batches_do_not_change_the_gradients(split, key):
    with chdir(split):
        together, divided = metrics("a4")[1:], metrics("a1")[1:]
    for a, b in zip(together, divided, strict=True):
        assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-5)


# Scoring with eval.py

SCORED: Rows = [("What is 4? ", "It is 16."), ("Ask? ", ""), ("Ask " * 40, "1"), ("", "1?")]


def test_scores_count_only_the_completions(tmp_path, monkeypatch):
    """Also after a prompt that is longer than the context."""
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "rows.jsonl", ROWS)
    write_rows(tmp_path / "scored.jsonl", SCORED)
    train_in(tmp_path, "name=a", "model.block_size=64", "tokenizer=byte", *PAIRS)
    words = ["run=a", "data.path=scored.jsonl", *COLUMNS, "out=o.jsonl"]
    assert run_command("eval", *words) == 0
    *results, _ = read_jsonl("o.jsonl")
    for key in ("tokens", "bytes"):
        assert [result[key] for result in results] == [9, 0, 1, 2]
    model, tokenizer = load_run("a")
    for index in (0, 3):
        losses = completion_losses(model, tokenizer, SCORED[index])[:-1]
        assert results[index]["loss"] == pytest.approx(sum(losses) / len(losses), abs=1e-5)
