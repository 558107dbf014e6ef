"""Time, memory and throughput, measured so that they can be believed."""

import ctypes
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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

    def waiting(self, batches: Iterator) -> Iterator:
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


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (proc(5))
        except OSError:
            return  # not allowed in some containers: the peak then counts from the start of the process


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most memory in use since the reset: CUDA's allocator's, or on Linux the process's. None: unknown."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _process_bytes("VmHWM")


def memory_in_use(device: torch.device) -> int | None:
    """What is in use now, counted as peak_memory_bytes counts it."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _process_bytes("VmRSS")


def free_memory(device: torch.device) -> int | None:
    """What this process could still take without swapping, or being killed for it. None: unknown."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    meminfo = Path("/proc/meminfo")
    if device.type != "cpu" or not meminfo.exists():
        return None
    available = next(line for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable"))
    return min([1024 * int(available.split()[1]), *_left_by_groups()])


GROUPS = Path("/sys/fs/cgroup")


def _left_by_groups() -> list[int]:
    """What the control groups that this process is in, a container's or a scheduler's, leave it (cgroups(7))."""
    left = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, version_1, path = line.split(":", 2)
        most, used, cache = "memory.max", "memory.current", "inactive_file"
        if version_1:
            most, used, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        group = GROUPS / version_1 / path.strip("/")
        for folder in (group, *group.parents):
            bound = (folder / most).read_text().strip() if (folder / most).exists() else "max"
            if bound != "max":
                reclaimed = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())[cache]
                left.append(int(bound) - int((folder / used).read_text()) + int(reclaimed))
    return left


def _process_bytes(key: str) -> int | None:
    """A figure of this process's memory from Linux (proc(5)); None on other systems."""
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def return_freed_memory() -> None:
    """Give back what glibc's malloc keeps of freed blocks, which would hide as much of what is taken next."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def cache_bytes(device: torch.device) -> int:
    """The size of the largest cache between the device's cores and its memory; 0: unknown."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(path.read_text().strip().removesuffix("K")) * 1024 for path in caches), default=0)


def environment(device: torch.device) -> dict:
    """The machine, the software and the command, for summary.json."""
    return {
        "device": device.type,
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "versions": versions(),
        "commit": commit(),
        "command": shlex.join(["python", *sys.argv]),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")] if cpuinfo.exists() else []
    model = names[0].split(":")[1].strip() if names else platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("trilgpt", "torch", "hydra-core", "datasets", "tiktoken", "wandb", "numpy"):
        with suppress(PackageNotFoundError):  # a checkout can be run without being installed
            found[name] = version(name)
    return found


def commit() -> str | None:
    """The commit of this checkout, "+" behind it if files were changed since. None outside a checkout."""
    ask = ["git", "describe", "--always", "--abbrev=40", "--dirty=+"]
    try:
        return subprocess.run(ask, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip() or None
    except FileNotFoundError:  # no git here
        return None
