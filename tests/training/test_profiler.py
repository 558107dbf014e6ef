"""train.profile=true: the phases of steps whose phases are known, a trace that opens, and the same run as without."""

import gzip
import json
import time
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from helpers import metrics, summary, untimed
from rich.console import Console

from training import profiler as profiling
from training.profiler import PARTS, STEPS, NullProfiler, StepProfiler, build_profiler, summarize_events
from training.speed import WARM_UP


class Asleep(torch.nn.Module):
    """A linear layer that takes at least 8 ms forward, and 12 ms backward."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        time.sleep(0.008)
        y = self.linear(x)
        y.register_hook(lambda gradient: time.sleep(0.012))
        return y.sum()


def batches():
    while True:
        time.sleep(0.004)
        yield torch.ones(2, 4)


def steps(profiler, how_many, parts=1):
    """Steps whose optimizer takes at least 6 ms, of `parts` passes each; between them 30 ms that are no step's."""
    model = Asleep()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    sgd.register_step_pre_hook(lambda *_: time.sleep(0.006))
    data = profiler.wrap_loader(batches())
    for _ in range(how_many):
        profiler.start()
        for _ in range(parts):
            model(next(data)).backward()
        sgd.step()
        profiler.stop()
        time.sleep(0.03)


@pytest.fixture
def recording(tmp_path, monkeypatch):
    """A Recording, and what it found."""
    found = []
    monkeypatch.setattr(profiling, "tables", lambda spent: found.append(spent) or ())
    return StepProfiler(torch.device("cpu"), tmp_path / "trace.json.gz", Console(quiet=True)), found


def test_each_phase_has_its_own_time_and_what_lies_between_steps_is_none_of_it(recording):
    profiler, found = recording
    with profiler:
        steps(profiler, WARM_UP + STEPS + 1, parts=2)
    (spent,) = found
    slept = {"waiting for data": 8, "forward": 16, "backward": 24, "optimizer": 6, "the rest": 0}
    assert list(spent.phases) == list(slept)
    for phase, least in slept.items():
        assert spent.phases[phase] >= 0.95 * least, phase
    assert sum(spent.phases.values()) == pytest.approx(spent.step)
    calls = {name: calls for name, _, calls in spent.operations}
    assert calls["aten::linear"] == calls["AddmmBackward0"] == 2
    assert not {"a step", "waiting for data"} & set(calls)
    times = [time for _, time, _ in spent.operations]
    assert times == sorted(times, reverse=True)
    assert sum(times) < spent.step


@pytest.mark.parametrize(
    ("how_many", "parts", "recorded"), [(WARM_UP + 1, 1, 1), (WARM_UP + 2, 1, 2), (WARM_UP + 3, PARTS, 1)]
)
def test_a_shorter_run_and_steps_of_many_parts_are_recorded_as_far_as_they_go(
    recording, how_many, parts, recorded, monkeypatch
):
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    profiler, found = recording
    with profiler:
        steps(profiler, how_many, parts)
    assert (len(found), profiler.recorded) == (1, recorded)


def test_an_error_within_a_recorded_step_stays_that_error(recording):
    profiler, found = recording
    with pytest.raises(ZeroDivisionError), profiler:
        for _ in range(WARM_UP + 1):
            profiler.start()
        raise ZeroDivisionError
    assert found == []
    with torch.profiler.profile():  # another can begin: that one has ended
        pass


def event(name, start, end, kernels=(), own=0.0, annotation=False):
    return SimpleNamespace(
        name=name, device_type=torch.autograd.DeviceType.CPU, is_user_annotation=annotation, self_cpu_time_total=0.0,
        self_device_time_total=own, kernels=[SimpleNamespace(duration=duration) for duration in kernels],
        time_range=SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start),
    )  # fmt: skip


def test_on_a_device_the_times_are_those_of_its_kernels():
    """Launched at once, they run on while the host waits at the end of the step."""
    spent = summarize_events([
        event("a step", 0, 10_000, annotation=True),
        event("waiting for data", 0, 100, annotation=True),
        event("aten::mm", 110, 120, kernels=[2000], own=2000),
        event("autograd::engine::evaluate_function: MmBackward0", 200, 300),
        event("aten::mm", 210, 220, kernels=[1500, 1500], own=3000),
        event("aten::norm", 350, 360, kernels=[100], own=100),
        event("Optimizer.step#AdamW.step", 400, 500, kernels=[1000], annotation=True),
        event("aten::_fused_adamw_", 410, 420, kernels=[900], own=900),
    ])  # fmt: skip
    assert spent.on_device and spent.step == 10
    expected = {"waiting for data": 0.1, "forward": 2, "backward": 3, "optimizer": 0.9, "the rest": 4}
    assert spent.phases == pytest.approx(expected)
    assert spent.operations[0] == ("aten::mm", 5.0, 2)


def test_a_profiled_run_is_the_same_run_and_says_where_its_time_went(train, workdir, capsys):
    settings = ["train.steps=9", "train.micro_batch_size=2", "model.dropout=0.1", "eval.every=7"]
    assert train("name=a", *settings) == 0
    assert "where the time goes" not in capsys.readouterr().out
    assert not (workdir / "runs/a/trace.json.gz").exists()
    assert train("name=b", "train.profile=true", *settings) == 0
    out = capsys.readouterr().out
    assert untimed(metrics("a")) == untimed(metrics("b"))
    assert summary("b")["status"] == "finished"
    lines = out.splitlines()
    at = lines.index("where the time goes, in steps 6 to 8 of this process")
    assert [line.split("  ")[0] for line in lines[at + 2 : at + 8]] == [
        "waiting for data", "forward", "backward", "optimizer", "the rest", "a step"
    ]  # fmt: skip
    assert sum(float(line.split()[-1].rstrip("%")) for line in lines[at + 2 : at + 7]) == pytest.approx(100, abs=0.5)
    assert max(map(len, lines[at : at + 19])) <= 80
    assert lines[at + 19].startswith("trace    runs/b/trace.json.gz")
    assert lines.index(next(line for line in lines if line.startswith("step 9: validation"))) > at
    with gzip.open(workdir / "runs/b/trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    assert [each.get("name") for each in events].count("a step") == STEPS


def test_a_run_that_is_too_short_to_profile_says_so_and_finishes(train, workdir, capsys):
    assert train("name=a", "train.steps=3", "train.profile=true") == 0
    out = capsys.readouterr().out
    assert "the first 5 steps of a process warm up, and this one took 3; let it go on for 3 more steps or longer" in out
    assert not (workdir / "runs/a/trace.json.gz").exists()


def test_without_it_batches_are_what_they_were_and_torchs_profiler_is_not_begun(tmp_path):
    off, data = build_profiler(False, torch.device("cpu"), tmp_path, Console()), count()
    assert type(off) is NullProfiler
    with off as profiler:
        assert profiler.wrap_loader(data) is data
        for _ in range(WARM_UP + 1):
            profiler.start()
            assert not torch.autograd.profiler._is_profiler_enabled
            profiler.stop()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["false", "true"])
def test_on_cuda_the_kernels_are_seen(train, workdir, capsys, compiled):
    settings = ["device=cuda", f"compile={compiled}", "train.steps=9", "train.micro_batch_size=2", "model.n_embd=64"]
    assert train("name=a", "train.profile=true", *settings) == 0
    out = capsys.readouterr().out
    assert "times are the device's own, but for waiting" in out
    for phase in ("forward", "backward", "optimizer"):
        (line,) = (line for line in out.splitlines() if line.startswith(phase))
        assert float(line.split()[1]) > 0, phase
