"""Facts about the machine: memory, cores, device, software versions and commit. torch is imported when it is needed."""

import os
import platform
import re
import shlex
import subprocess
import sys
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "hydra-core", "datasets", "tiktoken", "wandb", "numpy")
# The commit, and "+" if files have changed since. With --git-dir, git does not search the folders above.
DESCRIBE_COMMIT = "git --git-dir=.git describe --always --abbrev=40 --dirty=+"


def reset_peak_memory(device: "torch.device") -> None:
    """Start a new measurement of peak_memory_bytes, from the memory in use."""
    import torch

    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(
            OSError
        ):  # without Linux, and in containers that forbid this, the peak counts from the start
            Path("/proc/self/clear_refs").write_text(
                "5", encoding="utf-8"
            )  # resets VmHWM (proc(5))


def peak_memory_bytes(device: "torch.device") -> int | None:
    """Peak memory of CUDA's allocator or this process since the reset. None on a CPU without Linux."""
    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    kilobytes = (
        re.search(r"VmHWM:\s+(\d+)", status.read_text(encoding="utf-8"))
        if status.exists()
        else None
    )
    return None if kilobytes is None else 1024 * int(kilobytes[1])


def describe_environment(device: "torch.device") -> dict:
    """Describe the machine, the software and the command, for summary.json. commit: None without git or a checkout."""
    import torch

    git = subprocess.run(
        DESCRIBE_COMMIT, shell=True, cwd=Path(__file__).parents[1], capture_output=True
    )
    return {
        "device": device.type,
        "device_name": device_name(device),
        "threads": torch.get_num_threads(),
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in PACKAGES},
        "commit": git.stdout.decode(errors="replace").strip() or None,
        "command": command_line(),
    }


def device_name(device: "torch.device") -> str:
    """The name of the GPU, or the name of the processor and its number of cores."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{torch.cpu.get_capabilities().get('cpu_name', platform.machine())}, {os.cpu_count()} cores"


def command_line() -> str:
    """The command that started this process, without the folder of the script and the options of torchrun."""
    return shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])


def cpu_count() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
