"""Checkpoints: which files are saved, failures while saving, older checkpoints, and the progress of a run."""

import json
import math
import shutil

import pytest
import torch
from helpers import ADAMW, tiny_model, train_step

from common.checkpoint_file import load_checkpoint, save_checkpoint
from common.errors import TrainingFailed
from training import checkpoint
from training.checkpoint import CheckpointWriter, load_last_checkpoint
from training.config import CheckpointConfig, TrainConfig
from training.device import build_grad_scaler
from training.distributed import Dist
from training.optimizer import build_optimizers
from training.run_folder import RunFolder
from training.train_state import TrainState

HEADER = {"vocab_size": 20, "identity": {}, "config": {"seed": 1}}


@pytest.fixture
def state():
    model = tiny_model()
    optimizers = build_optimizers(model, ADAMW)
    train_step(model, optimizers)
    scaler = build_grad_scaler(torch.device("cpu"), torch.float32)
    return TrainState(TrainConfig(steps=9), model, optimizers, scaler, step=1)


@pytest.fixture
def checkpoints(workdir, state):
    with RunFolder("a", "", True, Dist()) as run:
        run.start({}, {})
        yield CheckpointWriter(CheckpointConfig(1, 0), run, state, HEADER)


@pytest.mark.parametrize(
    ("step", "best_step", "files"),
    [(0, None, set()), (0, 0, {"best"}), (3, 3, {"best", "last"}), (3, 1, {"last"})],
)
def test_best_evaluation_is_saved_as_best_and_every_step_as_last(
    state, checkpoints, step, best_step, files
):
    state.step, state.best_step = step, best_step
    checkpoints.save(state.summary())
    assert {path.stem for path in checkpoints.run.last.parent.iterdir()} == files


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_do_not_replace_a_checkpoint(state, checkpoints, value):
    checkpoints.save(state.summary())
    state.step = 2
    with torch.no_grad():
        next(state.model.parameters()).view(-1)[3] = value
    with pytest.raises(TrainingFailed, match=r"not finite after step 2.* Lower optimizer.lr"):
        checkpoints.save(state.summary())
    assert load_checkpoint(checkpoints.run.last)["step"] == 1


def save_evaluations(state, checkpoints, losses: dict[int, float]) -> None:
    """Save the checkpoints of steps with these validation losses."""
    for state.step, loss in losses.items():
        state.record_evaluation(loss, loss)
        checkpoints.save(state.summary())


def return_to(step: int, state) -> None:
    """Copy an older checkpoint over last.pt, resume from it, and start the run as train.py does."""
    with RunFolder("a", "", True, Dist()) as run:
        if step:
            shutil.copy(run.last.with_name(f"step-{step:06d}.pt"), run.last)
        load_last_checkpoint(run, state, HEADER, Dist())
        CheckpointWriter(CheckpointConfig(), run, state, HEADER).remove_later_steps()
        run.start({}, state.summary())


def save_only_best(path, content) -> None:
    """Save best.pt, and crash before last.pt."""
    assert path.stem == "best" or 1 / 0
    save_checkpoint(path, content)


def read_best(run: RunFolder) -> tuple:
    """Step and loss of the best evaluation in best.pt and in summary.json, which must agree."""
    saved, recorded = (
        load_checkpoint(run.best),
        json.loads((run.folder / "summary.json").read_text(encoding="utf-8")),
    )
    assert (
        saved["optimizer"] is None and saved["step"] == saved["best_step"] == recorded["best_step"]
    )
    assert saved["best_val_loss"] == recorded["best_val_loss"]
    return saved["step"], saved["best_val_loss"]


@pytest.fixture
def older(state, checkpoints):
    """A run whose older checkpoints are of step 1, and of step 2 without a lower loss."""
    checkpoints.config = CheckpointConfig(1, 9)
    save_evaluations(state, checkpoints, {1: 5.0, 2: 6.0, 3: 4.0})
    checkpoints.run.lock.release()
    return checkpoints


def test_return_to_the_best_of_the_older_checkpoints_writes_best_again(state, older):
    return_to(1, state)
    assert read_best(older.run) == (1, 5.0)
    assert state.evals_since_best == 0


def test_return_removes_checkpoints_and_pictures_of_later_steps_only(state, older):
    pictures = older.run.folder / "attention"
    pictures.mkdir()
    for step in (1, 2, 10):
        (pictures / f"step-{step:06d}.png").touch()
    return_to(1, state)
    assert [path.name for path in older.run.folder.rglob("step-*.pt")] == ["step-000001.pt"]
    assert [path.name for path in pictures.iterdir()] == ["step-000001.png"]


def test_return_to_a_checkpoint_whose_best_is_overwritten_forgets_the_best_evaluation(state, older):
    return_to(2, state)
    assert not older.run.best.exists()
    assert (state.best_step, state.best_val_loss, state.evals_since_best) == (None, math.inf, 0)
    save_evaluations(state, older, {3: 7.0})
    assert read_best(older.run) == (3, 7.0)


def test_checkpoint_of_the_best_evaluation_is_not_touched_by_a_return_to_a_later_step(state, older):
    save_evaluations(state, older, {4: 8.0, 5: 2.0, 6: 9.0, 7: 9.0})
    content = older.run.best.read_bytes()
    return_to(6, state)
    assert (state.best_step, state.evals_since_best) == (5, 1)
    assert older.run.best.read_bytes() == content


def test_best_of_a_run_that_was_killed_before_last_was_written_is_not_touched(
    state, older, monkeypatch
):
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(checkpoint, "save_checkpoint", save_only_best)
        save_evaluations(state, older, {4: 3.0})
    return_to(0, state)
    assert (state.step, state.best_step) == (3, 3)
    assert load_checkpoint(older.run.best)["step"] == 4


@pytest.mark.parametrize(
    ("step", "target", "best"),
    [
        (1, "training.checkpoint.save_checkpoint", (1, 5.0)),
        (1, "training.run_folder.RunFolder.start", (1, 5.0)),
        (2, "training.run_folder.RunFolder.start", (3, 7.0)),
    ],
)
def test_return_to_an_older_checkpoint_can_be_killed(state, older, monkeypatch, step, target, best):
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(target, lambda *args: 1 / 0)
        return_to(step, state)
    return_to(0, state)
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(checkpoint, "save_checkpoint", save_only_best)
        save_evaluations(state, older, {3: 7.0})
    return_to(0, state)
    save_evaluations(state, older, {3: 7.0})
    assert read_best(older.run) == best


def test_run_without_a_summary_keeps_its_best_evaluation(state, older):
    save_evaluations(state, older, {4: 8.0})
    (older.run.folder / "summary.json").unlink()
    return_to(0, state)
    assert read_best(older.run) == (3, 4.0)


@pytest.mark.parametrize(
    ("config", "ended_by"),
    [(TrainConfig(steps=9), ["train.steps"]), (TrainConfig(steps=None, minutes=1), ["train.minutes"]),
     (TrainConfig(steps=99, patience=2), ["train.patience"]),
     (TrainConfig(steps=9, minutes=1, patience=3), ["train.steps", "train.minutes"])],
)  # fmt: skip
def test_setting_that_has_ended_a_run_is_known(config, ended_by):
    state = TrainState(config, None, [], None, step=9, seconds=60.0, evals_since_best=2)
    assert [key for key, used in state.limits.items() if used >= 1] == ended_by


def test_progress_is_the_larger_of_steps_and_time():
    def progress(steps, minutes, seconds) -> float:
        return TrainState(
            TrainConfig(steps=steps, minutes=minutes), None, [], None, 10, seconds
        ).progress

    assert progress(100, None, 30.0) == 0.1
    assert progress(100, 1.0, 30.0) == 0.5
    assert progress(None, 1.0, 90.0) == 1.0
