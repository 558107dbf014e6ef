"""Facts about the machine: memory, caches, device and software versions."""

import ctypes
import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch


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
    return min([1024 * int(available.split()[1]), *_cgroup_headroom()])


CGROUP_ROOT = Path("/sys/fs/cgroup")


def _cgroup_headroom() -> list[int]:
    """What the control groups that this process is in, a container's or a scheduler's, leave it (cgroups(7))."""
    left = []
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, version_1, path = line.split(":", 2)
        most, used, cache = "memory.max", "memory.current", "inactive_file"
        if version_1:
            most, used, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        group = CGROUP_ROOT / version_1 / path.strip("/")
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


def describe_environment(device: torch.device) -> dict:
    """The machine, the software and the command, for summary.json."""
    return {
        "device": device.type,
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "versions": package_versions(),
        "commit": git_commit(),
        "command": shlex.join(["python", *sys.argv]),
    }


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    names = [x for x in cpuinfo.read_text().splitlines() if x.startswith("model name")] if cpuinfo.exists() else []
    model = names[0].split(":")[1].strip() if names else platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def package_versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("trilgpt", "torch", "hydra-core", "datasets", "tiktoken", "wandb", "numpy"):
        with suppress(PackageNotFoundError):  # a checkout can be run without being installed
            found[name] = version(name)
    return found


def git_commit() -> str | None:
    """The commit of this checkout, "+" behind it if files were changed since. None outside a checkout."""
    ask = ["git", "describe", "--always", "--abbrev=40", "--dirty=+"]
    try:
        return subprocess.run(ask, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip() or None
    except FileNotFoundError:  # no git here
        return None
