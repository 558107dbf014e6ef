"""Facts about the machine: memory, caches, device and software versions. torch is imported only where it is used."""

from __future__ import annotations

import ctypes
import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def reset_peak_memory(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (proc(5))
        except OSError:
            return  # not allowed in some containers: the peak then counts from the start of the process


def peak_memory_bytes(device: torch.device) -> int | None:
    """The most memory in use since the reset: CUDA's allocator's, or on Linux the process's. None: unknown."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return process_memory("VmHWM")


def memory_in_use(device: torch.device) -> int | None:
    """What is in use now, counted as peak_memory_bytes counts it."""
    import torch

    return torch.cuda.memory_allocated(device) if device.type == "cuda" else process_memory("VmRSS")


def free_memory(device: torch.device) -> int | None:
    """Bytes that this process can still allocate on the device without swapping. None: unknown."""
    if device.type == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    available = available_memory() if device.type == "cpu" else None
    return None if available is None else min([available, *_cgroup_headroom()])


def available_memory() -> int | None:
    """MemAvailable of Linux in bytes; None on other systems."""
    return _proc_bytes("/proc/meminfo", "MemAvailable")


def process_memory(key: str) -> int | None:
    """A figure of this process's memory in bytes, such as VmRSS (proc(5)); None on other systems than Linux."""
    return _proc_bytes("/proc/self/status", key)


def _proc_bytes(file: str, key: str) -> int | None:
    if not Path(file).exists():
        return None
    line = next(line for line in Path(file).read_text().splitlines() if line.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])


def cpu_count() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def return_freed_memory() -> None:
    """Give back what glibc's malloc keeps of freed blocks, which would hide as much of what is taken next."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def cache_bytes(device: torch.device) -> int:
    """The size of the largest cache between the device's cores and its memory; 0: unknown."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(path.read_text().strip().removesuffix("K")) * 1024 for path in caches), default=0)


def describe_environment(device: torch.device) -> dict:
    """The machine, the software and the command, for summary.json."""
    import torch

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
    import torch

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
