"""Overfitting: the message, the summary, train.patience, and the best checkpoint."""

import re
import shutil

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
def overfitted_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overfitted")
    return folder, overfit(folder)


@pytest.fixture
def printed(overfitted_folder, monkeypatch) -> str:
    """The output of a run that overfits. The current folder has the run."""
    folder, output = overfitted_folder
    monkeypatch.chdir(folder)
    assert best_step() < 60 - 3 * 5, val_losses("a")
    return output


def test_overfitting_is_reported_once(printed):
    message = f"overfitting: the validation loss has not fallen since step {best_step()};"
    assert printed.count(message) == 1


def test_advice_against_overfitting_is_to_decay_the_weights_more(printed):
    assert "or a larger optimizer.weight_decay and optimizer.ngram_weight_decay" in printed


def test_advised_epochs_end_a_run_at_the_best_step(printed, overfitted_folder):
    folder, _ = overfitted_folder
    [epochs] = re.findall(r"start another run with (train\.epochs=[\d.]+)", printed)
    train_in(folder, *OVERFIT, "name=b", epochs)
    assert summary("b")["step"] == pytest.approx(best_step(), abs=1)  # of rounded epochs


def test_summary_records_overfitting(printed):
    assert summary("a")["overfitting"]


def test_summary_has_the_best_evaluation(printed):
    step = best_step()
    recorded = summary("a")
    assert recorded["best_step"] == step
    assert recorded["best_val_loss"] == val_losses("a")[step]


def test_last_lines_have_the_best_evaluation(printed):
    step = best_step()
    assert f"best validation loss {val_losses('a')[step]:.4f}" in printed
    assert f"at step {step}; last {val_losses('a')[60]:.4f}" in printed


def test_best_checkpoint_is_of_the_best_evaluation(printed):
    assert load("a", "best")["step"] == best_step()


@pytest.fixture(scope="module")
def impatient_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("impatient")
    return folder, overfit(folder, "train.patience=2")


@pytest.fixture
def impatient(impatient_folder, workdir) -> str:
    """The output of a run that train.patience=2 has ended. The current folder has a copy."""
    folder, output = impatient_folder
    shutil.copytree(folder, workdir, dirs_exist_ok=True)
    return output


def test_patience_ends_the_run(impatient):
    assert summary("a")["status"] == "finished"
    assert summary("a")["step"] == best_step() + 2 * 5


def test_run_says_that_patience_has_ended_it(impatient):
    assert "train.patience=2 evaluations without a lower loss" in impatient


def test_run_that_patience_has_ended_is_finished(impatient, capsys):
    assert train_here(*OVERFIT, "train.patience=2") == 0
    step = summary("a")["step"]
    message = f"runs/a is finished at step {step}; set a larger train.patience, or another name"
    assert message in capsys.readouterr().out


def test_larger_patience_continues_the_run(impatient):
    assert train_here(*OVERFIT, "train.patience=3") == 0
    assert summary("a")["step"] == best_step() + 3 * 5
