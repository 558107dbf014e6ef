"""Speed of a run: step times, throughput, MFU, and peak FLOP/s of devices."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from model.flops import flops_per_token
from model.gpt import GPT
from training.config import UNTIMED_STEPS, RunConfig
from training.runtime import Runtime

MEASURED_SECONDS = 2.0  # for measuring the FLOP/s of a device
MAX_MEASURED_PASSES = 50
PRODUCT_SECONDS = 0.5  # for measuring the peak FLOP/s of a device
MAX_PRODUCTS = 4


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
        """Metrics of the median step, without the first steps if there are others.

        Empty before the first step.
        """
        steps = list(self.step_seconds)
        if not steps:
            return {}
        return self._metrics(statistics.median(steps[UNTIMED_STEPS:] or steps))

    def _metrics(self, seconds: float) -> dict:
        return {
            "step_ms": 1000 * seconds,
            "tokens_per_second": self.tokens / seconds,
            "mfu": self.flops / seconds / self.peak,
        }


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


def measure_flops_per_second(config: RunConfig, runtime: Runtime, vocab_size: int) -> float:
    """Measure the median FLOP/s of a device in forward and backward passes, for two seconds.

    The first pass loads kernels, so it counts only if there is no time for others.
    """
    device = runtime.device
    block_size = config.model.block_size
    flops_per_sequence = block_size * flops_per_token(config.model, vocab_size, block_size)
    in_one_second = int(0.5 * peak_flops(device, runtime.dtype) / flops_per_sequence)
    batch_size = max(1, min(runtime.micro_batch_size, in_one_second))
    model = GPT(config.model, vocab_size, runtime.attend).to(device)

    def run_pass() -> None:
        tokens = torch.randint(vocab_size, (batch_size, block_size), device=device)
        doc_ids = torch.zeros_like(tokens) if config.data.document_mask else None
        with runtime.autocast():
            loss = model(tokens, tokens, doc_ids=doc_ids)
        loss.backward()
        model.zero_grad(set_to_none=True)

    seconds = time_calls(run_pass, device, 1, MEASURED_SECONDS, MAX_MEASURED_PASSES)
    return batch_size * flops_per_sequence / statistics.median(seconds[1:] or seconds)


# Peak FLOP/s of dense matrix products, from the data sheets. The names are complete: variants of
# the same family (laptop, PCIe, partitioned) are slower, so their peak is measured.
GPU_PEAK = {  # name: (16 bits, float32)
    "NVIDIA H200": (989e12, 67e12),
    "NVIDIA H100 80GB HBM3": (989e12, 67e12),
    "NVIDIA A100-SXM4-80GB": (312e12, 19.5e12),
    "NVIDIA GeForce RTX 4090": (165e12, 82.6e12),
    "Tesla T4": (65e12, 8.1e12),
}


def is_in_table(device: torch.device) -> bool:
    """Whether the peak FLOP/s of a device is known, not measured."""
    return device.type == "cuda" and torch.cuda.get_device_name(device) in GPU_PEAK


def peak_flops(device: torch.device, dtype: torch.dtype) -> float:
    """Peak FLOP/s of matrix products on one device.

    From GPU_PEAK, otherwise measured.
    """
    is_float32 = dtype == torch.float32
    is_tf32 = is_float32 and torch.get_float32_matmul_precision() != "highest"
    if is_in_table(device) and not is_tf32:
        half_peak, float32_peak = GPU_PEAK[torch.cuda.get_device_name(device)]
        return float32_peak if is_float32 else half_peak
    return measure_peak_flops(device, dtype, torch.get_float32_matmul_precision())


@cache
def measure_peak_flops(device: torch.device, dtype: torch.dtype, precision: str) -> float:
    """Peak FLOP/s of the fastest of a few large products, measured once per process.

    precision: torch.get_float32_matmul_precision(). Products with another one are measured again.
    """
    size = 8192 if device.type == "cuda" else 1024
    # The first product on a GPU loads kernels. Some CPUs need seconds for a product in bfloat16.
    min_calls = 1 if device.type == "cpu" else MAX_PRODUCTS
    a = torch.randn(size, size, device=device).to(dtype)
    fastest = min(time_calls(lambda: a @ a, device, min_calls, PRODUCT_SECONDS, MAX_PRODUCTS))
    return 2 * size**3 / fastest
