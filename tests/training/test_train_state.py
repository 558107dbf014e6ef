"""The state of a run: progress, the best evaluation, and what a checkpoint restores."""

import math
from copy import deepcopy

import pytest
import torch
from helpers import ADAMW, tiny_model, train_step

from training.config import OVERFITTING_EVALS, TrainConfig
from training.optimizer import build_optimizers
from training.runtime import Dist
from training.schedule import ScheduleConfig
from training.train_state import TrainState


def make_state(config: TrainConfig | None = None, **fields) -> TrainState:
    """A state without a model."""
    return TrainState(config or TrainConfig(steps=9), ScheduleConfig(), None, [], None, **fields)


@pytest.mark.parametrize(
    ("steps", "minutes", "seconds", "expected"),
    [
        (100, None, 30.0, 0.1),
        (100, 1.0, 30.0, 0.5),
        (None, 1.0, 30.0, 0.5),
        (None, 1.0, 90.0, 1.0),
    ],
    ids=["steps", "the larger of both", "time", "more than the time"],
)
def test_progress_is_the_used_part_of_steps_or_time(steps, minutes, seconds, expected):
    config = TrainConfig(steps=steps, minutes=minutes)
    assert make_state(config, step=10, seconds=seconds).progress == expected


@pytest.mark.parametrize(("step", "expected"), [(10, 0.5), (19, 0.95), (20, 1.0), (21, 1.0)])
def test_progress_is_the_used_part_of_epochs(step, expected):
    config = TrainConfig(steps=None, epochs=2.5)
    assert make_state(config, step=step, steps_per_epoch=8).progress == expected


@pytest.mark.parametrize(("evals_since_best", "expected"), [(1, 0.5), (2, 1.0), (3, 1.0)])
def test_patience_ends_a_run(evals_since_best, expected):
    config = TrainConfig(steps=20, patience=2)
    state = make_state(config, step=10, evals_since_best=evals_since_best)
    assert state.progress == expected


@pytest.mark.parametrize(
    "limits",
    [{"steps": 20}, {"steps": 40, "epochs": 2.5}, {"epochs": 2.5}, {"minutes": 1}],
    ids=["steps", "steps and epochs", "epochs", "minutes"],
)
def test_learning_rate_falls_evenly_from_the_end_of_the_warmup(limits, clock):
    """The first step takes 31.5 seconds, as with compilation, and the others take 1.5 seconds."""
    config = TrainConfig(**{"steps": None} | limits)
    state = make_state(config, steps_per_epoch=8)
    state.start_clock()
    rates = []
    while not state.is_done:
        rates.append(state.lr_scale)
        clock[0] += 31.5 if state.step == 0 else 1.5
        state.count_step(Dist(), signal_received=False)
    falling = [1 - i / 10 for i in range(10)]
    assert rates == pytest.approx([(i + 1) / 11 for i in range(10)] + falling)


@pytest.mark.parametrize(
    ("step", "stopped", "expected"),
    [(8, False, False), (9, False, True), (8, True, True)],
    ids=["steps are left", "no step is left", "a signal"],
)
def test_loop_ends_after_the_last_step_or_a_signal(step, stopped, expected):
    assert make_state(step=step, stopped=stopped).is_done is expected


@pytest.mark.parametrize(
    ("step", "unlogged", "expected"),
    [(0, {}, -1), (0, {"lr": 1}, -1), (3, {}, 3), (3, {"lr": 1}, 2)],
    ids=["start", "stopped at the start", "complete row", "stopped evaluation"],
)
def test_row_without_its_evaluation_is_not_logged(step, unlogged, expected):
    """The row of step 0 is written again, because no checkpoint has it."""
    assert make_state(step=step, unlogged=unlogged).last_logged_step == expected


def test_seconds_continue_from_those_of_earlier_processes(clock):
    state = make_state(step=3, seconds=40.0)
    state.start_clock()
    clock[0] += 5
    state.count_step(Dist(), signal_received=False)
    assert (state.step, state.seconds) == (4, 45.0)


@pytest.mark.parametrize("signal_received", [True, False])
def test_signal_stops_the_run_after_its_step(clock, signal_received):
    state = make_state()
    state.count_step(Dist(), signal_received)
    assert state.stopped is signal_received


def test_lower_loss_is_the_best_evaluation():
    state = make_state(step=3, best_val_loss=5.0, evals_since_best=5)
    state.record_evaluation(2.0, 3.0)
    assert (state.best_step, state.best_val_loss, state.best_val_bpb) == (3, 2.0, 3.0)
    assert state.is_best
    assert state.evals_since_best == 0


@pytest.mark.parametrize("loss", [2.0, 2.5, math.nan], ids=["equal", "higher", "nan"])
def test_loss_that_is_not_lower_is_not_the_best_evaluation(loss):
    state = make_state(step=3)
    state.record_evaluation(2.0, 3.0)
    state.step = 6
    state.record_evaluation(loss, 1.0)
    assert (state.best_step, state.best_val_loss, state.best_val_bpb) == (3, 2.0, 3.0)
    assert state.evals_since_best == 1
    assert not state.is_best


@pytest.mark.parametrize(
    ("evals_since_best", "expected"),
    [(OVERFITTING_EVALS - 1, False), (OVERFITTING_EVALS, True)],
)
def test_summary_records_overfitting(evals_since_best, expected):
    state = make_state(evals_since_best=evals_since_best)
    assert state.summary()["overfitting"] is expected


# Checkpoints


@pytest.fixture
def trained_state() -> TrainState:
    state = new_state()
    train_step(state.model, state.optimizers)
    state.step = 4
    state.seconds = 7.0
    state.warmup_seconds = 5.0
    state.best_val_loss = 2.0
    state.best_val_bpb = 3.0
    state.best_step = 3
    state.evals_since_best = 1
    state.unlogged = {"lr": 0.1}
    return state


def new_state() -> TrainState:
    model = tiny_model()
    with torch.no_grad():
        model.wte.weight.add_(1.0)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return TrainState(
        TrainConfig(steps=9), ScheduleConfig(), model, build_optimizers(model, ADAMW), scaler
    )


@pytest.fixture
def saved(trained_state) -> dict:
    """What a checkpoint file has."""
    return deepcopy(trained_state.state_dict())


def test_checkpoint_restores_the_fields_of_a_state(trained_state, saved):
    restored = new_state()
    restored.load_state_dict(saved)
    assert restored.summary() == trained_state.summary()
    assert (restored.seconds, restored.warmup_seconds) == (7.0, 5.0)
    assert restored.evals_since_best == 1
    assert restored.unlogged == {"lr": 0.1}


def test_checkpoint_of_an_earlier_version_has_no_time_of_the_warmup(saved):
    del saved["warmup_seconds"]
    restored = new_state()
    restored.load_state_dict(saved)
    assert (restored.step, restored.warmup_seconds) == (4, 0.0)


def test_checkpoint_restores_weights_and_optimizer_state(trained_state, saved):
    """The next step is bit-identical."""
    restored = new_state()
    restored.load_state_dict(saved)
    weights = []
    for state in (trained_state, restored):
        train_step(state.model, state.optimizers, seed=1)
        weights.append(state.model.state_dict())
    torch.testing.assert_close(*weights, atol=0, rtol=0)


def test_checkpoint_restores_the_loss_scale_of_float16(trained_state):
    trained_state.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    trained_state.scaler.scale(torch.zeros(()))  # the first call creates the scale
    restored = new_state()
    restored.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    restored.load_state_dict(trained_state.state_dict())
    assert restored.scaler.get_scale() == 8.0


def test_names_of_weights_in_a_checkpoint_are_those_of_the_model(trained_state, saved):
    assert list(saved["model"]) == list(trained_state.model.state_dict())
    names = {name for name, _ in trained_state.model.named_parameters()}
    assert set(saved["optimizer"]) == names
