"""Facts about the machine: memory, caches, device and software versions.

torch is imported in the functions that use it. psutil has no peak memory that can be reset.
"""

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

PACKAGES = ("trilgpt", "torch", "hydra-core", "datasets", "tiktoken", "wandb", "numpy")
PROJECT = Path(__file__).parents[1]


def reset_peak_memory(device: torch.device) -> None:
    """Start a new measurement of peak_memory_bytes."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        with suppress(OSError):  # some containers forbid this; then the peak counts from the start of the process
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (proc(5))


def peak_memory_bytes(device: torch.device) -> int | None:
    """Peak memory since the reset: of CUDA's allocator, or of this process. None: unknown."""
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else process_memory("VmHWM")


def memory_in_use(device: torch.device) -> int | None:
    """Current memory in bytes, of the same kind as peak_memory_bytes."""
    import torch

    return torch.cuda.memory_allocated(device) if device.type == "cuda" else process_memory("VmRSS")


def process_memory(key: str) -> int | None:
    """A figure of this process's memory in bytes, such as VmRSS (proc(5)); None on systems other than Linux."""
    status = Path("/proc/self/status")
    lines = status.read_text().splitlines() if status.exists() else []
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:")), None)


def cpu_count() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def return_freed_memory() -> None:
    """Return freed blocks from glibc's malloc to the system. Reused blocks would not count in the next measurement."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def cache_bytes(device: torch.device) -> int:
    """Bytes of the device's largest cache; 0: unknown."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(path.read_text().strip().removesuffix("K")) * 1024 for path in caches), default=0)


def describe_environment(device: torch.device) -> dict:
    """The machine, the software and the command, for summary.json."""
    import torch

    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with suppress(PackageNotFoundError):  # trilgpt runs from a checkout without being installed
            versions[name] = version(name)
    return {
        "device": device.type,
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "versions": versions,
        "commit": _git_commit(),
        "command": command_line(),
    }


def command_line() -> str:
    """The command that started this process, without the folder of the script."""
    return shlex.join([*launcher(), Path(sys.argv[0]).name, *sys.argv[1:]])


def launcher() -> list[str]:
    """The program that starts a process like this one. HOST:29500 stands for an address that it cannot know."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ["python"]
    nodes = os.environ["GROUP_WORLD_SIZE"]
    address = [f"--nnodes={nodes}", "--rdzv_backend=c10d", "--rdzv_endpoint=HOST:29500"] if nodes != "1" else []
    return ["torchrun", *address, f"--nproc_per_node={os.environ['LOCAL_WORLD_SIZE']}"]


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's with its number of cores."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _git_commit() -> str | None:
    """The commit of this checkout, with a "+" if files have changed since. None outside a checkout or without git."""
    if not (PROJECT / ".git").exists():  # git would describe a repository around this folder
        return None
    command = ["git", "-C", str(PROJECT), "describe", "--always", "--abbrev=40", "--dirty=+"]
    with suppress(FileNotFoundError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
    return None
