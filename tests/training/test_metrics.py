"""metrics.jsonl: when rows are written, resuming, and values that are not finite."""

import math
from types import SimpleNamespace

import pytest
import torch
from helpers import read_jsonl

from common.errors import TrainingFailed, UserError
from training import metrics as training_metrics
from training.metrics import MetricsLogger


@pytest.fixture(autouse=True)
def no_timed_flush(monkeypatch):
    monkeypatch.setattr(training_metrics, "FLUSH_INTERVAL_S", math.inf)


def logger(folder, step=-1):
    return MetricsLogger(folder / "metrics.jsonl", SimpleNamespace(log=lambda rows: None), step)


def test_rows_are_written_several_at_a_time(tmp_path):
    path, metrics = tmp_path / "metrics.jsonl", logger(tmp_path)
    metrics.log({"step": 1, "train/loss": torch.tensor(2.5)}, read_timing=lambda: {"step_ms": 3.0})
    metrics.log({"step": 2, "train/loss": torch.tensor(2.0)})
    assert path.read_text(encoding="utf-8") == ""
    metrics.flush(sync=True)
    assert read_jsonl(path) == [
        {"step": 1, "train/loss": 2.5, "step_ms": 3.0},
        {"step": 2, "train/loss": 2.0},
    ]
    assert metrics.last == {"step": 2, "train/loss": 2.0, "step_ms": 3.0}


def test_resuming_removes_later_rows_and_incomplete_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = '{"step": 0}\n{"step": 1, "val/loss": 3}\n{"step": 2}\n{"step": 3, "val/loss": 2}\n'
    path.write_text(rows + '\0\0\n{"step": 4, "tr', encoding="utf-8")
    metrics = logger(tmp_path, step=2)
    assert metrics.last == {"step": 2, "val/loss": 3}, "the newest values until step 2"
    metrics.log({"step": 3, "again": True})
    metrics.flush()
    assert read_jsonl(path) == [
        {"step": 0},
        {"step": 1, "val/loss": 3},
        {"step": 2},
        {"step": 3, "again": True},
    ]
    for step in (0, -1):  # 0: the first row is that of step 1, if there was no initial evaluation
        path.write_text('{"step": 1}\n', encoding="utf-8")
        logger(tmp_path, step)
        assert path.read_text(encoding="utf-8") == ""


@pytest.mark.parametrize(
    ("rows", "missing"),
    [("", 0), ('{"step": 0}\n{"step": 2}\n', 1), ('{"step": 1}\n{"step"', 2), ('{"step": 1}\n{"step": "2"}\n', 2),
     ('{"step": 1}\n{"step": null}\n', 2), ('{"step": 1}\n[]\n', 2), ('{"step": 1}\n{"step": 1}\n', 2)],
)  # fmt: skip
def test_missing_row_is_refused(tmp_path, rows, missing):
    (tmp_path / "metrics.jsonl").write_text(rows, encoding="utf-8")
    with pytest.raises(
        UserError,
        match=f"metrics.jsonl has no row of step {missing}; restore it, or set another",
    ):
        logger(tmp_path, step=2)
    assert (tmp_path / "metrics.jsonl").read_text(encoding="utf-8") == rows


@pytest.mark.parametrize("key", ["train/loss", "val/loss"])
def test_loss_that_is_not_finite_is_written_and_ends_the_run(tmp_path, key):
    metrics = logger(tmp_path)
    metrics.log({"step": 3, key: torch.tensor(math.nan)})
    with pytest.raises(
        TrainingFailed, match=f"{key} is not a finite number at step 3. Lower optimizer.lr"
    ):
        metrics.flush()
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 3, key: None}]


def test_step_with_infinite_gradients_does_not_end_a_run_because_a_scaler_can_skip_it(tmp_path):
    metrics = logger(tmp_path)
    metrics.log({"step": 1, "grad_norm": math.inf, "train/loss": 1.0})
    metrics.flush()
