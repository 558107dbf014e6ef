"""Step times, throughput and MFU of a run, and times of calls."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

# first steps of a process, excluded from medians: caches fill, and kernels are selected
WARMUP_STEPS = 5


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


class Speed:
    """Step times, throughput and MFU of a run. On CUDA, no step waits for the GPU.

    tokens, flops: of an optimizer step, over all devices.
    peak: peak FLOP/s of all devices.
    """

    def __init__(self, device: torch.device, tokens: int, flops: float, peak: float):
        self.device = device
        self.tokens = tokens
        self.flops = flops
        self.peak = peak
        self.step_seconds: deque[float] = deque(maxlen=1000)  # of the last steps, for medians

    def start_step(self) -> None:
        """Call this at the beginning of a step."""
        self.start = _record_time(self.device)

    def end_step(self) -> Callable[[], dict]:
        """Returns a function that waits for the step and returns its metrics."""
        return partial(self._read, self.start, _record_time(self.device))

    def _read(self, start: Any, end: Any) -> dict:
        seconds = _elapsed_seconds(start, end)
        self.step_seconds.append(seconds)
        return self._metrics(seconds)

    def median(self) -> dict:
        """Metrics of the median step, without warmup steps if there are others.

        Empty before the first step.
        """
        steps = list(self.step_seconds)
        if not steps:
            return {}
        return self._metrics(statistics.median(steps[WARMUP_STEPS:] or steps))

    def _metrics(self, seconds: float) -> dict:
        mfu = self.flops / seconds / self.peak
        return {"step_ms": 1000 * seconds, "tokens_per_second": self.tokens / seconds, "mfu": mfu}


def time_calls(
    call: Callable, device: torch.device, min_calls: int, seconds: float, max_calls: int
) -> list[float]:
    """Time as many calls as fit into about `seconds`, within the limits.

    After the first call, a fifth of this number of calls runs untimed, as warmup.
    Returns the seconds of each call.
    """
    first = time_repeatedly(call, device, 1)
    fitting = min(max_calls, int(seconds / first[0]))
    time_repeatedly(call, device, fitting // 5)
    return first + time_repeatedly(call, device, max(min_calls, fitting) - 1)


def time_repeatedly(call: Callable, device: torch.device, count: int) -> list[float]:
    """Time `count` calls. On CUDA, no call waits for the previous one."""
    times = []
    for _ in range(count):
        start = _record_time(device)
        call()
        times.append((start, _record_time(device)))
    return [_elapsed_seconds(start, end) for start, end in times]


def _record_time(device: torch.device) -> Any:
    """The current time in seconds; on CUDA, an event that is read later."""
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
