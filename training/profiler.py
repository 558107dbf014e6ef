"""Where the time of a step goes: train.profile=true records a few steps once the first have warmed up.

torch.profiler writes all that it saw into a trace, of which two tables are made: a step's phases, and the operations
that take the most. Nobody marks the phases: data is waited for in `waiting`, the backward pass is what autograd's
engine runs, the optimizer says so itself, and the forward pass lies between the data and the backward pass. So they
are found alike in eager and in compiled steps.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from common.console import pluralize
from training.speed import WARM_UP, synchronize

STEPS, PARTS = 3, 24  # that are recorded at most: steps, and forward passes, beyond which a step is the last
TOP = 10  # operations in the table
WIDTH = 80
STEP, WAITING, FORWARD, BACKWARD, OPTIMIZER, OTHER = (
    "a step", "waiting for data", "forward", "backward", "optimizer", "the rest"
)  # fmt: skip
ENGINE = "autograd::engine::evaluate_function"  # what each node of the backward pass runs in
OPTIMIZER_STEP = "Optimizer.step#"


class NullProfiler:
    """Brackets each step, and does nothing. A context manager around the loop."""

    def __enter__(self) -> "NullProfiler":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        pass

    def wrap_loader(self, batches: Iterator) -> Iterator:
        """`batches`, which a step waits for."""
        return batches

    def start(self) -> None:
        """A step begins."""

    def stop(self) -> None:
        """It has ended."""


class StepProfiler(NullProfiler):
    """Records steps 6 to 8 of this process, or those of them that there are, into `trace`, and prints the tables."""

    def __init__(self, device: torch.device, trace: Path, console: Console):
        self.device, self.trace, self.console = device, trace, console
        self.steps, self.recorded, self.parts = 0, 0, 0
        self.profiler: torch.profiler.profile | None = None
        self.step: AbstractContextManager | None = None

    def wrap_loader(self, batches: Iterator) -> Iterator:
        while True:
            with nullcontext() if self.step is None else torch.profiler.record_function(WAITING):
                batch = next(batches)
            self.parts += self.step is not None
            yield batch

    def start(self) -> None:
        self.steps += 1
        if self.steps == WARM_UP:  # the profiler warms up as well, in the last of them
            if self.device.type == "cpu":  # elsewhere it may have something to say on what it cannot see
                os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it says when it starts and stops, on stderr
            schedule = torch.profiler.schedule(wait=0, warmup=1, active=STEPS)
            self.profiler = torch.profiler.profile(schedule=schedule)
            self.profiler.start()
        elif self.profiler is not None:
            self.profiler.step()
            synchronize(self.device)  # so that what is seen is this step's, and all of it
            self.step = torch.profiler.record_function(STEP)
            self.step.__enter__()

    def stop(self) -> None:
        if self.step is not None:
            synchronize(self.device)
            self.step.__exit__(None, None, None)
            self.step = None
            self.recorded += 1
            if self.recorded == STEPS or self.parts >= PARTS:
                self._finish()

    def __exit__(self, kind, error, traceback) -> None:
        if self.profiler is not None and self.recorded and error is None:
            self._finish()
        elif self.profiler is not None:
            self.profiler.stop()
        if not self.recorded and error is None:
            self._say(
                f"nothing was profiled: the first {WARM_UP} steps of a process warm up, and this one took "
                f"{self.steps}; let it go on for {pluralize(WARM_UP + 1 - self.steps, 'more step')} or longer"
            )

    def _finish(self) -> None:
        profiler, self.profiler = self.profiler, None
        profiler.stop()
        profiler.export_chrome_trace(str(self.trace))
        spent, last = summarize_events(profiler.events()), self.steps
        steps = f"step {last}" if self.recorded == 1 else f"steps {last - self.recorded + 1} to {last}"
        self._say(f"where the time goes, in {steps} of this process", "bold")
        for table in tables(spent):
            self.console.print(table, width=WIDTH)
        if spent.on_device:
            self._say(
                "times are the device's own, but for waiting; the rest: it stands still, or does what is no phase's"
            )
        self._say(f"trace    {self.trace}, for ui.perfetto.dev or chrome://tracing")

    def _say(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False, soft_wrap=True)


def build_profiler(wanted: bool, device: torch.device, folder: Path, console: Console) -> NullProfiler:
    """What brackets the steps of a run in `folder`: a Recording where that is wanted."""
    return StepProfiler(device, folder / "trace.json.gz", console) if wanted else NullProfiler()


@dataclass(frozen=True)
class StepBreakdown:
    """Milliseconds of a step, the mean over those recorded. phases: they add up to `step`.

    operations: (name, its own time, calls), the longest first. on_device: times are those of the device's kernels, but
    for waiting, which is the host's, and the rest, in which the device stands still or does what is no phase's. Of a
    device whose kernels were not seen the host's times are all that there is.
    """

    step: float
    phases: dict[str, float]
    operations: list[tuple[str, float, float]]
    on_device: bool


def summarize_events(events: list[Any]) -> StepBreakdown:
    """The profiler's events (torch.autograd.profiler_util.FunctionEvent) in numbers."""
    events = [each for each in events if each.device_type == torch.autograd.DeviceType.CPU]
    on_device = any(each.kernels for each in events)
    phases = dict.fromkeys((WAITING, FORWARD, BACKWARD, OPTIMIZER), 0.0)
    own: dict[str, list[float]] = {}
    steps = [each for each in events if each.name == STEP]
    for step in steps:
        begin, end = step.time_range.start, step.time_range.end
        within = [each for each in events if begin <= each.time_range.start and each.time_range.end <= end]
        spans = _spans(within, end)
        for phase, start, stop in spans:
            if phase == WAITING or not on_device:
                phases[phase] += stop - start
        starts = [start for _, start, _ in spans]
        for each in within:
            if each.is_user_annotation:
                continue
            total = own.setdefault(each.name, [0.0, 0])
            total[0] += each.self_device_time_total if on_device else each.self_cpu_time_total
            total[1] += 1
            if on_device and each.kernels:
                at = bisect_right(starts, each.time_range.start) - 1
                if at >= 0 and each.time_range.start <= spans[at][2]:
                    phases[spans[at][0]] += sum(kernel.duration for kernel in each.kernels)
    scale = 1000 * len(steps)  # the events count microseconds
    whole = sum(step.time_range.elapsed_us() for step in steps) / scale
    phases = {phase: time / scale for phase, time in phases.items()}
    operations = sorted(((name, time / scale, calls / len(steps)) for name, (time, calls) in own.items()),
                        key=lambda each: -each[1])  # fmt: skip
    return StepBreakdown(whole, phases | {OTHER: max(0.0, whole - sum(phases.values()))}, operations, on_device)


def _spans(events: list[Any], end: float) -> list[tuple[str, float, float]]:
    """(phase, start, end) in the order of time, on the host's clock, of a step's events."""
    spans = [(WAITING, *_range(each)) for each in events if each.name == WAITING]
    spans += [(OPTIMIZER, *_range(each)) for each in events if each.name.startswith(OPTIMIZER_STEP)]
    nodes = [_range(each) for each in events if each.name.startswith(ENGINE)]
    arrivals = [stop for phase, _, stop in spans if phase == WAITING]
    for arrival, until in zip(arrivals, [*arrivals[1:], end], strict=True):
        backward = [node for node in nodes if arrival <= node[0] < until]
        if backward:
            spans.append((FORWARD, arrival, backward[0][0]))
            spans.append((BACKWARD, backward[0][0], max(stop for _, stop in backward)))
    return sorted(spans, key=lambda span: span[1])


def _range(event: Any) -> tuple[float, float]:
    return event.time_range.start, event.time_range.end


def tables(spent: StepBreakdown) -> tuple[Table, Table]:
    """The phases of a step, and the operations that take the most of it."""
    phases, operations = _table("phase", "ms", ""), _table("operation", "ms", "", "calls")
    for name, time in spent.phases.items():
        phases.add_row(name, f"{time:,.2f}", f"{time / spent.step:.1%}")
    phases.add_row(STEP, f"{spent.step:,.2f}", "", style="bold")
    for name, time, calls in spent.operations[:TOP]:
        operations.add_row(name, f"{time:,.2f}", f"{time / spent.step:.1%}", f"{calls:,.3g}")
    return phases, operations


def _table(first: str, *numbers: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="")
    table.add_column(first, no_wrap=True, overflow="ellipsis", max_width=WIDTH - 30)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table
