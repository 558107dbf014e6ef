"""What a run prints, and metrics.jsonl: when rows are written, and values that are not finite."""

import json
import math
import re
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import metrics, read_jsonl, summary
from run_helpers import train_in

from common.console import PlainConsole
from common.errors import TrainingFailed
from training.config import OVERFITTING_EVALS, RunConfig
from training.log import MetricsLogger, RunLogger
from training.schedule import ScheduleConfig
from training.train_state import TrainState


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that prints a line of progress each step, and what it prints."""
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("common.console.LINE_INTERVAL_S", 0.0)
        patch.setattr("training.log.FLUSH_INTERVAL_S", 0.0)
        printed = train_in(folder, "name=a", "eval.sample.max_new_tokens=9")
    return folder, printed


@pytest.fixture
def printed(run) -> str:
    return run[1]


@pytest.fixture
def rows(run) -> list[dict]:
    with chdir(run[0]):
        return metrics("a")


@pytest.mark.parametrize("step", [1, 3, 6])
def test_line_of_progress_has_loss_speed_and_remaining_time(printed, rows, step):
    loss = f"{rows[step]['train/loss']:.3f}"
    speed = f"{rows[step]['tokens_per_second']:,.0f}"
    line = rf"^step {step}/6  loss {loss}  {speed} tokens/s  \d:\d\d:\d\d left$"
    assert re.search(line, printed, re.MULTILINE)


def test_banner_is_printed_before_the_progress_starts(printed):
    """On a terminal, it would otherwise be printed into the progress bar."""
    assert printed.index("run      runs/a") < printed.index("evaluating")


def test_terminal_has_a_progress_bar_until_the_last_step(workdir, monkeypatch):
    monkeypatch.setattr(PlainConsole, "is_terminal", True)
    bar = train_in(workdir, "name=a").rpartition("━")[2]
    assert f"step 6/6  loss {metrics('a')[-1]['train/loss']:.3f}  " in bar


@pytest.mark.parametrize(("step", "ending"), [(0, ""), (6, ", the best so far")])
def test_evaluation_prints_its_losses(printed, rows, step, ending):
    loss = f"{rows[step]['val/loss']:.4f}"
    bpb = f"{rows[step]['val/bpb']:.3f}"
    assert f"\nstep {step}: validation loss {loss}, {bpb} bits per byte{ending}\n" in printed


def test_evaluation_prints_its_sample_with_a_margin(printed, rows):
    first_line = rows[3]["sample"].strip("\n").splitlines()[0]
    assert f"\n  | {first_line}" in printed


def test_summary_has_the_newest_number_of_each_metric(run, rows):
    newest = {}
    for row in rows:
        newest |= row
    with chdir(run[0]):
        recorded = summary("a")
    for name in ("step", "tokens", "lr", "grad_norm", "peak_memory_bytes"):
        assert recorded[name] == newest[name], name
    assert recorded["last_val_loss"] == newest["val/loss"]
    assert recorded["last_train_loss"] == newest["train/loss"]
    assert recorded["wall_seconds"] == newest["seconds"]
    assert "sample" not in recorded


def test_speed_in_the_summary_is_a_median_without_warmup(run, rows):
    with chdir(run[0]):
        assert summary("a")["step_ms"] == rows[6]["step_ms"]


# Overfitting


def print_evaluation(best_step: int, evals_since_best: int, **metrics) -> str:
    """What an evaluation prints. 4 steps are an epoch."""
    lines = []
    logger = RunLogger.__new__(RunLogger)
    logger.config = RunConfig()
    logger.config.train.patience = 5
    logger.state = TrainState(
        logger.config.train, ScheduleConfig(), None, [], None, steps_per_epoch=4, step=99
    )
    logger.state.best_step = best_step
    logger.state.evals_since_best = evals_since_best
    logger.bar = SimpleNamespace(print_text=lambda *text, **style: lines.append(text[0]))
    logger._print_evaluation({"val/loss": 1.0, "val/bpb": 1.0} | metrics)
    return "\n".join(lines)


def test_sample_is_broken_at_newlines_only():
    printed = print_evaluation(10, 0, sample="a\x0cb\x1ec\n\u2028d")
    assert printed.endswith("\n  | a\x0cb\x1ec\n  | \u2028d")


def test_evaluation_prints_the_first_three_lines_of_its_sample():
    printed = print_evaluation(10, 0, sample="\na\nb\n\nd\ne")
    assert printed.endswith("\n  | a\n  | b\n  | ")


@pytest.mark.parametrize(
    ("best_step", "advice"),
    [(10, "train.epochs=2.5, or more weight decay"), (0, "a lower optimizer.lr")],
    ids=["trained weights", "initial weights"],
)
def test_overfitting_is_reported_with_advice(best_step, advice):
    printed = print_evaluation(best_step, OVERFITTING_EVALS)
    assert f"has not fallen since step {best_step}; start another run with {advice}" in printed


@pytest.mark.parametrize("evals_since_best", [OVERFITTING_EVALS - 1, OVERFITTING_EVALS + 1])
def test_overfitting_is_reported_once(evals_since_best):
    assert "overfitting" not in print_evaluation(10, evals_since_best)


def test_run_says_that_patience_has_ended_it():
    assert "train.patience=5 evaluations without a lower loss" in print_evaluation(10, 5)


# metrics.jsonl


@pytest.fixture
def path(tmp_path) -> Path:
    path = tmp_path / "metrics.jsonl"
    path.touch()
    return path


def make_logger(path: Path) -> MetricsLogger:
    return MetricsLogger(SimpleNamespace(folder=path.parent, name="mine"))


@pytest.fixture
def log(path, monkeypatch) -> MetricsLogger:
    """A MetricsLogger of a new run, which does not write by itself."""
    monkeypatch.setattr("training.log.FLUSH_INTERVAL_S", math.inf)
    return make_logger(path)


def read_timing() -> dict:
    return {"step_ms": 3.0}


def test_row_is_written_by_a_flush_with_numbers_instead_of_tensors(path, log):
    log.log({"step": 1, "train/loss": torch.tensor(2.5)})
    assert read_jsonl(path) == []
    log.log({"step": 2, "train/loss": torch.tensor(2.0)}, read_timing)
    log.flush()
    assert read_jsonl(path) == [
        {"step": 1, "train/loss": 2.5},
        {"step": 2, "train/loss": 2.0, "step_ms": 3.0},
    ]


def test_rows_are_appended_after_a_resume(path, log):
    path.write_text('{"step": 1}\n', encoding="utf-8")
    log.log({"step": 2})
    log.flush()
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


def test_rows_are_written_once_a_second(path, clock):
    log = make_logger(path)
    clock[0] += 0.9
    log.log({"step": 1})
    assert read_jsonl(path) == []
    clock[0] += 0.2
    log.log({"step": 2})
    assert read_jsonl(path) == [{"step": 1}, {"step": 2}]


@pytest.mark.parametrize("key", ["train/loss", "val/loss"])
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=str)
def test_loss_that_is_not_finite_is_written_as_null_and_ends_the_run(path, log, key, value):
    log.log({"step": 3, key: torch.tensor(value)})
    message = rf"{key} .* at step 3. Lower optimizer.lr, then resume .* name=mine"
    with pytest.raises(TrainingFailed, match=message):
        log.flush()
    assert json.loads(path.read_bytes()) == {"step": 3, key: None}


def test_infinite_gradients_do_not_end_a_run_because_a_scaler_can_skip_the_step(path, log):
    log.log({"step": 1, "grad_norm": math.inf, "train/loss": 1.0})
    log.flush()
    assert read_jsonl(path) == [{"step": 1, "grad_norm": None, "train/loss": 1.0}]
