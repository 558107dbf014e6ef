"""train.profile=true: records a few training steps with torch.profiler, prints its table, and writes a trace."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from training.speed import WARMUP_STEPS

MAX_RECORDED_STEPS = 3
MAX_MICRO_BATCHES = 24  # no step is recorded after this many micro batches, which limits the size of the trace


class StepProfiler(torch.profiler.profile):
    """Context manager around the training loop, which calls step() after each step. Records steps after the warmup.

    accumulation: micro batches per step.
    folder: where it writes trace.json.gz.
    """

    def __init__(self, device: torch.device, accumulation: int, folder: Path, print_line: Callable[[str], None]):
        recorded = min(MAX_RECORDED_STEPS, -(-MAX_MICRO_BATCHES // accumulation))
        schedule = torch.profiler.schedule(wait=WARMUP_STEPS - 1, warmup=1, active=recorded, repeat=1)
        self.last_step, self.trace, self.print_line = WARMUP_STEPS + recorded, folder / "trace.json.gz", print_line
        self.sort_by = f"self_{'device' if device.type == 'cuda' else 'cpu'}_time_total"
        if device.type == "cpu":
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler writes messages to stderr
        super().__init__(schedule=schedule, on_trace_ready=StepProfiler._report)

    def _report(self) -> None:
        if self.step_num == self.last_step:  # otherwise the run ends early
            self.export_chrome_trace(str(self.trace))
            table = self.key_averages().table(self.sort_by, row_limit=20, max_name_column_width=40)
            self.print_line(f"steps {WARMUP_STEPS + 1} to {self.last_step}\n{table}")
            self.print_line(f"trace    {self.trace} (open it at ui.perfetto.dev or chrome://tracing)")

    def stop(self) -> None:
        super().stop()
        if self.step_num < self.last_step:
            self.print_line(f"nothing was profiled: train.profile=true needs a run of {self.last_step} steps or more")
