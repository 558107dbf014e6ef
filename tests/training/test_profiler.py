"""train.profile=true: the table of operations and the trace."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from helpers import metrics, train_here, untimed
from run_helpers import train_in

from training.speed import RECORDED_STEPS, WARMUP_STEPS, StepProfiler

LAST_RECORDED = WARMUP_STEPS + RECORDED_STEPS


def run_steps(folder, num_steps: int, error: Exception | None = None) -> list[str]:
    """Run steps with one matrix product. Returns what the profiler prints."""
    printed = []
    with StepProfiler(torch.device("cpu"), folder, printed.append) as profiler:
        for _ in range(num_steps):
            with torch.profiler.record_function("forward"):
                torch.ones(2, 2) @ torch.ones(2, 2)
            profiler.step()
        torch.ones(1).erfinv()  # an evaluation after the last step
        if error is not None:
            raise error
    return printed


def read_annotations(trace: Path) -> list[str]:
    """The names of the phases in a trace."""
    with gzip.open(trace) as file:
        events = json.load(file)["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


@pytest.fixture(scope="module")
def profile(tmp_path_factory) -> tuple[Path, str, str]:
    """The trace of exactly the recorded steps, the table, and the line about the trace."""
    folder = tmp_path_factory.mktemp("profile")
    table, line = run_steps(folder, LAST_RECORDED)
    return folder / "trace.json.gz", table, line


@pytest.fixture
def table(profile) -> str:
    return profile[1]


def test_table_counts_the_operations_of_the_recorded_steps(table):
    rows = [line.split() for line in table.splitlines()]
    calls = {row[0]: row[-1] for row in rows if row and row[0].startswith("aten::")}
    assert calls["aten::mm"] == str(RECORDED_STEPS)


def test_table_has_the_phases_of_a_step(table):
    assert "forward" in table


def test_table_has_no_operation_after_the_recorded_steps(table):
    assert "erfinv" not in table


@pytest.mark.parametrize("num_steps", [3, LAST_RECORDED - 1])
def test_run_that_ends_before_the_recorded_steps_writes_no_profile(tmp_path, num_steps):
    assert run_steps(tmp_path, num_steps) == []
    assert not (tmp_path / "trace.json.gz").exists()


def test_profiler_ends_with_a_run_that_fails(tmp_path):
    with pytest.raises(ZeroDivisionError):
        run_steps(tmp_path, WARMUP_STEPS + 1, error=ZeroDivisionError())
    with torch.profiler.profile():  # only one profiler can be active
        pass


# A run with train.profile=true

SETTINGS = [
    f"train.steps={LAST_RECORDED}",
    f"eval.every={LAST_RECORDED}",
    "train.micro_batch_size=2",
    "model.dropout=0.1",
]


@pytest.fixture(scope="module")
def profiled_run(tmp_path_factory):
    """The folder of a run, and what it prints."""
    folder = tmp_path_factory.mktemp("profiled")
    return folder, train_in(folder, "name=a", "train.profile=true", *SETTINGS)


@pytest.mark.parametrize(
    ("phase", "per_step"), [("data", 2), ("forward", 2), ("backward", 2), ("optimizer", 1)]
)
def test_trace_of_a_run_has_the_phases_of_its_micro_batches(profiled_run, phase, per_step):
    folder, _ = profiled_run
    annotations = read_annotations(folder / "runs/a/trace.json.gz")
    assert annotations.count(phase) == per_step * RECORDED_STEPS


def test_profiled_run_has_the_same_results(profiled_run, monkeypatch):
    monkeypatch.chdir(profiled_run[0])
    assert train_here("name=b", *SETTINGS) == 0
    assert untimed(metrics("a")) == untimed(metrics("b"))
