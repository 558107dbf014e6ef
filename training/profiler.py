"""train.profile=true: profiles steps with torch.profiler."""

import os
from collections.abc import Callable
from pathlib import Path

import torch

from training.speed import WARMUP_STEPS

RECORDED_STEPS = 3


class StepProfiler(torch.profiler.profile):
    """Records steps after the warmup, prints a table, and writes trace.json.gz.

    The loop calls step() after each step.
    """

    def __init__(self, device: torch.device, folder: Path, print_line: Callable[[str], None]):
        self.trace = folder / "trace.json.gz"
        self.print_line = print_line
        self.sort_by = "self_cpu_time_total"
        if device.type == "cuda":
            self.sort_by = "self_device_time_total"
        else:
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # no messages of the profiler on stderr
        schedule = torch.profiler.schedule(
            wait=WARMUP_STEPS - 1, warmup=1, active=RECORDED_STEPS, repeat=1
        )
        super().__init__(schedule=schedule, on_trace_ready=StepProfiler._report)

    def _report(self) -> None:
        if self.step_num != WARMUP_STEPS + RECORDED_STEPS:  # the run ends before
            return
        self.export_chrome_trace(str(self.trace))
        table = self.key_averages().table(self.sort_by, row_limit=20, max_name_column_width=40)
        self.print_line(f"steps {WARMUP_STEPS + 1} to {self.step_num}\n{table}")
        self.print_line(f"trace    {self.trace} (open it at ui.perfetto.dev or chrome://tracing)")
