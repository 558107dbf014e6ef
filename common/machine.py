"""The device of a command, its dtype, name and memory.

The settings device and dtype can be auto, which is resolved here.
"""

import os
import platform
import re
import subprocess
from contextlib import AbstractContextManager, nullcontext, suppress
from importlib.metadata import version
from pathlib import Path

import torch

from common.errors import UserError
from common.process import command_line

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """Resolve the setting device: the GPU `local_rank`, or the CPU.

    Raises UserError if the device is not available.
    """
    is_available = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    available = [device for device in is_available if is_available[device]]
    if name == "auto":
        name = available[0]
    if name not in available:
        raise UserError(
            f"torch {torch.__version__} finds no {name} device; set device={' or '.join(available)}"
        )
    return torch.device(name, local_rank) if name == "cuda" else torch.device(name)


def resolve_dtype(name: str, device: torch.device, trains: bool = True) -> torch.dtype:
    """Resolve the setting dtype.

    auto is bfloat16 on GPUs that support it and on x86 CPUs with AVX512_BF16, else float32.

    name: auto, int8 or a key of DTYPES.
    trains: whether the model is trained. Otherwise auto on a CPU is float32, for exact samples
        and losses.
    Raises UserError for a dtype that the device does not support.
    """
    if name == "auto":
        if device.type == "cuda":
            # GPUs before Ampere emulate bfloat16, which no fused attention kernel supports.
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            capabilities = torch.cpu.get_capabilities()
            has_bf16 = device.type == "cpu" and trains and capabilities.get("avx512_bf16", False)
        return torch.bfloat16 if has_bf16 else torch.float32
    if name == "float16" and device.type != "cuda" and trains:
        raise UserError(
            f"dtype=float16 trains only on cuda, not on {device.type}; "
            "set dtype=bfloat16 or float32"
        )
    if name == "int8" and device.type != "cpu":
        raise UserError(f"dtype=int8 needs device=cpu, not {device.type}; set dtype=auto")
    return (DTYPES | {"int8": torch.int8})[name]


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Mixed precision: matrix products in `dtype`, weights and sums in float32."""
    if dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=dtype)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in settings, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def device_name(device: torch.device) -> str:
    """The name of the GPU, or the name of the processor and its number of cores."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    processor = torch.cpu.get_capabilities().get("cpu_name", platform.machine())
    return f"{processor}, {os.cpu_count()} cores"


def reset_peak_memory(device: torch.device) -> None:
    """Start a new measurement of peak_memory_bytes, from the memory in use.

    Without Linux, and in containers that forbid it, the peak counts from the start of the process.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            # Resets VmHWM (proc(5)).
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peak_memory_bytes(device: torch.device) -> int | None:
    """Peak memory since the reset: of CUDA's allocator, or of this process.

    None on a CPU without Linux.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status")
    if not status.exists():
        return None
    peak = re.search(r"VmHWM:\s+(\d+) kB", status.read_text(encoding="utf-8"))
    return None if peak is None else 1024 * int(peak[1])


PACKAGES = ("torch", "hydra-core", "datasets", "tiktoken", "wandb", "numpy")
# The commit, and "+" if files have changed since. With --git-dir, git does not search the folders
# above the project.
DESCRIBE_COMMIT = "git --git-dir=.git describe --always --abbrev=40 --dirty=+"


def describe_environment(device: torch.device) -> dict:
    """Describe the machine, the software and the command.

    commit: None without git, or if the project is not a checkout.
    """
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
