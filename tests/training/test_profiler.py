"""train.profile=true: phases of steps, the trace, and unchanged results."""

import gzip
import json
import time
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from helpers import metrics, summary, untimed
from rich.console import Console

from training import profiler as profiler_module
from training.profiler import (
    MAX_MICRO_BATCHES,
    MAX_RECORDED_STEPS,
    NullProfiler,
    StepProfiler,
    build_profiler,
    summarize_events,
)
from training.speed import WARMUP_STEPS


class SlowModel(torch.nn.Module):
    """A linear layer that takes at least 8 ms forward, and 12 ms backward."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        time.sleep(0.008)
        y = self.linear(x)
        y.register_hook(lambda gradient: time.sleep(0.012))
        return y.sum()


def load_batches():
    while True:
        time.sleep(0.004)
        yield torch.ones(2, 4)


def run_steps(profiler, num_steps, micro_batches=1):
    """Steps whose optimizer takes at least 6 ms. Between steps, aten::erfinv runs."""
    model = SlowModel()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sgd.register_step_pre_hook(lambda *_: time.sleep(0.006))
    batches = profiler.wrap_loader(load_batches())
    for _ in range(num_steps):
        profiler.start()
        for _ in range(micro_batches):
            model(next(batches)).backward()
        sgd.step()
        profiler.stop()
        torch.ones(1).erfinv()


@pytest.fixture
def profiler_and_breakdowns(tmp_path, monkeypatch):
    """A StepProfiler, and the list of breakdowns that it prints."""
    breakdowns = []
    monkeypatch.setattr(profiler_module, "make_breakdown_tables", lambda breakdown: breakdowns.append(breakdown) or ())
    return StepProfiler(torch.device("cpu"), tmp_path / "trace.json.gz", Console(quiet=True)), breakdowns


def test_time_is_assigned_to_phases_and_operations_of_steps_only(profiler_and_breakdowns):
    profiler, breakdowns = profiler_and_breakdowns
    with profiler:
        run_steps(profiler, WARMUP_STEPS + MAX_RECORDED_STEPS + 1, micro_batches=2)
    (breakdown,) = breakdowns
    slept_ms = {"waiting for data": 8, "forward": 16, "backward": 24, "optimizer": 6}
    assert list(breakdown.phases) == [*slept_ms, "other"]
    for phase, min_ms in slept_ms.items():
        assert breakdown.phases[phase] >= 0.95 * min_ms, phase
    assert sum(breakdown.phases.values()) == pytest.approx(breakdown.step_ms)
    calls = {name: calls for name, _, calls in breakdown.operations}
    assert calls["aten::linear"] == calls["AddmmBackward0"] == 2
    assert not {"step", "waiting for data", "aten::erfinv"} & set(calls)
    times = [time for _, time, _ in breakdown.operations]
    assert times == sorted(times, reverse=True)
    assert sum(times) < breakdown.step_ms


@pytest.mark.parametrize(
    ("num_steps", "micro_batches", "recorded"),
    [(WARMUP_STEPS + 1, 1, 1), (WARMUP_STEPS + 2, 1, 2), (WARMUP_STEPS + 3, MAX_MICRO_BATCHES, 1)],
)
def test_short_runs_and_steps_of_many_micro_batches_record_fewer_steps(
    profiler_and_breakdowns, num_steps, micro_batches, recorded, monkeypatch
):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    profiler, breakdowns = profiler_and_breakdowns
    with profiler:
        run_steps(profiler, num_steps, micro_batches)
    assert (len(breakdowns), profiler.recorded_steps) == (1, recorded)


def test_error_in_a_recorded_step_propagates_and_stops_the_profiler(profiler_and_breakdowns):
    profiler, breakdowns = profiler_and_breakdowns
    with pytest.raises(ZeroDivisionError), profiler:
        for _ in range(WARMUP_STEPS + 1):
            profiler.start()
        raise ZeroDivisionError
    assert breakdowns == []
    with torch.profiler.profile():  # only one profiler can be active
        pass


def event(name, start, end, kernels=(), device_ms=0.0, host_ms=0.0, annotation=False):
    return SimpleNamespace(
        name=name,
        device_type=torch.autograd.DeviceType.CPU,
        is_user_annotation=annotation,
        self_cpu_time_total=1000 * host_ms,
        self_device_time_total=1000 * device_ms,
        kernels=[SimpleNamespace(duration=duration) for duration in kernels],
        time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start),
    )


def test_phases_on_the_host_include_gaps_between_operations():
    breakdown = summarize_events([
        event("aten::mm", 0, 50, host_ms=0.05),  # before the step
        event("step", 100, 10_100, annotation=True),
        event("waiting for data", 200, 1200, annotation=True),
        event("aten::mm", 1300, 3000, host_ms=1.7),
        event("autograd::engine::evaluate_function: MmBackward0", 3200, 5000),
        event("autograd::engine::evaluate_function: AccumulateGrad", 6000, 7200),
        event("aten::norm", 7500, 8000, host_ms=0.5),
        event("Optimizer.step#AdamW.step", 8100, 10_000, annotation=True),
    ])  # fmt: skip
    assert not breakdown.on_device
    expected = {"waiting for data": 1.0, "forward": 2.0, "backward": 4.0, "optimizer": 1.9, "other": 1.1}
    assert breakdown.phases == pytest.approx(expected)
    assert breakdown.operations[:2] == [("aten::mm", 1.7, 1), ("aten::norm", 0.5, 1)]


def test_phases_on_a_gpu_have_the_times_of_kernels():
    """The host launches kernels early and waits for them at the end of the step."""
    breakdown = summarize_events([
        event("step", 0, 10_000, annotation=True),
        event("waiting for data", 0, 100, annotation=True),
        event("aten::mm", 110, 120, kernels=[2000], device_ms=2),
        event("autograd::engine::evaluate_function: MmBackward0", 200, 300),
        event("aten::mm", 210, 220, kernels=[1500, 1500], device_ms=3),
        event("aten::norm", 350, 360, kernels=[100], device_ms=0.1),
        event("Optimizer.step#AdamW.step", 400, 500, kernels=[1000], annotation=True),
        event("aten::_fused_adamw_", 410, 420, kernels=[900], device_ms=0.9),
    ])  # fmt: skip
    assert breakdown.on_device and breakdown.step_ms == 10
    expected = {"waiting for data": 0.1, "forward": 2, "backward": 3, "optimizer": 0.9, "other": 4}
    assert breakdown.phases == pytest.approx(expected)
    assert breakdown.operations[0] == ("aten::mm", 5.0, 2)


@pytest.mark.slow
def test_profiled_run_has_the_same_results_and_prints_its_phases(train, workdir, capsys):
    settings = ["train.steps=9", "train.micro_batch_size=2", "model.dropout=0.1", "eval.every=7"]
    assert train("name=a", *settings) == 0
    assert "time per step" not in capsys.readouterr().out
    assert not (workdir / "runs/a/trace.json.gz").exists()
    assert train("name=b", "train.profile=true", *settings) == 0
    out = capsys.readouterr().out
    assert untimed(metrics("a")) == untimed(metrics("b"))
    assert summary("b")["status"] == "finished"
    lines = [line.strip() for line in out.splitlines()]
    first = lines.index("time per step, mean of steps 6 to 8")
    last = lines.index("trace    runs/b/trace.json.gz (open it at ui.perfetto.dev or chrome://tracing)")
    assert max(map(len, lines[first:last])) <= 80
    percentages = {}
    for phase in ("waiting for data", "forward", "backward", "optimizer", "other"):
        (line,) = (line for line in lines[first:last] if line.startswith(f"{phase} "))
        percentages[phase] = float(line.split()[-1].rstrip("%"))
    assert sum(percentages.values()) == pytest.approx(100, abs=0.5)
    assert any(line.startswith("aten::") for line in lines[first:last])
    with gzip.open(workdir / "runs/b/trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert [event.get("name") for event in events].count("step") == MAX_RECORDED_STEPS


def test_run_that_is_too_short_to_profile_prints_a_message_and_finishes(train, workdir, capsys):
    assert train("name=a", "train.steps=3", "train.profile=true") == 0
    out = capsys.readouterr().out
    assert "the first 5 steps are for warmup, and this run took 3; train for at least 3 more steps" in out
    assert not (workdir / "runs/a/trace.json.gz").exists()


def test_disabled_profiler_changes_nothing(tmp_path):
    profiler, batches = build_profiler(False, torch.device("cpu"), tmp_path, Console()), count()
    assert type(profiler) is NullProfiler
    with profiler:
        assert profiler.wrap_loader(batches) is batches
        for _ in range(WARMUP_STEPS + 1):
            profiler.start()
            assert not torch.autograd.profiler._is_profiler_enabled
            profiler.stop()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_phases_on_cuda_contain_kernel_times(train, workdir, capsys, compiled):
    settings = ["device=cuda", f"compile={compiled}", "train.steps=9", "train.micro_batch_size=2", "model.n_embd=64"]
    assert train("name=a", "train.profile=true", *settings) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("times of GPU kernels") for line in lines)
    for phase in ("forward", "backward", "optimizer"):
        (line,) = (line for line in lines if line.startswith(f"{phase} "))
        assert float(line.split()[1]) > 0, phase
