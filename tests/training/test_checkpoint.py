"""Checkpoints: which files are saved, the identity of a run, failures, and older checkpoints."""

import json
import math
import os
import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from helpers import ADAMW, tiny_model, train_step

from common.checkpoint_file import load_checkpoint, save_checkpoint
from common.errors import TrainingFailed, UserError
from data import DataConfig
from training import checkpoint
from training.checkpoint import (
    CheckpointWriter,
    check_identity,
    find_step_files,
    load_last_checkpoint,
    make_checkpoint_header,
)
from training.config import CheckpointConfig, RunConfig, TrainConfig
from training.optimizer import build_optimizers
from training.run_folder import RunFolder
from training.runtime import Dist, build_grad_scaler
from training.train_state import TrainState

HEADER = {"vocab_size": 20, "model_config": {}, "identity": {}, "config": {"seed": 1}}


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
        yield CheckpointWriter(CheckpointConfig(every=1, keep=0), run, state, HEADER)


def list_checkpoints(run: RunFolder) -> set[str]:
    return {path.stem for path in run.last.parent.iterdir()}


@pytest.mark.parametrize(
    ("step", "best_step", "files"),
    [(0, None, set()), (0, 0, {"best"}), (3, 3, {"best", "last"}), (3, 1, {"last"})],
    ids=["initial weights", "best initial weights", "best step", "other step"],
)
def test_best_evaluation_is_saved_as_best_and_every_step_as_last(
    state, checkpoints, step, best_step, files
):
    state.step = step
    state.best_step = best_step
    checkpoints.save({})
    assert list_checkpoints(checkpoints.run) == files


@pytest.mark.parametrize(
    ("step", "best_step", "stopped", "expected"),
    [
        (4, None, False, True),
        (5, None, False, False),
        (5, 5, False, True),
        (9, None, False, True),
        (5, None, True, True),
    ],
    ids=["every two steps", "between", "best", "last step", "signal"],
)
def test_checkpoint_is_due(state, checkpoints, step, best_step, stopped, expected):
    checkpoints.config = CheckpointConfig(every=2)
    state.step = step
    state.best_step = best_step
    state.stopped = stopped
    assert checkpoints.is_due() is expected


def test_results_are_in_the_summary_after_the_files(state, checkpoints, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(checkpoint, "save_checkpoint", crash)
        checkpoints.save({"step": 1})
    assert "step" not in checkpoints.run.summary
    checkpoints.save({"step": 1})
    assert checkpoints.run.summary["step"] == 1


def crash(*args):
    raise ZeroDivisionError


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_weights_that_are_not_finite_do_not_replace_a_checkpoint(state, checkpoints, value):
    checkpoints.save({})
    state.step = 2
    with torch.no_grad():
        next(state.model.parameters()).view(-1)[3] = value
    with pytest.raises(TrainingFailed, match=r"not finite after step 2.* Lower optimizer.lr"):
        checkpoints.save({})
    assert load_checkpoint(checkpoints.run.last)["step"] == 1


def save_steps(state, checkpoints, *steps: int) -> None:
    for state.step in steps:
        checkpoints.save({})


def test_keep_leaves_the_newest_checkpoints_before_last(state, checkpoints):
    checkpoints.config = CheckpointConfig(every=2, keep=2)
    save_steps(state, checkpoints, 2, 4, 6, 8)
    run = checkpoints.run
    assert list_checkpoints(run) == {"last", "step-000004", "step-000006"}
    steps = [load_checkpoint(path)["step"] for path in sorted(run.last.parent.iterdir())]
    assert steps == [8, 4, 6]


def test_newest_checkpoint_is_the_one_with_the_largest_step(state, checkpoints):
    """Its time can be wrong, because the clock was set back."""
    checkpoints.config = CheckpointConfig(every=2, keep=2)
    save_steps(state, checkpoints, 2, 4, 6)
    os.utime(checkpoints.run.last.with_name("step-000002.pt"), (2e9, 2e9))
    save_steps(state, checkpoints, 8)
    assert list_checkpoints(checkpoints.run) == {"last", "step-000004", "step-000006"}


def test_keep_needs_no_hard_links(state, checkpoints, monkeypatch):
    monkeypatch.delattr("os.link")
    checkpoints.config = CheckpointConfig(every=2, keep=1)
    save_steps(state, checkpoints, 2, 4)
    assert list_checkpoints(checkpoints.run) == {"last", "step-000002"}


def test_repeated_save_of_a_step_keeps_the_step_before_it(state, checkpoints):
    """After a resume that had only to repeat an evaluation."""
    checkpoints.config = CheckpointConfig(every=2, keep=1)
    save_steps(state, checkpoints, 2, 4, 4)
    assert list_checkpoints(checkpoints.run) == {"last", "step-000002"}


def test_files_of_steps_are_found_and_others_ignored(tmp_path):
    for name in ("step-000007.pt", "step-12.pt", "step-9-mine.pt", "best.pt"):
        (tmp_path / name).touch()
    files = {7: tmp_path / "step-000007.pt", 12: tmp_path / "step-12.pt"}
    assert find_step_files(tmp_path, "step-*.pt") == files


# The identity of a run

META = {"name": "novel", "fingerprint": "f1", "vocab_size": 20, "tokenizer": {}}
CONFIG = RunConfig(data=DataConfig(path="text.txt"))


def change(key: str, value) -> RunConfig:
    """CONFIG with another value of a key, such as model.n_layer."""
    config = deepcopy(CONFIG)
    *sections, name = key.split(".")
    section = config
    for part in sections:
        section = getattr(section, part)
    setattr(section, name, value)
    return config


def check_change(config: RunConfig, meta: dict = META) -> None:
    """Resume a run of CONFIG and META with these."""
    saved = make_checkpoint_header(CONFIG, META)
    check_identity(Path("runs/a"), saved, make_checkpoint_header(config, meta))


@pytest.mark.parametrize(
    ("key", "value", "difference"),
    [
        ("model.n_layer", 9, r"model.n_layer=2 \(now 9\)"),
        ("data.document_mask", True, r"data.document_mask=false \(now true\)"),
        ("tokenizer.name", "byte", r"tokenizer.name=bpe \(now byte\)"),
        ("seed", 2, r"seed=1337 \(now 2\)"),
        ("train.init_from", "gpt2", r"train.init_from=null \(now gpt2\)"),
        ("train.batch_size", 3, r"train.batch_size=16 \(now 3\)"),
        ("optimizer.name", "adamw", r"optimizer.name=muon \(now adamw\)"),
    ],
)
def test_run_with_another_identity_is_refused(key, value, difference):
    message = f"runs/a was trained with {difference}; restore the old values, or set another name"
    with pytest.raises(UserError, match=message):
        check_change(change(key, value))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("optimizer.lr", 0.5),
        ("train.steps", 5),
        ("train.micro_batch_size", 2),
        ("attention.backend", "naive"),
        ("model.dropout", 0.5),
        ("model.name", "mine"),
        ("dtype", "float32"),
        ("data.path", "moved.txt"),
    ],
)
def test_other_settings_can_change(key, value):
    check_change(change(key, value))


def test_all_differences_are_listed():
    config = change("seed", 2)
    config.model.n_layer = 9
    with pytest.raises(UserError, match=r"model.n_layer=2 \(now 9\), seed=1337 \(now 2\);"):
        check_change(config)


WITHOUT_OFFSET = change("model.key_offset", False)


@pytest.fixture
def older_header():
    """The header of a run of WITHOUT_OFFSET from before model.key_offset existed."""
    saved = make_checkpoint_header(WITHOUT_OFFSET, META)
    del saved["model_config"]["key_offset"]
    del saved["identity"]["model.key_offset"]
    return saved


def test_run_of_an_older_version_can_be_resumed(older_header):
    new = make_checkpoint_header(WITHOUT_OFFSET, META)
    check_identity(Path("runs/a"), older_header, new)


def test_setting_that_an_older_version_did_not_have_is_named(older_header):
    with pytest.raises(UserError, match=r"with model.key_offset=false \(now true\);"):
        check_identity(Path("runs/a"), older_header, make_checkpoint_header(CONFIG, META))


def test_changed_weight_in_a_mix_is_refused():
    mix = {"one": DataConfig(path="text.txt", weight=1.0)}
    old = make_checkpoint_header(RunConfig(data=DataConfig(mix=mix)), META)
    mix = {"one": DataConfig(path="text.txt", weight=2.0)}
    new = make_checkpoint_header(RunConfig(data=DataConfig(mix=mix)), META)
    with pytest.raises(UserError, match=r"data.mix.one.weight=1.0 \(now 2.0\);"):
        check_identity(Path("runs/a"), old, new)


OTHER_DATA = META | {"fingerprint": "f2"}


def test_setting_that_changes_the_data_is_named():
    with pytest.raises(UserError, match=r"with data.val_fraction=0.1 \(now 0.2\);"):
        check_change(change("data.val_fraction", 0.2), OTHER_DATA)


def test_data_that_changes_with_equal_settings_is_another_text():
    with pytest.raises(UserError, match=r"with another text than text.txt has now;"):
        check_change(CONFIG, OTHER_DATA)


def test_setting_that_does_not_change_the_data_does_not_explain_another_text():
    with pytest.raises(UserError, match=r"document_mask=.*, another text than text.txt has now;"):
        check_change(change("data.document_mask", True), OTHER_DATA)


def test_source_that_was_removed_from_a_mix_is_named():
    one = DataConfig(path="1.txt")
    both = RunConfig(data=DataConfig(mix={"one": one, "two": DataConfig(path="2.txt")}))
    old = make_checkpoint_header(both, META)
    new = make_checkpoint_header(RunConfig(data=DataConfig(mix={"one": one})), OTHER_DATA)
    with pytest.raises(UserError, match=r"with data.mix=\[one,two\] \(now \[one\]\);"):
        check_identity(Path("runs/a"), old, new)


@pytest.mark.parametrize("key", ["data.text_bytes", "data.stream"])
def test_setting_outside_of_the_hash_does_not_explain_another_text(key):
    with pytest.raises(UserError, match=r"another text than text.txt has now;"):
        check_change(change(key, 5), OTHER_DATA)


def test_steps_below_those_of_the_checkpoint_are_refused(state, checkpoints):
    save_steps(state, checkpoints, 7)
    state.config = TrainConfig(steps=6)
    checkpoints.run.resumes = True
    with pytest.raises(UserError, match=r"last.pt has finished step 7; set train.steps=7 or more"):
        load_last_checkpoint(checkpoints.run, state, HEADER, Dist())


# Runs that return to an older checkpoint


def save_evaluations(state, checkpoints, losses: dict[int, float]) -> None:
    """Save the checkpoints of steps with these validation losses."""
    for state.step, loss in losses.items():
        state.record_evaluation(loss, loss)
        checkpoints.save(state.summary())


def resume(state) -> None:
    """Resume from last.pt, and start the run as train.py does."""
    with RunFolder("a", "", True, Dist()) as run:
        load_last_checkpoint(run, state, HEADER, Dist())
        CheckpointWriter(CheckpointConfig(), run, state, HEADER).remove_later_steps()
        run.start({}, state.summary())


def return_to(step: int, state) -> None:
    """Copy an older checkpoint over last.pt, and resume from it."""
    folder = Path("runs/a/checkpoints")
    shutil.copy(folder / f"step-{step:06d}.pt", folder / "last.pt")
    resume(state)


def save_only_best(path, content) -> None:
    """Save best.pt, and crash before last.pt."""
    if path.stem != "best":
        crash()
    save_checkpoint(path, content)


def crash_before_last(state, checkpoints, losses: dict[int, float]) -> None:
    """Save evaluations in a process that is killed between best.pt and last.pt."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(checkpoint, "save_checkpoint", save_only_best)
        save_evaluations(state, checkpoints, losses)


def read_best(run: RunFolder) -> tuple[int, float]:
    """Step and loss of the best evaluation in best.pt and in summary.json, which must agree."""
    saved = load_checkpoint(run.best)
    recorded = json.loads((run.folder / "summary.json").read_text(encoding="utf-8"))
    assert saved["step"] == saved["best_step"] == recorded["best_step"]
    assert saved["best_val_loss"] == recorded["best_val_loss"]
    return saved["step"], saved["best_val_loss"]


@pytest.fixture
def older(state, checkpoints):
    """A run whose older checkpoints are of step 1, and of step 2 without a lower loss."""
    checkpoints.config = CheckpointConfig(every=1, keep=9)
    save_evaluations(state, checkpoints, {1: 5.0, 2: 6.0, 3: 4.0})
    checkpoints.run.lock.release()
    return checkpoints


def test_return_to_the_best_of_the_older_checkpoints_writes_best_again(state, older):
    return_to(1, state)
    assert read_best(older.run) == (1, 5.0)
    assert load_checkpoint(older.run.best)["optimizer"] is None
    assert state.evals_since_best == 0


def test_return_removes_checkpoints_of_later_steps(state, older):
    return_to(1, state)
    assert [path.name for path in older.run.folder.rglob("step-*.pt")] == ["step-000001.pt"]


def test_return_removes_attention_maps_of_later_steps(state, older):
    pictures = older.run.folder / "attention"
    pictures.mkdir()
    for step in (1, 2, 10):
        (pictures / f"step-{step:06d}.png").touch()
    return_to(1, state)
    assert [path.name for path in pictures.iterdir()] == ["step-000001.png"]


@pytest.mark.parametrize("name", ["backup/step-000009.pt", "step-9-mine.pt"])
def test_return_does_not_remove_copies_of_the_user(state, older, name):
    copy = older.run.last.parent / name
    copy.parent.mkdir(exist_ok=True)
    copy.touch()
    return_to(1, state)
    assert copy.exists()


def test_return_to_a_checkpoint_whose_best_is_overwritten_forgets_the_best_evaluation(state, older):
    return_to(2, state)
    assert not older.run.best.exists()
    assert (state.best_step, state.best_val_loss, state.evals_since_best) == (None, math.inf, 0)


def test_next_evaluation_after_a_forgotten_one_is_the_best(state, older):
    return_to(2, state)
    save_evaluations(state, older, {3: 7.0})
    assert read_best(older.run) == (3, 7.0)


def test_checkpoint_of_the_best_evaluation_is_not_touched_by_a_return_to_a_later_step(state, older):
    save_evaluations(state, older, {4: 8.0, 5: 2.0, 6: 9.0, 7: 9.0})
    content = older.run.best.read_bytes()
    return_to(6, state)
    assert (state.best_step, state.evals_since_best) == (5, 1)
    assert older.run.best.read_bytes() == content


def test_best_of_a_run_that_was_killed_before_last_was_written_is_not_touched(state, older):
    crash_before_last(state, older, {4: 3.0})
    resume(state)
    assert (state.step, state.best_step) == (3, 3)
    assert load_checkpoint(older.run.best)["step"] == 4


@pytest.mark.parametrize(
    ("step", "killed_in", "best"),
    [
        (1, "training.checkpoint.save_checkpoint", (1, 5.0)),
        (1, "training.run_folder.RunFolder.start", (1, 5.0)),
        (2, "training.run_folder.RunFolder.start", (3, 7.0)),
    ],
    ids=["best.pt", "summary, best step", "summary, other step"],
)
def test_return_to_an_older_checkpoint_can_be_killed(state, older, step, killed_in, best):
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ZeroDivisionError):
        patch.setattr(killed_in, crash)
        return_to(step, state)
    resume(state)
    crash_before_last(state, older, {3: 7.0})
    resume(state)
    save_evaluations(state, older, {3: 7.0})
    assert read_best(older.run) == best


def test_run_without_a_summary_keeps_its_best_evaluation(state, older):
    save_evaluations(state, older, {4: 8.0})
    (older.run.folder / "summary.json").unlink()
    resume(state)
    assert read_best(older.run) == (3, 4.0)
