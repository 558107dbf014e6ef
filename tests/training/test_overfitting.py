"""Overfitting: the message, the summary, train.patience, and the best checkpoint."""

from pathlib import Path

import pytest
from helpers import load, metrics, summary

# A high learning rate on 300 characters: the model memorizes them within some steps.
OVERFIT = [
    "data.path=short.txt",
    "eval.every=5",
    "eval.windows=null",
    "eval.sample.max_new_tokens=0",
]
OVERFIT += [
    "optimizer.ngram_weight_decay=0",
    "optimizer.weight_decay=0",
    "optimizer.lr=0.05",
    "schedule=wsd",
]


@pytest.fixture
def short_text(workdir) -> None:
    text = (workdir / "text.txt").read_text(encoding="utf-8")
    (workdir / "short.txt").write_text(
        text[:270] + "0123456789 is quite another text: HERE.", encoding="utf-8"
    )


def losses(name: str) -> dict[int, float]:
    return {
        row["step"]: row["val/loss"]
        for row in metrics(name)
        if "val/loss" in row and row["step"] > 0
    }


def test_overfitting_is_reported_once_and_recorded(short_text, train, capsys):
    assert train("name=a", *OVERFIT, "train.steps=60") == 0
    out, recorded = capsys.readouterr().out, losses("a")
    best_step = min(recorded, key=recorded.__getitem__)
    assert best_step < 60 - 3 * 5, recorded
    assert (
        out.count(f"overfitting: the validation loss has not fallen since step {best_step};") == 1
    )
    advice = "or a larger optimizer.weight_decay and optimizer.ngram_weight_decay"
    assert f"start another run with train.steps={best_step}, {advice}" in out
    assert summary("a")["overfitting"]
    assert summary("a")["best_step"] == best_step
    assert summary("a")["best_val_loss"] == recorded[best_step]
    assert f"best validation loss {recorded[best_step]:.4f}" in out
    assert load("a", "best")["step"] == best_step


def test_patience_ends_the_run_and_a_larger_one_resumes_it(short_text, train, capsys):
    assert train("name=a", *OVERFIT, "train.steps=60", "train.patience=2") == 0
    recorded = losses("a")
    best_step = min(recorded, key=recorded.__getitem__)
    assert summary("a")["status"] == "finished" and not summary("a")["overfitting"]
    assert summary("a")["step"] == max(recorded) == best_step + 2 * 5
    assert "train.patience=2 evaluations without a lower loss" in capsys.readouterr().out
    assert (Path("runs/a") / "loss.png").exists()

    assert train("name=a", *OVERFIT, "train.steps=60", "train.patience=2") == 0
    advice = "set a larger train.patience, or another name"
    assert f"runs/a is finished at step {max(recorded)}; {advice}" in capsys.readouterr().out
    assert train("name=a", *OVERFIT, "train.steps=60", "train.patience=3") == 0
    assert summary("a")["step"] == best_step + 3 * 5 and summary("a")["overfitting"]
