"""Checkpoints: which files are saved, the identity of a run, and what a resumed run removes."""

import math
import os
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from data_helpers import write_file
from helpers import ADAMW, read_jsonl, tiny_model, train_step

from common.checkpoint_file import load_checkpoint
from common.errors import TrainingFailed, UserError
from data import DataConfig
from training.checkpoint import (
    CheckpointWriter,
    check_identity,
    load_last_checkpoint,
    make_checkpoint_header,
    remove_later_steps,
)
from training.config import CheckpointConfig, RunConfig, TrainConfig
from training.optimizer import build_optimizers
from training.run_folder import RunFolder
from training.runtime import Dist
from training.schedule import ScheduleConfig
from training.teachers import make_teacher
from training.train_state import TrainState

MODEL_CONFIG = asdict(tiny_model().config)
HEADER = {
    "vocab_size": 20, "model_config": MODEL_CONFIG, "identity": {}, "config": {"seed": 1},
    "tokenizer": {},
}  # fmt: skip


@pytest.fixture
def state():
    model = tiny_model()
    optimizers = build_optimizers(model, ADAMW)
    train_step(model, optimizers)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    return TrainState(TrainConfig(steps=9), ScheduleConfig(), model, optimizers, scaler)


@pytest.fixture
def run(workdir):
    with RunFolder(RunConfig(name="a"), Dist()) as run:
        run.start({}, {})
        yield run


@pytest.fixture
def checkpoints(run, state):
    return CheckpointWriter(CheckpointConfig(every=2, keep=0), run, state, HEADER)


def save_steps(state, checkpoints, *steps: int) -> None:
    for state.step in steps:
        checkpoints.save()


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
    checkpoints.save()
    assert list_checkpoints(checkpoints.run) == files


def test_only_last_checkpoint_has_the_teachers(state, checkpoints):
    state.teachers = [make_teacher(state.model, state.model.state_dict())]
    state.best_step = 3
    save_steps(state, checkpoints, 3)
    files = [load_checkpoint(path) for path in (checkpoints.run.best, checkpoints.run.last)]
    assert [len(file["teachers"]) for file in files] == [0, 1]


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
    state.step = step
    state.best_step = best_step
    state.stopped = stopped
    assert checkpoints.is_due is expected


@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_weights_that_are_not_finite_do_not_replace_a_checkpoint(state, checkpoints, value):
    save_steps(state, checkpoints, 1)
    with torch.no_grad():
        next(state.model.parameters()).view(-1)[3] = value
    with pytest.raises(TrainingFailed, match=r"not finite after step 2.* Lower optimizer.lr"):
        save_steps(state, checkpoints, 2)
    assert load_checkpoint(checkpoints.run.last)["step"] == 1


def test_keep_leaves_the_checkpoints_of_the_last_steps(state, checkpoints, monkeypatch):
    """Also on a disk without hard links, and if the clock was set back."""
    monkeypatch.delattr("os.link")
    checkpoints.config.keep = 2
    save_steps(state, checkpoints, 2, 4, 6)
    os.utime(checkpoints.run.last.with_name("step-000002.pt"), (2e9, 2e9))
    save_steps(state, checkpoints, 8)
    files = sorted(checkpoints.run.last.parent.iterdir())
    assert [path.stem for path in files] == ["last", "step-000004", "step-000006"]
    assert [load_checkpoint(path)["step"] for path in files] == [8, 4, 6]


def test_repeated_save_of_a_step_keeps_the_step_before_it(state, checkpoints):
    """After a resume that had only to repeat an evaluation."""
    checkpoints.config.keep = 1
    save_steps(state, checkpoints, 2, 4, 4)
    assert list_checkpoints(checkpoints.run) == {"last", "step-000002"}


# The identity of a run

META = {"name": "novel", "fingerprint": "f1", "vocab_size": 20, "tokenizer": {}}
OTHER_DATA = META | {"fingerprint": "f2"}
CONFIG = RunConfig(data=DataConfig(path="text.txt"))


def change(key: str, value, config: RunConfig = CONFIG) -> RunConfig:
    """A config with another value of a key, such as model.n_layer."""
    config = deepcopy(config)
    *sections, name = key.split(".")
    section = config
    for part in sections:
        section = getattr(section, part)
    setattr(section, name, value)
    return config


def check_change(new: RunConfig, meta: dict = META, old: RunConfig = CONFIG) -> None:
    """Resume a run of `old` and META with these."""
    saved = make_checkpoint_header(old, META)
    check_identity(Path("runs/a"), saved, make_checkpoint_header(new, meta))


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
    config = change("seed", 2, change("model.n_layer", 9))
    with pytest.raises(UserError, match=r"model.n_layer=2 \(now 9\), seed=1337 \(now 2\);"):
        check_change(config)


@pytest.mark.parametrize(
    ("key", "old", "new", "message"),
    [
        ("key_offset", False, True, r"with model.key_offset=false \(now true\);"),
        ("rotary_fraction", None, 1.0, r"with model.rotary_fraction=null \(now 1.0\);"),
    ],
    ids=["key_offset", "rotary_fraction"],
)
def test_run_from_before_a_key_existed_has_its_old_value(key, old, new, message):
    config = change(f"model.{key}", old)
    saved = make_checkpoint_header(config, META)
    del saved["model_config"][key]
    del saved["identity"][f"model.{key}"]
    check_identity(Path("runs/a"), saved, make_checkpoint_header(config, META))
    with pytest.raises(UserError, match=message):
        header = make_checkpoint_header(change(f"model.{key}", new), META)
        check_identity(Path("runs/a"), saved, header)


@pytest.mark.parametrize(
    ("key", "value", "difference"),
    [
        ("data.val_fraction", 0.2, r"data.val_fraction=0.1 \(now 0.2\)"),
        ("seed", 1337, "another text than text.txt has now"),
    ],
    ids=["setting", "text"],
)
def test_other_data_is_explained_by_its_settings_or_by_the_text(key, value, difference):
    with pytest.raises(UserError, match=f"runs/a was trained with {difference};"):
        check_change(change(key, value), OTHER_DATA)


def test_other_vocabulary_of_the_same_text_is_refused():
    with pytest.raises(UserError, match="a vocabulary that an earlier version made"):
        check_change(CONFIG, META | {"tokenizer": {"tokens": ["YQ=="]}})


@pytest.mark.parametrize("limit", [{"steps": 6}, {"steps": 7}, {"minutes": 0.1}, {"epochs": 0.5}])
def test_new_limit_that_is_reached_is_refused(limit, state, checkpoints):
    """The weights of this step were not evaluated."""
    checkpoints.header = HEADER | {"config": {"train": dict.fromkeys(limit)}}
    state.seconds = 7.0
    state.steps_per_epoch = 12
    save_steps(state, checkpoints, 7)
    state.config = TrainConfig(**{"steps": 9} | limit)
    checkpoints.run.resumes = True
    header = HEADER | {"config": {"train": limit}}
    ((key, value),) = limit.items()
    message = rf"a has reached train.{key}=null \(now {value}\) at step 7; set a larger value"
    with pytest.raises(UserError, match=message):
        load_last_checkpoint(checkpoints.run, state, header, Dist())


def test_run_that_was_killed_after_its_last_step_is_accepted(state, checkpoints):
    save_steps(state, checkpoints, 9)
    checkpoints.run.resumes = True
    load_last_checkpoint(checkpoints.run, state, HEADER, Dist())
    assert state.is_finished


# What a killed process has written after its last checkpoint

ROWS = ['{"step": 0}', '{"step": 1, "val/loss": 3}', '{"step": 2}', '{"step": 3, "val/loss": 2}']


def remove_rows(run, state, step: int, *lines: str) -> list[int]:
    """Remove the rows after a step from metrics.jsonl. Returns the steps of the others."""
    path = run.folder / "metrics.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    state.step = step
    remove_later_steps(run, state)
    return [row["step"] for row in read_jsonl(path)]


def test_rows_of_later_steps_are_removed(run, state):
    assert remove_rows(run, state, 2, *ROWS, "") == [0, 1, 2]


def test_row_of_a_stopped_evaluation_is_removed(run, state):
    """It is written again with the evaluation."""
    state.unlogged = {"lr": 0.1}
    assert remove_rows(run, state, 2, *ROWS, "") == [0, 1]


@pytest.mark.parametrize(
    "damage",
    ['{"step": 3, "tr', "\0\0\n", "[]\n", "{}\n", '{"step": "3"}\n', ROWS[2], '{"step": 4}\n'],
    ids=["incomplete", "zeros", "no object", "no step", "no number", "again", "later"],
)
def test_damaged_rows_after_the_step_are_removed(run, state, damage):
    assert remove_rows(run, state, 2, *ROWS[:3], damage) == [0, 1, 2]


def test_first_row_can_be_of_step_1(run, state):
    """Without an initial evaluation."""
    assert remove_rows(run, state, 2, *ROWS[1:], "") == [1, 2]


@pytest.mark.parametrize("row", ['{"step": 0}\n', '{"step": 1}\n', '{"step": 0, "incomp'])
def test_all_rows_are_removed_if_no_checkpoint_has_a_step(run, state, row):
    assert remove_rows(run, state, 0, row) == []


@pytest.mark.parametrize(
    ("lines", "missing"),
    [
        ([], 0),
        (['{"step": 0}', '{"step": 2}', ""], 1),
        (['{"step": 2}', ""], 0),
        (['{"step": 1}', '{"step"'], 2),
        (['{"step": 1}', '{"step": null}', ""], 2),
        (['{"step": 1}', '{"step": 1}', ""], 2),
    ],
    ids=["all", "between", "start", "cut", "null", "twice"],
)
def test_missing_row_is_refused_and_no_row_is_removed(run, state, lines, missing):
    message = f"metrics.jsonl has no row of step {missing}; restore it, or set another name"
    with pytest.raises(UserError, match=message):
        remove_rows(run, state, 2, *lines)
    assert (run.folder / "metrics.jsonl").read_text(encoding="utf-8") == "\n".join(lines)


@pytest.mark.parametrize(
    ("file", "stays"),
    [
        ("attention/step-000001.png", True),
        ("attention/step-000002.png", False),
        ("checkpoints/step-000001.pt", True),
        ("checkpoints/step-000010.pt", False),
        ("checkpoints/step-9-mine.pt", True),
        ("checkpoints/backup/step-000009.pt", True),
        ("checkpoints/best.pt", True),
    ],
)
def test_files_of_later_steps_are_removed_and_no_other_files(run, state, file, stays):
    """best.pt can be of a later step, which the run reaches again."""
    path = Path(write_file(str(run.folder / file), ""))
    remove_rows(run, state, 1, *ROWS)
    assert path.exists() is stays


def test_only_rank_0_removes_files(run, state):
    run.is_main = False
    assert remove_rows(run, state, 1, *ROWS, "") == [0, 1, 2, 3]


def test_copy_of_best_pt_is_not_resumed(run, state, checkpoints):
    state.record_evaluation(2.0, 3.0)
    save_steps(state, checkpoints, 0)
    run.resumes = bool(run.best.rename(run.last))
    with pytest.raises(UserError, match=r"last.pt has no optimizer state"):
        load_last_checkpoint(run, state, HEADER, Dist())
