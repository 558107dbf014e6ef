"""Facts about the machine: memory, caches, cores, device and software versions.

Functions import torch when they need it, so that prepare.py starts without torch.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
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
    """Start a new measurement of peak_memory_bytes, from the memory in use."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        with suppress(OSError):  # in containers that forbid this, the peak counts from the start of the process
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM (proc(5))


def peak_memory_bytes(device: torch.device) -> int | None:
    """Peak memory of CUDA's allocator or this process since the reset. None on a CPU without Linux."""
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else process_memory("VmHWM")


def process_memory(key: str) -> int | None:
    """Memory of this process in bytes. key: a line of /proc/self/status, such as VmHWM. None without Linux."""
    status = Path("/proc/self/status")
    kilobytes = re.search(rf"^{key}:\s+(\d+)", status.read_text(), re.MULTILINE) if status.exists() else None
    return None if kilobytes is None else 1024 * int(kilobytes[1])


def cpu_count() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_avx512_bf16() -> bool:
    """Whether this x86 CPU multiplies bfloat16 numbers. CPUs with AMX do, too.

    Private; torch.cpu.get_capabilities replaces it when torch 2.13 is the oldest version. Checked with torch 2.13.
    """
    import torch

    return torch.cpu._is_avx512_bf16_supported()


def has_bf16_kernels() -> bool:
    """Whether oneDNN has bfloat16 kernels for this CPU.

    Private, without a public replacement in torch.backends.mkldnn. Checked with torch 2.13.
    """
    import torch

    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def return_freed_memory() -> None:
    """Return freed blocks of glibc's malloc to the system. The next peak would not count blocks that are reused."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def cache_bytes(device: torch.device) -> int:
    """Size of the device's largest cache, or 0 if it is unknown."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    caches = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    return max((int(path.read_text().strip().removesuffix("K")) * 1024 for path in caches), default=0)


def describe_environment(device: torch.device) -> dict:
    """Describe the machine, the software and the command, for summary.json."""
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


def resume_command(name: str) -> str:
    """This process's command line with name= set, which resumes the run."""
    words = [word for word in sys.argv if not word.startswith(("name=", "resume="))]
    return shlex.join([*launcher(), *words, f"name={name}"])


def launcher() -> list[str]:
    """Program and arguments that started this process: python, or torchrun. HOST:29500 is a placeholder."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ["python"]
    nodes = os.environ["GROUP_WORLD_SIZE"]
    address = [f"--nnodes={nodes}", "--rdzv_backend=c10d", "--rdzv_endpoint=HOST:29500"] if nodes != "1" else []
    return ["torchrun", *address, f"--nproc_per_node={os.environ['LOCAL_WORLD_SIZE']}"]


def device_name(device: torch.device) -> str:
    """The name of the GPU, or the name of the processor and its number of cores."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.+)", cpuinfo.read_text()) if cpuinfo.exists() else []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores"


def _git_commit() -> str | None:
    """The commit of this checkout, with a "+" if files have changed since. None outside a checkout or without git."""
    # With --git-dir, git does not look for a repository in the folders above.
    command = ["git", "-C", str(PROJECT), "--git-dir=.git", "describe", "--always", "--abbrev=40", "--dirty=+"]
    with suppress(FileNotFoundError):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None
