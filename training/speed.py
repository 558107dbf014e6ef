"""Measures step times, throughput and the peak speed of matrix products, and profiles steps with torch.profiler."""

import os
import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

WARMUP_STEPS = 5  # first steps of a process, excluded from medians: caches fill, and kernels are selected
RECORDED_STEPS = 3

# Peak FLOP/s of dense matrix products in 16 bits and in float32, from the data sheets. Keys are full names of GPUs:
# variants of the same family (laptop, PCIe, partitioned) are slower, so their peak is measured.
GPU_PEAK = {
    "NVIDIA H200": (989e12, 67e12),
    "NVIDIA H100 80GB HBM3": (989e12, 67e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 19.5e12),
    "NVIDIA GeForce RTX 4090": (165e12, 82.6e12),
    "Tesla T4": (65e12, 8.1e12),
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak FLOP/s of matrix products on one device: from GPU_PEAK, else the fastest of a few large products."""
    is_cuda = device.type == "cuda"
    is_tf32 = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    if is_cuda and not is_tf32 and (known := GPU_PEAK.get(torch.cuda.get_device_name(device))):
        return known[dtype == torch.float32]
    size = 8192 if is_cuda else 1024
    a = torch.randn(size, size, device=device).to(dtype)
    return 2 * size**3 / min(_time_repeatedly(lambda: a @ a, device, 4))


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Speed:
    """Step times, throughput and MFU of a run. On CUDA, no step waits for the GPU.

    tokens, flops: of an optimizer step, over all devices. peak: peak FLOP/s of all devices.
    """

    def __init__(self, device: torch.device, tokens: int, flops: float, peak: float):
        self.device, self.tokens, self.flops, self.peak = device, tokens, flops, peak
        self.steps: deque[float] = deque(maxlen=1000)  # seconds of the last steps, for medians

    def start_step(self) -> None:
        self.start = _record_time(self.device)

    def end_step(self) -> Callable[[], dict]:
        """Returns a function that waits for the step and returns its metrics."""
        return partial(self._read, self.start, _record_time(self.device))

    def _read(self, start: Any, end: Any) -> dict:
        self.steps.append(_elapsed_seconds(start, end))
        return self._metrics(self.steps[-1])

    def median(self) -> dict:
        """Metrics of the median step, without warmup steps if there are others. Empty before the first step."""
        steps = [*self.steps][WARMUP_STEPS:] or self.steps
        return self._metrics(statistics.median(steps)) if steps else {}

    def _metrics(self, seconds: float) -> dict:
        mfu = self.flops / seconds / self.peak
        return {"step_ms": 1000 * seconds, "tokens_per_second": self.tokens / seconds, "mfu": mfu}


def time_calls(call: Callable, device: torch.device, min_calls: int, seconds: float, max_calls: int) -> list[float]:
    """Time as many calls as fit into about `seconds`, within the limits. Returns the seconds of each call.

    After the first call, a fifth of this number of calls runs untimed, as warmup.
    """
    first = _time_repeatedly(call, device, 1)
    fitting = min(max_calls, int(seconds / first[0]))
    _time_repeatedly(call, device, fitting // 5)
    return first + _time_repeatedly(call, device, max(min_calls, fitting) - 1)


def _time_repeatedly(call: Callable, device: torch.device, count: int) -> list[float]:
    times = []
    for _ in range(count):  # on CUDA, no call waits for the previous one
        start = _record_time(device)
        call()
        times.append((start, _record_time(device)))
    return [_elapsed_seconds(start, end) for start, end in times]


def _record_time(device: torch.device) -> Any:
    """The current time of the device: on CUDA an event that is read later."""
    if device.type != "cuda":
        synchronize(device)
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_seconds(start: Any, end: Any) -> float:
    if isinstance(end, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000


class StepProfiler(torch.profiler.profile):
    """train.profile: records steps after the warmup, prints a table, writes trace.json.gz. The loop calls step()."""

    def __init__(self, device: torch.device, folder: Path, print_line: Callable[[str], None]):
        schedule = torch.profiler.schedule(wait=WARMUP_STEPS - 1, warmup=1, active=RECORDED_STEPS, repeat=1)
        self.trace, self.print_line = folder / "trace.json.gz", print_line
        self.sort_by = f"self_{'device' if device.type == 'cuda' else 'cpu'}_time_total"
        if device.type == "cpu":
            os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise the profiler writes messages to stderr
        super().__init__(schedule=schedule, on_trace_ready=StepProfiler._report)

    def _report(self) -> None:
        if self.step_num == WARMUP_STEPS + RECORDED_STEPS:  # otherwise the run ends early
            self.export_chrome_trace(str(self.trace))
            table = self.key_averages().table(self.sort_by, row_limit=20, max_name_column_width=40)
            self.print_line(f"steps {WARMUP_STEPS + 1} to {self.step_num}\n{table}")
            self.print_line(f"trace    {self.trace} (open it at ui.perfetto.dev or chrome://tracing)")
