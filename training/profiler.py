"""train.profile=true: records a few training steps with torch.profiler and prints where their time goes.

It writes a trace and prints two tables: the phases of a step, and the operations that take the most time. The training
code contains no labels: `wrap_loader` labels waiting for data, PyTorch labels optimizer steps and the nodes of the
backward pass, and the forward pass is the time between data and backward pass. Compiled steps have the same labels.
"""

import os
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from common.console import make_table, pluralize
from training.speed import WARMUP_STEPS, synchronize

MAX_RECORDED_STEPS = 3
MAX_MICRO_BATCHES = 24  # no step is recorded after this many micro batches, which limits the size of the trace
MAX_OPERATIONS = 10  # rows of the table
MAX_NAME_LENGTH = 46  # characters of an operation's name, so that the table is 80 columns wide
PHASES = WAITING, FORWARD, BACKWARD, OPTIMIZER = ("waiting for data", "forward", "backward", "optimizer")
STEP, OTHER = "step", "other"
# PyTorch's labels
BACKWARD_NODE = "autograd::engine::evaluate_function"
OPTIMIZER_STEP = "Optimizer.step#"


class NullProfiler:
    """Profiler that records nothing. A context manager around the training loop."""

    def __enter__(self) -> "NullProfiler":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        pass

    def wrap_loader(self, batches: Iterator) -> Iterator:
        """Pass `batches` through, and label the time that a step waits for them."""
        return batches

    def start(self) -> None:
        """Call at the start of each step."""

    def stop(self) -> None:
        """Call at the end of each step."""


class StepProfiler(NullProfiler):
    """Records up to MAX_RECORDED_STEPS steps after the first WARMUP_STEPS; writes `trace` and prints the tables."""

    def __init__(self, device: torch.device, trace: Path, console: Console):
        self.device, self.trace, self.console = device, trace, console
        self.steps = self.recorded_steps = self.recorded_micro_batches = 0
        self._profiler: torch.profiler.profile | None = None
        self._step_label: torch.profiler.record_function | None = None  # while a step is recorded

    def wrap_loader(self, batches: Iterator) -> Iterator:
        while True:
            is_recording = self._step_label is not None
            with torch.profiler.record_function(WAITING) if is_recording else nullcontext():
                batch = next(batches)
            self.recorded_micro_batches += is_recording
            yield batch

    def start(self) -> None:
        self.steps += 1
        if self.steps == WARMUP_STEPS:  # the profiler warms up during this step
            if self.device.type == "cpu":
                os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise it writes messages to stderr
            schedule = torch.profiler.schedule(wait=0, warmup=1, active=MAX_RECORDED_STEPS)
            self._profiler = torch.profiler.profile(schedule=schedule)
            self._profiler.start()
        elif self._profiler is not None:
            self._profiler.step()
            synchronize(self.device)  # so that the step includes no kernels of the previous step
            self._step_label = torch.profiler.record_function(STEP)
            self._step_label.__enter__()

    def stop(self) -> None:
        if self._step_label is None:
            return
        synchronize(self.device)
        self._step_label.__exit__(None, None, None)
        self._step_label = None
        self.recorded_steps += 1
        if self.recorded_steps == MAX_RECORDED_STEPS or self.recorded_micro_batches >= MAX_MICRO_BATCHES:
            self._finish()

    def __exit__(self, kind, error, traceback) -> None:
        if self._profiler is not None and self.recorded_steps and error is None:
            self._finish()
        elif self._profiler is not None:
            self._profiler.stop()
        if not self.recorded_steps and error is None:
            self._print(
                f"nothing was profiled: the first {WARMUP_STEPS} steps are for warmup, and this run took {self.steps}; "
                f"train for at least {pluralize(WARMUP_STEPS + 1 - self.steps, 'more step')}"
            )

    def _finish(self) -> None:
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        profiler.export_chrome_trace(str(self.trace))
        breakdown = summarize_events(profiler.events())
        first, last = self.steps - self.recorded_steps + 1, self.steps
        self._print(f"time per step, {f'step {last}' if first == last else f'mean of steps {first} to {last}'}", "bold")
        for table in make_breakdown_tables(breakdown):
            self.console.print(table)
        if breakdown.on_device:
            self._print("times of GPU kernels, except waiting for data; other includes the time when the GPU is idle")
        self._print(f"trace    {self.trace} (open it at ui.perfetto.dev or chrome://tracing)")

    def _print(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False, soft_wrap=True)


def build_profiler(is_enabled: bool, device: torch.device, folder: Path, console: Console) -> NullProfiler:
    """Build a profiler whose trace is in `folder`, or one that records nothing."""
    return StepProfiler(device, folder / "trace.json.gz", console) if is_enabled else NullProfiler()


@dataclass(frozen=True)
class StepBreakdown:
    """Milliseconds per step, mean over the recorded steps. The phases add up to step_ms.

    operations: (name, self time, calls), sorted by time. on_device: the times are those of the device's kernels, except
    for waiting (host time) and other (the rest of the step, in which the device may be idle). Without kernels in the
    trace, all times are host times.
    """

    step_ms: float
    phases: dict[str, float]
    operations: list[tuple[str, float, float]]
    on_device: bool


def summarize_events(events: list[Any]) -> StepBreakdown:
    """Time per phase and operation from the profiler's events (torch.autograd.profiler_util.FunctionEvent)."""
    events = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    events.sort(key=lambda event: event.time_range.start)
    on_device = any(event.kernels for event in events)
    steps = [event.time_range for event in events if event.name == STEP]
    phases = dict.fromkeys(PHASES, 0.0)
    operations = defaultdict(lambda: [0.0, 0])  # name -> [time, calls]
    for step in steps:
        step_events = [e for e in events if step.start <= e.time_range.start and e.time_range.end <= step.end]
        changes = _find_phase_changes(step_events, step.start)
        times = [time for time, _ in changes]
        for (start, phase), end in zip(changes, [*times[1:], step.end], strict=True):
            if phase == WAITING or (phase in phases and not on_device):
                phases[phase] += end - start
        for event in step_events:
            if event.is_user_annotation:
                continue
            operation = operations[event.name]
            operation[0] += event.self_device_time_total if on_device else event.self_cpu_time_total
            operation[1] += 1
            phase = changes[bisect_right(times, event.time_range.start) - 1][1]
            if phase in (FORWARD, BACKWARD, OPTIMIZER):
                phases[phase] += sum(kernel.duration for kernel in event.kernels)
    scale = 1000 * len(steps)  # events have microseconds
    step_ms = sum(step.elapsed_us() for step in steps) / scale
    phases = {phase: time / scale for phase, time in phases.items()}
    phases[OTHER] = max(0.0, step_ms - sum(phases.values()))
    rows = [(name, time / scale, calls / len(steps)) for name, (time, calls) in operations.items()]
    return StepBreakdown(step_ms, phases, sorted(rows, key=lambda row: -row[1]), on_device)


def _find_phase_changes(events: list[Any], start: float) -> list[tuple[float, str]]:
    """(time, phase that begins) for the events of a step, both sorted by time on the host's clock."""
    changes = [(start, OTHER)]
    for event in events:
        start, end = event.time_range.start, event.time_range.end
        if event.name == WAITING:
            changes += [(start, WAITING), (end, FORWARD)]
        elif event.name.startswith(OPTIMIZER_STEP):
            changes += [(start, OPTIMIZER), (end, OTHER)]
        elif event.name.startswith(BACKWARD_NODE):
            if changes[-1][1] == FORWARD:
                changes += [(start, BACKWARD), (end, OTHER)]
            elif changes[-2][1] == BACKWARD:  # extend the backward pass by this node
                changes[-1] = (max(end, changes[-1][0]), OTHER)
    return changes


def make_breakdown_tables(breakdown: StepBreakdown) -> tuple[Table, Table]:
    """The phases of a step, and the operations that take the most time."""
    phases, operations = make_table("phase", "ms", ""), make_table("operation", "ms", "", "calls")
    for phase, time in breakdown.phases.items():
        phases.add_row(phase, f"{time:,.2f}", f"{time / breakdown.step_ms:.1%}")
    phases.add_row(STEP, f"{breakdown.step_ms:,.2f}", "", style="bold")
    for name, time, calls in breakdown.operations[:MAX_OPERATIONS]:
        short = name if len(name) <= MAX_NAME_LENGTH else f"{name[: MAX_NAME_LENGTH - 1]}…"
        operations.add_row(short, f"{time:,.2f}", f"{time / breakdown.step_ms:.1%}", f"{calls:,.3g}")
    return phases, operations
