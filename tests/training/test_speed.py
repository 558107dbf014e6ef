"""Step times and throughput, and the peak speed of matrix products."""

import pytest
import torch

from training.peak_flops import GPU_PEAK, peak_flops
from training.speed import WARMUP_STEPS, Speed, time_calls

CPU = torch.device("cpu")


def test_step_metrics_exclude_time_between_steps(clock):
    speed = Speed(CPU, tokens=100, flops=2e9, peak=1e10)
    for _ in range(2):
        speed.start_step()
        clock[0] += 0.75
        read = speed.end_step()
        clock[0] += 10  # an evaluation
        assert read() == pytest.approx(
            {"step_ms": 750, "tokens_per_second": 100 / 0.75, "mfu": 0.2 / 0.75}
        )


def test_median_excludes_warmup_steps_if_there_are_others(clock):
    speed = Speed(CPU, tokens=100, flops=2e9, peak=1e10)
    assert speed.median() == {}
    for seconds in [9.0] * WARMUP_STEPS + [0.5, 1.0, 2.0]:
        speed.start_step()
        clock[0] += seconds
        speed.end_step()()
        if len(speed.step_seconds) == 1:
            assert speed.median()["step_ms"] == 9000.0
    assert speed.median() == {"step_ms": 1000.0, "tokens_per_second": 100.0, "mfu": 0.2}
    speed.step_seconds.extend([0.25] * 10**6)  # in a long run, the last steps count
    assert len(speed.step_seconds) == 1000 and speed.median()["step_ms"] == 250.0


def test_time_calls_fills_the_time_within_min_and_max_calls(clock):
    def call():
        clock[0] += 0.5
        calls.append(1)

    for settings, timed, warmup in (
        (dict(min_calls=7, seconds=0.0, max_calls=100), 7, 0),
        (dict(min_calls=2, seconds=5.0, max_calls=100), 10, 2),
        (dict(min_calls=2, seconds=100.0, max_calls=5), 5, 1),
    ):
        calls = []
        assert time_calls(call, CPU, **settings) == [0.5] * timed
        assert len(calls) == timed + warmup


def test_peak_of_an_unknown_device_is_measured():
    assert peak_flops(CPU, torch.float32) > 0


def test_known_gpu_has_its_data_sheet_peak_except_for_tf32(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    assert (peak_flops(cuda, torch.float16), peak_flops(cuda, torch.float32)) == GPU_PEAK[
        "NVIDIA H200"
    ]
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_flops(cuda, torch.bfloat16) == 989e12

    monkeypatch.setattr(torch, "randn", lambda *args, **kwargs: 1 / 0)  # it would measure
    with pytest.raises(ZeroDivisionError):
        peak_flops(cuda, torch.float32)
