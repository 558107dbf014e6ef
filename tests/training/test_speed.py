"""Step times and throughput, and the peak speed of matrix products."""

import pytest
import torch

from training.speed import (
    GPU_PEAK,
    UNTIMED_STEPS,
    Speed,
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
    for seconds in [9.0] * (UNTIMED_STEPS - 1) + [0.5, 1.0, 2.0]:
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
