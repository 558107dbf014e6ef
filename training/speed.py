"""Time, memory and throughput, measured so that they can be believed."""

import statistics
import time
from collections.abc import Callable, Iterator

import torch

WARM_UP = 5  # steps of a process, in which caches fill and kernels are chosen

# Peak dense matrix-product FLOP/s from the makers' data sheets, by the whole name: a laptop's, a PCIe or a sliced
# one of the same family has another, and is measured.
H100 = {torch.bfloat16: 989e12, torch.float16: 989e12, torch.float32: 67e12}
A100 = {torch.bfloat16: 312e12, torch.float16: 312e12, torch.float32: 19.5e12}
GPU_PEAK = {
    "NVIDIA H200": H100,
    "NVIDIA H100 80GB HBM3": H100,
    "NVIDIA A100-SXM4-80GB": A100,
    "NVIDIA A100-SXM4-40GB": A100,
    "NVIDIA L40S": {torch.bfloat16: 362e12, torch.float16: 362e12, torch.float32: 91.6e12},
    "NVIDIA GeForce RTX 4090": {torch.bfloat16: 165e12, torch.float16: 165e12, torch.float32: 82.6e12},
}


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s that matrix products can reach here: a known GPU's, else the best of a few large products, measured."""
    if device.type == "cuda":
        known = GPU_PEAK.get(torch.cuda.get_device_name(device), {})
        rounded = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"  # TF32 has its own peak
        if dtype in known and not rounded:
            return known[dtype]
    size = 8192 if device.type == "cuda" else 1024
    a = torch.randn(size, size, device=device).to(dtype)
    best, began = float("inf"), time.perf_counter()
    for _ in range(6):
        synchronize(device)
        started = time.perf_counter()
        a @ a
        synchronize(device)
        best = min(best, time.perf_counter() - started)
        if time.perf_counter() - began > 0.5:  # a CPU without bfloat16 instructions takes seconds for one
            break
    return 2 * size**3 / best


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


class Speed:
    """How long steps take, on the device's own time line: CUDA events, which nothing waits for until they are read.

    tokens, flops: of one optimizer step, over all devices. peak: FLOP/s that all devices could reach.
    """

    def __init__(self, device: torch.device, tokens: int, flops: float, peak: float):
        self.device, self.tokens, self.flops, self.peak = device, tokens, flops, peak
        self.seconds: list[float] = []
        self.waits: list[float] = []

    def start(self) -> None:
        self.started, self.waited = _mark(self.device), 0.0

    def wrap_loader(self, batches: Iterator) -> Iterator:
        """`batches`; how long the host waits for them is a part of the step, and on record."""
        began = time.perf_counter()
        for batch in batches:
            self.waited += time.perf_counter() - began
            yield batch
            began = time.perf_counter()

    def stop(self) -> Callable[[], dict]:
        """End of a step -> a function that gives its numbers.

        They are step_ms, of it data_wait_ms for data, tokens_per_second, and mfu (a part of the peak).
        """
        start, end, waited = self.started, _mark(self.device), self.waited

        def numbers() -> dict:
            self.seconds.append(_between(self.device, start, end))
            self.waits.append(waited)
            return self._rates(self.seconds[-1], waited)

        return numbers

    def median(self) -> dict:
        """The medians of the same numbers; the first steps, which warm up, do not count if more follow."""
        steps, waits = (each[WARM_UP:] or each for each in (self.seconds, self.waits))
        if not steps:
            return dict.fromkeys(self._rates(1.0, 0.0))
        return self._rates(statistics.median(steps), statistics.median(waits))

    def _rates(self, seconds: float, waited: float) -> dict:
        return {
            "step_ms": 1000 * seconds,
            "data_wait_ms": 1000 * waited,
            "tokens_per_second": self.tokens / seconds,
            "mfu": self.flops / seconds / self.peak,
        }


def compile_seconds() -> float:
    """What torch.compile has taken in this process, forward and backward graphs."""
    from torch._dynamo.utils import calculate_time_spent

    return calculate_time_spent()["total_wall_time"]


def time_calls(
    call: Callable[[], object], device: torch.device, repeats: int, seconds: float, most: int
) -> list[float]:
    """The seconds of each of several calls, on the device's own time line.

    As many as fit into `seconds`, from `repeats` to `most`. Short ones, of which many fit, warm up for a while first.
    """
    first = _time_each(call, device, 1)
    fitting = min(most, int(seconds / first[0]))
    _time_each(call, device, fitting // 5)
    return first + _time_each(call, device, max(repeats, fitting) - 1)


def _time_each(call: Callable[[], object], device: torch.device, count: int) -> list[float]:
    marks = []
    for _ in range(count):  # on CUDA none waits for the one before
        start = _mark(device)
        call()
        marks.append((start, _mark(device)))
    return [_between(device, *each) for each in marks]


def _mark(device: torch.device):
    """A point on the device's time line: on CUDA an event, which nothing waits for until it is read."""
    if device.type != "cuda":
        synchronize(device)
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(device: torch.device, start, end) -> float:
    """Seconds."""
    if device.type != "cuda":
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000
