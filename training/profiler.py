"""train.profile=true: records a few training steps with torch.profiler, prints its table, and writes a trace."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

import torch

from training.speed import WARMUP_STEPS

MAX_RECORDED_STEPS = 3
MAX_MICRO_BATCHES = 24  # no step is recorded after this many micro batches, which limits the size of the trace


class StepProfiler:
    """Context manager around the training loop. Records a few steps after the warmup steps.

    accumulation: micro batches per step.
    trace: path of the trace that it writes.
    """

    def __init__(self, device: torch.device, accumulation: int, trace: Path, print_line: Callable[[str], None]):
        self.trace, self.print_line = trace, print_line
        self.sort_by = f"self_{'device' if device.type == 'cuda' else 'cpu'}_time_total"
        recorded = min(MAX_RECORDED_STEPS, -(-MAX_MICRO_BATCHES // accumulation))
        self.steps, self.last_step = 0, WARMUP_STEPS + recorded
        if device.type == "cpu":
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler writes messages to stderr
        schedule = torch.profiler.schedule(wait=WARMUP_STEPS - 1, warmup=1, active=recorded, repeat=1)
        self._profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=self._report)

    def end_step(self) -> None:
        self.steps += 1
        if self.steps <= self.last_step:
            self._profiler.step()  # after the last recorded step, it calls _report

    def _report(self, profiler: torch.profiler.profile) -> None:
        if self.steps == self.last_step:  # otherwise the run ends early
            profiler.export_chrome_trace(str(self.trace))
            table = profiler.key_averages().table(self.sort_by, row_limit=20, max_name_column_width=40)
            self.print_line(f"steps {WARMUP_STEPS + 1} to {self.last_step}\n{table}")
            self.print_line(f"trace    {self.trace} (open it at ui.perfetto.dev or chrome://tracing)")

    def __enter__(self) -> Self:
        self._profiler.start()
        return self

    def __exit__(self, *_) -> None:
        self._profiler.stop()
        if self.steps < self.last_step:
            self.print_line(f"nothing was profiled: train.profile=true needs a run of {self.last_step} steps or more")
