"""train.profile=true: the table of operations, the trace, and unchanged results."""

import gzip
import json
from contextlib import suppress

import torch

from training.profiler import RECORDED_STEPS, StepProfiler
from training.speed import WARMUP_STEPS


def run_steps(folder, num_steps, error=None) -> list[str]:
    """Run steps with one matrix product. Returns what the profiler prints."""
    printed = []
    profiler = StepProfiler(torch.device("cpu"), folder, printed.append)
    with suppress(ZeroDivisionError), profiler:
        for _ in range(num_steps):
            with torch.profiler.record_function("forward"):
                torch.ones(2, 2) @ torch.ones(2, 2)
            profiler.step()
        torch.ones(1).erfinv()  # an evaluation after the last step
        if error is not None:
            raise error
    return printed


def test_table_and_trace_contain_the_recorded_steps(tmp_path):
    table, trace = run_steps(tmp_path, WARMUP_STEPS + RECORDED_STEPS)
    calls = {
        line.split()[0]: int(line.split()[-1])
        for line in table.splitlines()
        if " aten::m" in f" {line.strip()}"
    }
    assert calls["aten::mm"] == RECORDED_STEPS
    assert "forward" in table and "erfinv" not in table
    assert "trace.json.gz" in trace
    with gzip.open(tmp_path / "trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    annotations = [event.get("name") for event in events if event.get("cat") == "user_annotation"]
    assert annotations.count("forward") == RECORDED_STEPS


def test_short_run_and_error_write_no_profile(tmp_path):
    for num_steps, error in ((3, None), (WARMUP_STEPS + 1, ZeroDivisionError())):
        assert run_steps(tmp_path, num_steps, error=error) == []
        assert not (tmp_path / "trace.json.gz").exists()
    with torch.profiler.profile():  # only one profiler can be active
        pass
