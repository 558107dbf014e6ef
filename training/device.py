"""Which device, which numbers, which compiler: what a config leaves open is decided here and put on record."""

import ctypes
import os
import platform
from contextlib import AbstractContextManager, nullcontext

import torch

from common.errors import UserError
from model.attention import missing_compiler

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """auto: the GPU if there is one, else the CPU; of several GPUs the one of this process.

    Raises UserError for a device that is not there.
    """
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = "cuda" if there["cuda"] else "mps" if there["mps"] else "cpu"
    if not there.get(name):
        have = ", ".join(device for device, is_there in there.items() if is_there)
        what = "is not on this machine, or this torch cannot use it" if name in there else "is unknown"
        raise UserError(f"device={name} {what}; set device=auto, or one of what is here: {have}")
    if name == "cuda" and local_rank >= torch.cuda.device_count():
        raise UserError(
            f"rank {local_rank} of this machine has no GPU, there are {torch.cuda.device_count()}; "
            f"set torchrun --nproc_per_node={torch.cuda.device_count()}"
        )
    return torch.device(name, local_rank) if name == "cuda" else torch.device(name)


def resolve_dtype(name: str, device: torch.device, trains: bool = True) -> torch.dtype:
    """auto: bfloat16 on a GPU that has it, else float32. Raises UserError for what the device cannot train in."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
    if name not in DTYPES:
        raise UserError(f"dtype={name} is unknown; set auto, {', '.join(DTYPES)}")
    if name == "float16" and device.type != "cuda" and trains:
        raise UserError(f"dtype=float16 trains on cuda alone, not on {device.type}; set dtype=bfloat16 or float32")
    return DTYPES[name]


def resolve_compile(wanted: bool | None, device: torch.device) -> bool:
    """null: on CUDA where Triton is there; never on a CPU, where compiling a small model costs more than it saves.

    Raises UserError where compiling is asked for and no compiler is there.
    """
    lacks = missing_compiler(device)
    if wanted and lacks:
        raise UserError(f"compile=true needs {lacks}, which is not installed; install it, or set compile=false")
    return device.type == "cuda" and not lacks if wanted is None else wanted


def configure_backends(device: torch.device, deterministic: bool, tf32: bool) -> None:
    """Process-wide settings, before the first tensor is on the device.

    float32 means float32, unless tf32 is set: CUDA then rounds what it multiplies to 10 bits of mantissa.
    """
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if platform.libc_ver()[0] == "glibc":
        _tune_malloc()


def _tune_malloc() -> None:
    """Let malloc hold on to the memory that a step frees, for the next: what the system takes back, it zeroes first.

    So blocks of up to 32 MiB, the most that malloc takes from its own heap, which it no longer trims at the end.
    """
    M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 32 * 2**20)
    libc.mallopt(M_TRIM_THRESHOLD, -1)


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Matrix products in `dtype`, weights and sums in float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


def grad_scaler(device: torch.device, dtype: torch.dtype) -> torch.amp.GradScaler:
    """Keeps float16 gradients from underflowing (Micikevicius et al., arXiv:1710.03740); does nothing otherwise."""
    return torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
