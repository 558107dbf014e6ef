"""Device and dtype of a command: resolves the settings device and dtype, which can be auto."""

from contextlib import AbstractContextManager, nullcontext

import torch

from common.errors import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """Resolve the setting device: the GPU `local_rank` or the CPU. Raises UserError if the device is not available."""
    works = {
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "cpu": True,
    }
    available = [device for device in works if works[device]]
    name = available[0] if name == "auto" else name
    if name not in available:
        raise UserError(
            f"torch {torch.__version__} finds no {name} device; set device={' or '.join(available)}"
        )
    return torch.device(name, local_rank) if name == "cuda" else torch.device(name)


def resolve_dtype(name: str, device: torch.device, trains: bool = True) -> torch.dtype:
    """Resolve the setting dtype. auto: bfloat16 on GPUs that support it and on x86 CPUs with AVX512_BF16, else float32.

    name: auto, int8 or a key of DTYPES.
    trains: whether the model is trained. Otherwise auto on a CPU is float32, for exact samples and losses.
    Raises UserError for a dtype that the device does not support.
    """
    if name == "auto":
        if (
            device.type == "cuda"
        ):  # GPUs before Ampere emulate bfloat16, and no fused attention kernel supports that
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            has_bf16 = (
                device.type == "cpu"
                and trains
                and torch.cpu.get_capabilities().get("avx512_bf16", False)
            )
        return torch.bfloat16 if has_bf16 else torch.float32
    if name == "float16" and device.type != "cuda" and trains:
        raise UserError(
            f"dtype=float16 trains only on cuda, not on {device.type}; set dtype=bfloat16 or float32"
        )
    if name == "int8" and device.type != "cpu":
        raise UserError(f"dtype=int8 needs device=cpu, not {device.type}; set dtype=auto")
    return (DTYPES | {"int8": torch.int8})[name]


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Mixed precision: matrix products in `dtype`, weights and sums in float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)
