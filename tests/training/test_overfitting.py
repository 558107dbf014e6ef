"""Runs that overfit: the best checkpoint, the advised number of epochs, and train.patience."""

import re

import pytest
from helpers import TEXT, load, summary, train_here
from run_helpers import train_in, val_losses

# A high learning rate on 300 characters: the model memorizes them within some steps.
OVERFIT = [
    "name=a",
    "data.path=short.txt",
    "train.steps=60",
    "eval.every=5",
    "eval.windows=null",
    "eval.sample.max_new_tokens=0",
    "optimizer.ngram_weight_decay=0",
    "optimizer.weight_decay=0",
    "optimizer.lr=0.05",
    "schedule=wsd",
]


def overfit(folder, *words: str) -> str:
    """Train the run a. Returns what it prints."""
    text = TEXT[:270] + "0123456789 is quite another text: HERE."
    (folder / "short.txt").write_text(text, encoding="utf-8")
    return train_in(folder, *OVERFIT, *words)


def best_step() -> int:
    losses = val_losses("a")
    del losses[0]  # of random weights
    return min(losses, key=losses.__getitem__)


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overfitted")
    return folder, overfit(folder)


@pytest.fixture
def printed(overfitted, monkeypatch) -> str:
    """The output of a run that overfits. The current folder has the run."""
    folder, output = overfitted
    monkeypatch.chdir(folder)
    assert best_step() < 60 - 3 * 5, val_losses("a")
    return output


def test_advised_epochs_end_a_run_at_the_best_step(printed, overfitted):
    [epochs] = re.findall(r"start another run with (train\.epochs=[\d.]+)", printed)
    train_in(overfitted[0], *OVERFIT, "name=b", epochs)
    assert summary("b")["step"] == pytest.approx(best_step(), abs=1)  # of rounded epochs


def test_summary_and_best_checkpoint_are_of_the_best_evaluation(printed):
    recorded = summary("a")
    assert recorded["overfitting"]
    assert recorded["best_step"] == load("a", "best")["step"] == best_step()
    assert recorded["best_val_loss"] == val_losses("a")[best_step()]


def test_patience_ends_a_run_which_a_larger_patience_continues(workdir, capsys):
    overfit(workdir, "train.patience=2")
    assert (summary("a")["status"], summary("a")["step"]) == ("finished", best_step() + 2 * 5)
    assert train_here(*OVERFIT, "train.patience=2") == 0
    assert "set a larger train.patience, or another name" in capsys.readouterr().out
    assert train_here(*OVERFIT, "train.patience=3") == 0
    assert summary("a")["step"] == best_step() + 3 * 5
