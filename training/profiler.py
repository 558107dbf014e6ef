"""train.profile=true: records a few training steps with torch.profiler and prints where their time goes.

It writes a trace and prints two tables: the phases of a step, and the operations that take the most time. While a step
is recorded, the host waits for the device at the start and the end of each phase. The host time of a phase therefore
includes its kernels.
"""

import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path

import torch
from torch.profiler import ProfilerAction

from common.console import ProgressBar, make_table, pluralize
from training.speed import WARMUP_STEPS, synchronize

MAX_RECORDED_STEPS = 3
MAX_MICRO_BATCHES = 24  # no step is recorded after this many micro batches, which limits the size of the trace
MAX_OPERATIONS = 10  # rows of the table
MAX_NAME_LENGTH = 46  # characters of an operation's name, so that the table is 80 columns wide
STEP = "step"


class StepProfiler:
    """Context manager around the training loop. Records up to MAX_RECORDED_STEPS steps after the first WARMUP_STEPS.

    accumulation: micro batches per step. trace: the file to write. The tables are printed above the progress bar.
    """

    def __init__(self, device: torch.device, accumulation: int, trace: Path, bar: ProgressBar):
        self.device, self.trace, self.bar = device, trace, bar
        self.steps = self.recorded_steps = 0
        self.seconds: dict[str, float] = defaultdict(float)  # of each phase, over all recorded steps
        if device.type == "cpu":
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler writes messages to stderr
        self.max_steps = min(MAX_RECORDED_STEPS, ceil(MAX_MICRO_BATCHES / accumulation))
        schedule = torch.profiler.schedule(wait=WARMUP_STEPS, warmup=1, active=self.max_steps, repeat=1)
        self._profiler = torch.profiler.profile(schedule=schedule, on_trace_ready=self._report)

    @property
    def is_recording(self) -> bool:
        actions = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
        return self._profiler is not None and self._profiler.current_action in actions

    def start_step(self) -> None:
        self.steps += 1
        if self._profiler is not None:
            self._profiler.step()
        self._step = self.phase(STEP)
        self._step.__enter__()

    def end_step(self) -> None:
        self._step.__exit__(None, None, None)
        self.recorded_steps += self.is_recording
        if self.recorded_steps == self.max_steps:
            self._stop()

    def _stop(self) -> None:
        """Stop recording, report, and free the memory of the events."""
        if self._profiler is not None:
            self._profiler.stop()
            self._profiler = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager: measure and label a phase if the current step is recorded."""
        if not self.is_recording:
            yield
            return
        synchronize(self.device)
        started = time.perf_counter()
        with torch.profiler.record_function(name):
            yield
            synchronize(self.device)
        self.seconds[name] += time.perf_counter() - started

    def __enter__(self) -> "StepProfiler":
        self._profiler.start()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if error is not None:
            self.recorded_steps = 0  # the last step is incomplete: no report
        self._stop()
        if error is None and not self.recorded_steps:
            self.bar.print(
                f"nothing was profiled: the first {WARMUP_STEPS} steps are for warmup, and this run had {self.steps}; "
                f"train for at least {pluralize(WARMUP_STEPS + 1 - self.steps, 'more step')}"
            )

    def _report(self, profiler: torch.profiler.profile) -> None:
        """Write the trace and print the tables."""
        if not self.recorded_steps:
            return
        profiler.export_chrome_trace(str(self.trace))
        first, last = WARMUP_STEPS + 1, WARMUP_STEPS + self.recorded_steps
        steps = f"step {last}" if first == last else f"mean of steps {first} to {last}"
        self.bar.print(f"time per step, {steps}", "bold")
        step_seconds, to_ms = self.seconds.pop(STEP), 1000 / self.recorded_steps
        self.seconds["other"] = step_seconds - sum(self.seconds.values())
        phases, operations = make_table("phase", "ms", ""), make_table("operation", "ms", "", "calls")
        for name, seconds in self.seconds.items():
            phases.add_row(name, f"{seconds * to_ms:,.2f}", f"{seconds / step_seconds:.1%}")
        phases.add_row(STEP, f"{step_seconds * to_ms:,.2f}", "", style="bold")
        times, calls = sum_operations(profiler)
        for name, seconds in sorted(times.items(), key=lambda item: -item[1])[:MAX_OPERATIONS]:
            short = name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 1]}…"
            mean_calls = f"{calls[name] / self.recorded_steps:,.3g}"
            operations.add_row(short, f"{seconds * to_ms:,.2f}", f"{seconds / step_seconds:.1%}", mean_calls)
        self.bar.console.print(phases, operations)
        self.bar.print(f"trace    {self.trace} (open it at ui.perfetto.dev or chrome://tracing)")


def sum_operations(profiler: torch.profiler.profile) -> tuple[dict[str, float], dict[str, int]]:
    """(seconds, calls) of each operation in the recorded steps. Unlike key_averages(), it omits evaluations.

    The seconds exclude the operations that it calls. On a GPU, they are those of its kernels.
    """
    events = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CPU]
    on_device = any(event.kernels for event in events)
    steps = [event.time_range for event in events if event.name == STEP]
    seconds, calls = defaultdict(float), Counter()
    for event in events:
        in_step = any(step.start <= event.time_range.start <= step.end for step in steps)
        if in_step and not event.is_user_annotation:
            seconds[event.name] += (event.self_device_time_total if on_device else event.self_cpu_time_total) / 1e6
            calls[event.name] += 1
    return seconds, calls
