"""metrics.jsonl: when rows are written, resuming, and values that are not finite."""

import json
import math
from pathlib import Path

import pytest
import torch
from helpers import read_jsonl

from common.errors import TrainingFailed, UserError
from training import log as training_metrics
from training.log import MetricsLogger


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "metrics.jsonl"


@pytest.fixture
def open_log(path, monkeypatch):
    """open_log(2): a MetricsLogger of a run at step 2, which does not write by itself."""
    monkeypatch.setattr(training_metrics, "FLUSH_INTERVAL_S", math.inf)

    def open_log(step: int = -1) -> MetricsLogger:
        return MetricsLogger(path, step)

    return open_log


def write_lines(path: Path, *lines: str) -> None:
    path.write_text("\n".join(lines), encoding="utf-8")


def read_timing() -> dict:
    return {"step_ms": 3.0}


def test_row_is_not_written_before_a_flush(path, open_log):
    open_log().log({"step": 1, "train/loss": torch.tensor(2.5)})
    assert path.read_bytes() == b""


def test_flush_writes_all_rows_with_numbers_instead_of_tensors(path, open_log):
    log = open_log()
    log.log({"step": 1, "train/loss": torch.tensor(2.5)})
    log.log({"step": 2, "train/loss": torch.tensor(2.0)})
    log.flush()
    assert read_jsonl(path) == [{"step": 1, "train/loss": 2.5}, {"step": 2, "train/loss": 2.0}]


def test_timing_is_read_when_a_row_is_written(path, open_log):
    log = open_log()
    log.log({"step": 1}, read_timing)
    log.flush()
    assert read_jsonl(path) == [{"step": 1, "step_ms": 3.0}]


def test_newest_values_of_all_rows_are_known(open_log):
    log = open_log()
    log.log({"step": 1, "val/loss": 3.0, "lr": 1.0})
    log.log({"step": 2, "lr": 0.5}, read_timing)
    log.flush()
    assert log.last == {"step": 2, "val/loss": 3.0, "lr": 0.5, "step_ms": 3.0}


def test_rows_are_written_once_a_second(path, clock):
    log = MetricsLogger(path, -1)
    clock[0] += 0.9
    log.log({"step": 1})
    assert read_jsonl(path) == []
    clock[0] += 0.2
    log.log({"step": 2})
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


# Resuming

ROWS = ['{"step": 0}', '{"step": 1, "val/loss": 3}', '{"step": 2}', '{"step": 3, "val/loss": 2}']


def test_rows_after_the_step_are_removed(path, open_log):
    write_lines(path, *ROWS, "")
    log = open_log(2)
    assert [row["step"] for row in read_jsonl(path)] == [0, 1, 2]
    assert log.last == {"step": 2, "val/loss": 3}


@pytest.mark.parametrize(
    "damage",
    ['{"step": 3, "tr', "\0\0\n", "[]\n", '{"step": "3"}\n', '{"step": 2}\n', '{"step": 4}\n'],
    ids=["incomplete", "zeros", "no object", "no number", "step again", "step missing"],
)
def test_damaged_rows_after_the_step_are_removed(path, open_log, damage):
    write_lines(path, *ROWS[:3], damage)
    open_log(2)
    assert [row["step"] for row in read_jsonl(path)] == [0, 1, 2]


def test_rows_are_appended_after_the_step(path, open_log):
    write_lines(path, *ROWS, "")
    log = open_log(2)
    log.log({"step": 3, "again": True})
    log.flush()
    assert read_jsonl(path) == [*map(json.loads, ROWS[:3]), {"step": 3, "again": True}]


def test_first_row_can_be_of_step_1(path, open_log):
    """Without an initial evaluation."""
    write_lines(path, *ROWS[1:], "")
    open_log(2)
    assert [row["step"] for row in read_jsonl(path)] == [1, 2]


@pytest.mark.parametrize("step", [0, -1])
@pytest.mark.parametrize("row", ['{"step": 1}\n', '{"step": 0, "incomp'])
def test_all_rows_are_removed_if_no_checkpoint_has_a_step(path, open_log, step, row):
    write_lines(path, row)
    open_log(step)
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("lines", "missing"),
    [
        ([], 0),
        (['{"step": 0}', '{"step": 2}', ""], 1),
        (['{"step": 2}', ""], 0),
        (['{"step": 1}', '{"step"'], 2),
        (['{"step": 1}', '{"step": "2"}', ""], 2),
        (['{"step": 1}', '{"step": null}', ""], 2),
        (['{"step": 1}', "[]", ""], 2),
        (['{"step": 1}', '{"step": 1}', ""], 2),
    ],
    ids=["all", "between", "start", "cut", "text", "null", "no object", "twice"],
)
def test_missing_row_is_refused(path, open_log, lines, missing):
    write_lines(path, *lines)
    content = path.read_bytes()
    message = f"metrics.jsonl has no row of step {missing}; restore it, or set another name"
    with pytest.raises(UserError, match=message):
        open_log(2)
    assert path.read_bytes() == content


# Values that are not finite


@pytest.mark.parametrize("key", ["train/loss", "val/loss"])
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_loss_that_is_not_finite_ends_the_run(open_log, key, value):
    log = open_log()
    log.log({"step": 3, key: torch.tensor(value)})
    with pytest.raises(TrainingFailed, match=rf"{key} .* at step 3. Lower optimizer.lr"):
        log.flush()


def test_loss_that_is_not_finite_is_written_as_null(path, open_log):
    log = open_log()
    log.log({"step": 3, "train/loss": math.nan})
    with pytest.raises(TrainingFailed):
        log.flush()
    assert read_jsonl(path) == [{"step": 3, "train/loss": None}]


def test_infinite_gradients_do_not_end_a_run_because_a_scaler_can_skip_the_step(path, open_log):
    log = open_log()
    log.log({"step": 1, "grad_norm": math.inf, "train/loss": 1.0})
    log.flush()
    assert read_jsonl(path) == [{"step": 1, "grad_norm": None, "train/loss": 1.0}]
