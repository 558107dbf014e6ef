"""train.profile=true: phases of steps, the trace, and unchanged results."""

import gzip
import json
import time
from types import SimpleNamespace

import pytest
import torch
from helpers import metrics, summary, untimed

from common.console import ProgressBar
from training.profiler import MAX_MICRO_BATCHES, MAX_RECORDED_STEPS, StepProfiler, sum_operations
from training.speed import WARMUP_STEPS

PHASES_MS = {"waiting for data": 8, "forward": 16, "backward": 24, "optimizer": 6}  # per step, at least


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


def run_steps(profiler, num_steps, micro_batches=2):
    """Steps with the times of PHASES_MS. Between steps, aten::erfinv runs, as in an evaluation."""
    model = SlowModel()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(num_steps):
        profiler.start_step()
        for _ in range(micro_batches):
            with profiler.phase("waiting for data"):
                time.sleep(0.004)
            with profiler.phase("forward"):
                loss = model(torch.ones(2, 4))
            with profiler.phase("backward"):
                loss.backward()
        with profiler.phase("optimizer"):
            time.sleep(0.006)
            sgd.step()
        profiler.end_step()
        torch.ones(1).erfinv()


def build_profiler(folder, accumulation=2):
    """A StepProfiler, and the list of lines and tables that it prints."""
    bar, printed = ProgressBar(), []
    bar.print = lambda text, style=None: printed.append(text)
    bar.console.print = lambda *tables: printed.extend(tables)
    return StepProfiler(torch.device("cpu"), accumulation, folder / "trace.json.gz", bar), printed


def test_time_is_assigned_to_phases_and_operations_of_steps_only(tmp_path):
    profiler, printed = build_profiler(tmp_path)
    with profiler:
        run_steps(profiler, WARMUP_STEPS + MAX_RECORDED_STEPS)
        title, phases, operations, trace = printed  # printed after the last recorded step, not at the end of the run
        run_steps(profiler, 1)
    assert len(printed) == 4
    assert title == "time per step, mean of steps 6 to 8"
    names, times, _ = (list(column.cells) for column in phases.columns)
    assert names == [*PHASES_MS, "other", "step"]
    times = dict(zip(names, map(float, times), strict=True))
    for phase, min_ms in PHASES_MS.items():
        assert times[phase] >= 0.95 * min_ms, phase
    assert times["other"] >= 0
    assert times["step"] == pytest.approx(sum(list(times.values())[:-1]), abs=0.05)
    times = list(operations.columns[1].cells)
    assert [float(time) for time in times] == sorted(map(float, times), reverse=True)
    assert "trace.json.gz" in trace


def test_operations_exclude_phases_and_evaluations(tmp_path, monkeypatch):
    results = []
    monkeypatch.setattr("training.profiler.sum_operations", lambda p: results.append(sum_operations(p)) or results[0])
    profiler, _ = build_profiler(tmp_path)
    with profiler:
        run_steps(profiler, WARMUP_STEPS + MAX_RECORDED_STEPS + 1)
    ((seconds, calls),) = results
    assert calls["aten::linear"] == calls["AddmmBackward0"] == 2 * MAX_RECORDED_STEPS
    assert not {"step", "waiting for data", "aten::erfinv"} & set(calls)
    assert set(seconds) == set(calls)


def test_operations_have_the_time_of_their_kernels_on_a_gpu():
    """With events as a GPU records them: an operation's kernels take longer than the call on the host."""

    def event(name, start, end, device_us=0, kernels=()):
        return SimpleNamespace(
            name=name,
            time_range=SimpleNamespace(start=start, end=end),
            kernels=kernels,
            self_cpu_time_total=end - start,
            self_device_time_total=device_us,
            is_user_annotation=name == "step",
            device_type=torch.autograd.DeviceType.CPU,
        )

    events = [
        event("step", 0, 100),
        event("aten::mm", 10, 12, device_us=50, kernels=["kernel"]),
        event("aten::view", 20, 21),
    ]
    seconds, calls = sum_operations(SimpleNamespace(events=lambda: events))
    assert seconds == {"aten::mm": pytest.approx(50e-6), "aten::view": 0}
    assert calls == {"aten::mm": 1, "aten::view": 1}


@pytest.mark.parametrize(
    ("num_steps", "micro_batches", "recorded"),
    [(WARMUP_STEPS + 1, 1, 1), (WARMUP_STEPS + 2, 1, 2), (WARMUP_STEPS + 3, MAX_MICRO_BATCHES, 1)],
)
def test_short_runs_and_steps_of_many_micro_batches_record_fewer_steps(
    tmp_path, num_steps, micro_batches, recorded, monkeypatch
):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    profiler, printed = build_profiler(tmp_path, micro_batches)
    with profiler:
        run_steps(profiler, num_steps, micro_batches)
    assert (len(printed), profiler.recorded_steps) == (4, recorded)


def test_error_in_a_recorded_step_propagates_and_stops_the_profiler(tmp_path):
    profiler, printed = build_profiler(tmp_path)
    with pytest.raises(ZeroDivisionError), profiler:
        run_steps(profiler, WARMUP_STEPS + 1)
        profiler.start_step()
        raise ZeroDivisionError
    assert printed == []
    with torch.profiler.profile():  # only one profiler can be active
        pass


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
    assert "the first 5 steps are for warmup, and this run had 3; train for at least 3 more steps" in out
    assert not (workdir / "runs/a/trace.json.gz").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_phases_on_cuda_include_kernels(train, workdir, capsys, compiled):
    settings = ["device=cuda", f"compile={compiled}", "train.steps=9", "train.micro_batch_size=2", "model.n_embd=64"]
    assert train("name=a", "train.profile=true", *settings) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    for name in ("forward", "backward", "optimizer", "aten::mm"):
        (line,) = (line for line in lines if line.startswith(f"{name} "))
        assert float(line.split()[1]) > 0, name
