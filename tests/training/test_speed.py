"""Step times and throughput, the peak speed of matrix products, and train.profile=true."""

import gzip
import json
from pathlib import Path

import pytest
import torch
from helpers import metrics, train_here, untimed
from run_helpers import train_in

from training.speed import (
    GPU_PEAK,
    RECORDED_STEPS,
    WARMUP_STEPS,
    Speed,
    StepProfiler,
    peak_flops,
    time_calls,
)

CPU = torch.device("cpu")
CUDA = torch.device("cuda")


@pytest.fixture
def speed() -> Speed:
    return Speed(CPU, tokens=100, flops=2e9, peak=1e10)


@pytest.fixture
def run_step(speed, clock):
    """run_step(0.5) runs a step of half a second. Returns its metrics."""

    def run_step(seconds: float) -> dict:
        speed.start_step()
        clock[0] += seconds
        return speed.end_step()()

    return run_step


def test_metrics_of_a_step(run_step):
    expected = {"step_ms": 750, "tokens_per_second": 100 / 0.75, "mfu": 0.2 / 0.75}
    assert run_step(0.75) == pytest.approx(expected)


def test_time_between_steps_does_not_count(run_step, clock):
    run_step(0.75)
    clock[0] += 10  # an evaluation
    assert run_step(0.5)["step_ms"] == 500


def test_median_excludes_warmup_steps_if_there_are_others(speed, run_step):
    assert speed.median() == {}
    run_step(9.0)
    assert speed.median()["step_ms"] == 9000.0
    for seconds in [9.0] * (WARMUP_STEPS - 1) + [0.5, 1.0, 2.0]:
        run_step(seconds)
    assert speed.median() == {"step_ms": 1000.0, "tokens_per_second": 100.0, "mfu": 0.2}
    speed.step_seconds.extend([0.25] * 1000)  # a long run has the median of its last steps
    assert speed.median()["step_ms"] == 250.0


@pytest.mark.parametrize(
    ("min_calls", "seconds", "max_calls", "timed", "warmup"),
    [(7, 0.0, 100, 7, 0), (2, 5.0, 100, 10, 2), (2, 100.0, 5, 5, 1)],
    ids=["at least", "in time", "at most"],
)
def test_calls_fill_the_time_within_their_limits(
    clock, min_calls, seconds, max_calls, timed, warmup
):
    calls = []

    def call():
        clock[0] += 0.5
        calls.append(1)

    assert time_calls(call, CPU, min_calls, seconds, max_calls) == [0.5] * timed
    assert len(calls) == timed + warmup


def test_peak_of_an_unknown_device_is_measured():
    assert peak_flops(CPU, torch.float32) > 0


@pytest.fixture
def gpu(monkeypatch):
    """gpu("NVIDIA H200"): a machine with this GPU, which cannot measure."""

    def measure(*args, **kwargs):
        raise RuntimeError("measured")

    def set_name(name: str) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        monkeypatch.setattr(torch, "randn", measure)

    return set_name


@pytest.mark.parametrize(
    ("dtype", "index"),
    [(torch.float16, 0), (torch.bfloat16, 0), (torch.float32, 1)],
    ids=str,
)
def test_peak_of_a_known_gpu_is_in_its_data_sheet(gpu, dtype, index):
    gpu("NVIDIA H200")
    assert peak_flops(CUDA, dtype) == GPU_PEAK["NVIDIA H200"][index]


def test_peak_of_another_gpu_of_the_same_family_is_measured(gpu):
    gpu("NVIDIA H200 NVL")
    with pytest.raises(RuntimeError, match="measured"):
        peak_flops(CUDA, torch.float16)


def test_peak_of_tf32_is_measured(gpu, monkeypatch):
    gpu("NVIDIA H200")
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    with pytest.raises(RuntimeError, match="measured"):
        peak_flops(CUDA, torch.float32)
    assert peak_flops(CUDA, torch.bfloat16) == GPU_PEAK["NVIDIA H200"][0]


# The profiler

LAST_RECORDED = WARMUP_STEPS + RECORDED_STEPS
SETTINGS = [
    f"train.steps={LAST_RECORDED}",
    f"eval.every={LAST_RECORDED}",
    "train.micro_batch_size=2",
    "model.dropout=0.1",
    "model.n_layer=1",
    "optimizer=adamw",  # has fewer operations than muon
]


def run_steps(folder, num_steps: int, error: Exception | None = None) -> list[str]:
    """Run steps with one matrix product. Returns what the profiler prints."""
    printed = []
    with StepProfiler(CPU, folder, printed.append) as profiler:
        for _ in range(num_steps):
            torch.ones(2, 2) @ torch.ones(2, 2)
            profiler.step()
        torch.ones(1).erfinv()  # an evaluation after the last step
        if error is not None:
            raise error
    return printed


def test_table_has_the_operations_of_the_recorded_steps_only(tmp_path):
    table, _ = run_steps(tmp_path, LAST_RECORDED)
    rows = [line.split() for line in table.splitlines()]
    calls = {row[0]: row[-1] for row in rows if row and row[0].startswith("aten::")}
    assert calls["aten::mm"] == str(RECORDED_STEPS)
    assert "aten::erfinv" not in calls


@pytest.mark.parametrize("num_steps", [3, LAST_RECORDED - 1])
def test_run_that_ends_before_the_recorded_steps_writes_no_profile(tmp_path, num_steps):
    assert run_steps(tmp_path, num_steps) == []
    assert not (tmp_path / "trace.json.gz").exists()


def test_profiler_ends_with_a_run_that_fails(tmp_path):
    with pytest.raises(ZeroDivisionError):
        run_steps(tmp_path, WARMUP_STEPS + 1, error=ZeroDivisionError())
    with torch.profiler.profile():  # only one profiler can be active
        pass


def test_profiled_run_has_the_phases_of_its_micro_batches_and_the_same_results(workdir):
    printed = train_in(workdir, "name=a", "train.profile=true", *SETTINGS)
    assert f"\nsteps {WARMUP_STEPS + 1} to {LAST_RECORDED}\n" in printed
    assert "trace    runs/a/trace.json.gz" in printed
    with gzip.open(Path("runs/a/trace.json.gz")) as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    for phase, per_step in {"data": 2, "forward": 2, "backward": 2, "optimizer": 1}.items():
        assert names.count(phase) == per_step * RECORDED_STEPS
    assert train_here("name=b", *SETTINGS) == 0
    assert untimed(metrics("a")) == untimed(metrics("b"))
