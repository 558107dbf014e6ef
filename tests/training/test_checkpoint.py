"""Checkpoints: saving, resuming, and refused checkpoints."""

import math
from pathlib import Path

import pytest
import torch
from helpers import ADAMW, file_size_limit, tiny_model, train_step

from common.checkpoint_file import load_checkpoint
from common.errors import TrainingFailed, UserError
from training.checkpoint import TrainState, check_identity, write_checkpoint
from training.device import build_grad_scaler
from training.optimizer import build_optimizers

CPU = torch.device("cpu")


@pytest.fixture
def state():
    model = tiny_model()
    optimizers = build_optimizers(model, ADAMW)
    train_step(model, optimizers)
    return TrainState(model, optimizers, build_grad_scaler(CPU, torch.float32), step=1, seconds=2.5)


def save(state: TrainState, path: Path, metadata: dict) -> None:
    write_checkpoint(path, metadata | state.values() | state.tensors())


def test_checkpoint_restores_the_state_under_plain_names(state, tmp_path):
    path = tmp_path / "checkpoints/last.pt"
    path.parent.mkdir()
    save(state, path, {"vocab_size": 20, "identity": {}, "config": {"seed": 1}})
    saved = load_checkpoint(path)
    assert (saved["step"], saved["seconds"], saved["vocab_size"]) == (1, 2.5, 20)
    assert set(saved["model"]) == set(state.model.state_dict())
    assert not any("_orig_mod" in name or "module." in name for name in saved["model"])
    fresh = TrainState(tiny_model(), build_optimizers(tiny_model(), ADAMW), state.scaler)
    fresh.optimizers = build_optimizers(fresh.model, ADAMW)
    fresh.resume(path, {"identity": {}})
    assert train_step(fresh.model, fresh.optimizers, 1) == train_step(state.model, state.optimizers, 1)
    assert [file.name for file in path.parent.iterdir()] == ["last.pt"]


@pytest.mark.parametrize("size", [5_000, 50_000])  # for the smaller one, torch raises a RuntimeError
def test_full_disk_leaves_the_previous_checkpoint_and_no_other_file(state, tmp_path, size):
    path = tmp_path / "last.pt"
    save(state, path, {})
    state.step = 2
    with pytest.raises(OSError, match=r"File too large: '.*last\.pt'"), file_size_limit(size):
        save(state, path, {})
    assert load_checkpoint(path)["step"] == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_do_not_replace_a_checkpoint(state, tmp_path, value):
    path = tmp_path / "last.pt"
    save(state, path, {})
    state.step = 2
    with torch.no_grad():
        next(state.model.parameters()).view(-1)[3] = value
    with pytest.raises(TrainingFailed, match="the weights are not finite after step 2"):
        save(state, path, {})
    assert load_checkpoint(path)["step"] == 1


def test_resuming_with_other_settings_lists_the_differences(tmp_path):
    with pytest.raises(UserError, match=r"model.n_layer=4 \(now 6\), data.name=a \(now b\); restore the old values"):
        check_identity(
            tmp_path,
            {"model.n_layer": 4, "data.name": "a", "same": 1},
            {"model.n_layer": 6, "data.name": "b", "same": 1},
        )


def test_checkpoint_without_optimizer_state_is_refused_when_resuming(state, tmp_path):
    path = tmp_path / "last.pt"
    write_checkpoint(path, {"identity": {}, "config": {"seed": 1}, "optimizer": None, "model": {}} | state.values())
    with pytest.raises(UserError, match=r"last.pt has no optimizer state, .* checkpoint.optimizer=false"):
        state.resume(path, {"identity": {}})
