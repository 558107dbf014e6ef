"""Finetuning: runs that start from the weights and the tokenizer of another run."""

from pathlib import Path

import pytest
import torch
from data_helpers import write_file
from helpers import TINY, load, metrics, run_command

FROM_A = [
    "train.init_from=run:a",
    "tokenizer=run",
    "tokenizer.run=a",
    "data.path=other.txt",
    "name=b",
]


@pytest.fixture
def other(workdir):
    """A document with fewer distinct characters than text.txt. Built from it, the vocabulary would be smaller."""
    (workdir / "other.txt").write_text("The 7th line says no more.\n" * 60, encoding="utf-8")


def test_finetuning_starts_from_the_best_weights_with_a_new_optimizer(train, other, sample, capsys):
    assert train("name=a", "train.steps=30") == 0
    assert train("name=a", "train.steps=33", "optimizer.lr=5", "optimizer.weight_decay=0") == 0
    assert load("a")["best_step"] < 33, "the last weights are not the best"
    assert train(*FROM_A) == 0
    assert "starting from run:a" in capsys.readouterr().out
    assert load("b")["tokenizer"] == load("a")["tokenizer"]
    assert load("b")["step"] == 6
    # With a tiny learning rate, the weights after one step are nearly the initial ones.
    before = load("a", "best")["model"]
    assert (
        train(*FROM_A[:-1], "name=c", "train.steps=1", "optimizer=adamw", "optimizer.lr=1e-12") == 0
    )
    after = load("c")["model"]
    assert all(torch.allclose(before[name], after[name], atol=1e-5) for name in before)
    assert metrics("c")[0]["val/loss"] < metrics("a")[0]["val/loss"] - 0.05  # of random weights
    assert sample("run=b", "prompt=The", "max_new_tokens=5").startswith("The")


def test_initial_weights_stay_the_best_if_training_makes_them_worse(trained, train, other, capsys):
    assert train(*FROM_A, "optimizer=adamw", "optimizer.lr=1", "schedule.warmup_steps=0") == 0
    losses = [row["val/loss"] for row in metrics("b") if "val/loss" in row]
    assert min(losses) == losses[0] < losses[-1]
    before, best = (load(name, "best")["model"] for name in "ab")
    assert all(torch.equal(before[name], best[name]) for name in before)
    out = capsys.readouterr().out
    assert "the best so far" not in out
    assert f"best validation loss {losses[0]:.4f}" in out
    assert f"at step 0; last {losses[-1]:.4f}" in out


def test_finetuning_resumes_without_the_initial_run_but_with_no_other(
    trained, train, other, workdir, capsys
):
    assert train(*FROM_A) == 0
    assert train("train.init_from=run:b", *FROM_A[1:], "train.steps=9") == 2
    assert "train.init_from=run:a (now run:b)" in capsys.readouterr().err
    (workdir / "runs/a").rename(workdir / "runs/z")
    assert train(*FROM_A, "train.steps=9") == 0
    assert [row["step"] for row in metrics("b")] == list(range(10))


UNSUITABLE = [
    (["tokenizer=byte", "data.path=other.txt"], "set tokenizer=run tokenizer.run=a"),
    ([*FROM_A[1:4], "model.n_layer=1"], "has another model than this run; set model.n_layer=2"),
    ([*FROM_A[1:4], "train.init_from=run:none"], "run=none has no checkpoint"),
    (["tokenizer=char"], "needs the tokenizer of these weights; set tokenizer=run tokenizer.run=a"),
    (["tokenizer=byte", "train.init_from=run:last"], "set the name of a run"),
    (["tokenizer=run", "tokenizer.run=last"], "set the name of a run"),
]


@pytest.mark.parametrize(("settings", "message"), UNSUITABLE)
def test_unsuitable_initial_weights_are_refused(trained, other, capsys, settings, message):
    assert run_command("train", *TINY, "train.init_from=run:a", "name=b", *settings) == 2
    assert message in capsys.readouterr().err
    assert not Path("runs/b").exists()


def test_rotary_models_can_start_with_a_longer_context(trained, train, other):
    assert train(*FROM_A, "model.block_size=32") == 0


@pytest.mark.parametrize("position", ["rotary", "learned"])
def test_advice_for_a_short_text_works(train, workdir, capsys, position):
    model = f"model.position={position}"
    assert train("name=a", model) == 0
    (workdir / "other.txt").write_text("The 7th line", encoding="utf-8")
    assert train(*FROM_A, model) == 2
    advice = capsys.readouterr().err.partition("; ")[2]
    assert advice == "set model.block_size=9, or use a longer text\n"
    assert train(*FROM_A, model, "model.block_size=9") == 0
    before, after = (load(name, "best")["model"] for name in "ab")
    assert {name for name in before if before[name].shape != after[name].shape} <= {"wpe.weight"}


def test_mix_trains_and_a_changed_weight_is_refused(workdir, capsys):
    sources = "mix: {one: {path: text.txt, weight: 3}, two: {path: other.txt}}\n"
    defaults = "defaults: [mix, text@mix.one, text@mix.two, _self_]\nname: both\n"
    write_file("own/data/both.yaml", defaults + sources)
    write_file("other.txt", "Something else entirely.\n" * 60)
    words = ["--config-dir", "own", *TINY[:-2], "data=both", "name=m"]
    assert run_command("train", *words) == 0
    assert "both" in capsys.readouterr().out
    assert run_command("train", *words, "data.mix.two.pth=x") == 2
    assert "data.mix.two.pth: there is no such key" in capsys.readouterr().err
    assert run_command("train", *words, "data.mix.two.weight=2", "train.steps=9") == 2
    assert "data.mix.two.weight=1.0 (now 2.0)" in capsys.readouterr().err
