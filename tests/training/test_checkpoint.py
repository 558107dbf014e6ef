"""Checkpoints: which files are saved, failures while saving, and the progress of a run."""

import math

import pytest
import torch
from helpers import ADAMW, tiny_model, train_step

from common.errors import TrainingFailed
from common.run_dir import RunDir
from model.checkpoint_file import load_checkpoint
from training.checkpoint import CheckpointWriter, TrainState
from training.config import CheckpointConfig, TrainConfig
from training.device import build_grad_scaler
from training.optimizer import build_optimizers

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
    with RunDir("a", "", True) as run:
        run.start({}, {})
        yield CheckpointWriter(CheckpointConfig(1, 0), run, state, HEADER, state.summary, state.step)


@pytest.mark.parametrize(
    ("step", "best_step", "files"), [(0, None, set()), (0, 0, {"best"}), (3, 3, {"best", "last"}), (3, 1, {"last"})]
)
def test_best_evaluation_is_saved_as_best_and_every_step_as_last(state, checkpoints, step, best_step, files):
    state.step, state.best_step = step, best_step
    checkpoints.save()
    assert {path.stem for path in checkpoints.run.last.parent.iterdir()} == files


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_do_not_replace_a_checkpoint(state, checkpoints, value):
    checkpoints.save()
    state.step = 2
    with torch.no_grad():
        next(state.model.parameters()).view(-1)[3] = value
    with pytest.raises(TrainingFailed, match=r"not finite after step 2.* Lower optimizer.lr"):
        checkpoints.save()
    assert load_checkpoint(checkpoints.run.last)["step"] == 1


def test_progress_is_the_larger_of_steps_and_time():
    def progress(steps, minutes, seconds) -> float:
        return TrainState(TrainConfig(steps=steps, minutes=minutes), None, [], None, 10, seconds).progress

    assert progress(100, None, 30.0) == 0.1
    assert progress(100, 1.0, 30.0) == 0.5
    assert progress(None, 1.0, 90.0) == 1.0
