"""Checkpoints: saving, resuming, refused checkpoints, and the progress of a run."""

import math

import pytest
import torch
from helpers import ADAMW, file_size_limit, tiny_model, train_step

from common.checkpoint_file import load_checkpoint, save_checkpoint
from common.errors import TrainingFailed, UserError
from common.run_dir import RunDir
from training.checkpoint import CheckpointWriter, TrainState
from training.config import CheckpointConfig, TrainConfig
from training.device import build_grad_scaler
from training.optimizer import build_optimizers

HEADER = {"vocab_size": 20, "identity": {}, "config": {"seed": 1}}


def limits(steps=None, minutes=None, patience=None) -> TrainConfig:
    return TrainConfig(steps=steps, minutes=minutes, patience=patience)


def make_state(model: torch.nn.Module, **counters) -> TrainState:
    scaler = build_grad_scaler(torch.device("cpu"), torch.float32)
    return TrainState(limits(steps=9), model, build_optimizers(model, ADAMW), scaler, **counters)


@pytest.fixture
def state():
    state = make_state(tiny_model(), step=1, seconds=2.5)
    train_step(state.model, state.optimizers)
    return state


@pytest.fixture
def checkpoints(workdir, state):
    with RunDir("a", "", True) as run:
        run.start({}, {})
        yield CheckpointWriter(CheckpointConfig(1, 0), run, state, HEADER, state.summary, state.step)


def test_checkpoint_restores_the_state_under_plain_names(state, checkpoints):
    checkpoints.save()
    path = checkpoints.run.last
    saved = load_checkpoint(path)
    assert (saved["step"], saved["seconds"], saved["vocab_size"]) == (1, 2.5, 20)
    assert set(saved["model"]) == set(state.model.state_dict())
    assert not any("_orig_mod" in name or "module." in name for name in saved["model"])
    fresh = make_state(tiny_model())
    fresh.resume(path, HEADER)
    assert (fresh.step, fresh.seconds) == (1, 2.5)
    assert train_step(fresh.model, fresh.optimizers, 1) == train_step(state.model, state.optimizers, 1)
    assert [file.name for file in path.parent.iterdir()] == ["last.pt"]


@pytest.mark.parametrize(
    ("step", "best_step", "files"), [(0, None, set()), (0, 0, {"best"}), (3, 3, {"best", "last"}), (3, 1, {"last"})]
)
def test_best_evaluation_is_saved_as_best_and_every_step_as_last(state, checkpoints, step, best_step, files):
    state.step, state.best_step = step, best_step
    checkpoints.save()
    assert {path.stem for path in checkpoints.run.last.parent.iterdir()} == files


@pytest.mark.parametrize("size", [5_000, 50_000])  # for the smaller one, torch raises a RuntimeError
def test_full_disk_leaves_the_previous_checkpoint_and_no_other_file(state, checkpoints, size):
    checkpoints.save()
    state.step = 2
    with pytest.raises(OSError, match=r"File too large: '.*last\.pt'"), file_size_limit(size):
        checkpoints.save()
    path = checkpoints.run.last
    assert load_checkpoint(path)["step"] == 1
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_do_not_replace_a_checkpoint(state, checkpoints, value):
    checkpoints.save()
    state.step = 2
    with torch.no_grad():
        next(state.model.parameters()).view(-1)[3] = value
    with pytest.raises(TrainingFailed, match=r"not finite after step 2.* Lower optimizer.lr"):
        checkpoints.save()
    assert load_checkpoint(checkpoints.run.last)["step"] == 1


def test_resuming_with_other_settings_lists_the_differences(state, tmp_path):
    path = tmp_path / "last.pt"
    identity = {"model.n_layer": 4, "data.name": "a", "same": 1}
    save_checkpoint(path, HEADER | state.state_dict() | {"identity": identity})
    with pytest.raises(UserError, match=r"model.n_layer=4 \(now 6\), data.name=a \(now b\); restore the old values"):
        state.resume(path, {"identity": identity | {"model.n_layer": 6, "data.name": "b"}})


def progress(config: TrainConfig, evals_since_best: int = 0, seconds: float = 30.0) -> float:
    return TrainState(config, None, [], None, 10, seconds, evals_since_best=evals_since_best).progress


def test_progress_is_the_larger_of_steps_and_time():
    assert progress(limits(steps=100)) == 0.1
    assert progress(limits(steps=100, minutes=1.0)) == 0.5
    assert progress(limits(minutes=1.0), seconds=90.0) == 1.0


def test_progress_is_complete_after_patience_evaluations_without_a_lower_loss():
    assert progress(limits(steps=100, patience=3), 2) == 0.1
    assert progress(limits(steps=100, patience=3), 3) == 1.0
    assert progress(limits(steps=100), 50) == 0.1
