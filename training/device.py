"""Runtime of a command: resolves processes, device, dtype and compilation, which the config can set to auto or null."""

import ctypes
import os
import platform
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass

import torch
from torch import nn

from common.errors import UserError
from common.system import describe_environment, has_avx512_bf16
from model import AttentionConfig, GPTConfig
from model.attention import ResolvedAttention, missing_compiler, pin_kernel_under_compile, resolve_model
from training.distributed import Dist
from training.fsdp import FSDP

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Runtime:
    """Where and how a run computes."""

    dist: Dist
    device: torch.device
    dtype: torch.dtype
    compile: bool

    def autocast(self) -> AbstractContextManager:
        return autocast(self.device, self.dtype)

    def resolve_attention(
        self, config: AttentionConfig, model: GPTConfig, B: int, document_mask: bool
    ) -> ResolvedAttention:
        """The attention kernel that trains on micro batches of B sequences. Raises UserError."""
        return resolve_model(
            config, model, B=B, dtype=self.dtype, device=self.device, grad=True, document_mask=document_mask
        )

    def describe(self) -> dict:
        """Device, software and command, for summary.json."""
        return describe_environment(self.device) | {
            "dtype": str(self.dtype).removeprefix("torch."),
            "compile": self.compile,
            "world_size": self.dist.world_size,
        }

    def wrap(self, model: nn.Module, attention: AttentionConfig) -> nn.Module:
        """Wrap the model for the training loop: for several processes, and with torch.compile if requested."""
        if self.compile:
            pin_kernel_under_compile(attention)
        return self.dist.wrap(model, self.compile)


def resolve_runtime(
    device: str, dtype: str, compile: bool | None, parallel: str = "ddp", world_size: int | None = None
) -> Runtime:
    """Resolve the settings device, dtype, compile and parallel. world_size: of a plan; None: the number of processes.

    Raises UserError for a value that this machine cannot run.
    """
    dist = Dist.from_environment() if world_size is None else Dist(world_size=world_size)
    if parallel == "fsdp":
        if dist.world_size == 1:
            raise UserError(
                "parallel=fsdp needs several processes; start them with torchrun --nproc_per_node=N, set world_size=N "
                "with plan=true, or set parallel=ddp"
            )
        dist = FSDP(**asdict(dist))
    resolved = resolve_device(device, dist.local_rank)
    resolved_dtype = resolve_dtype(dtype, resolved)
    if isinstance(dist, FSDP) and resolved_dtype == torch.float16:
        raise UserError("dtype=float16 cannot be combined with parallel=fsdp; set dtype=bfloat16, or parallel=ddp")
    return Runtime(dist, resolved, resolved_dtype, resolve_compile(compile, resolved))


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """Resolve the setting device. auto: the GPU if there is one, else the CPU. CUDA: the GPU of the local rank.

    Raises UserError for a device that is not available.
    """
    is_available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = "cuda" if is_available["cuda"] else "mps" if is_available["mps"] else "cpu"
    if not is_available.get(name):
        problem = "is not available on this machine with this build of torch" if name in is_available else "is unknown"
        available = ", ".join(device for device in is_available if is_available[device])
        raise UserError(f"device={name} {problem}; set device=auto or one of the available devices: {available}")
    if name == "cuda" and local_rank >= torch.cuda.device_count():
        raise UserError(
            f"local rank {local_rank} has no GPU, because this machine has {torch.cuda.device_count()}; "
            f"set torchrun --nproc_per_node={torch.cuda.device_count()}"
        )
    return torch.device(name, local_rank) if name == "cuda" else torch.device(name)


def resolve_dtype(name: str, device: torch.device, trains: bool = True) -> torch.dtype:
    """Resolve the setting dtype. auto: bfloat16 on GPUs that support it and on x86 CPUs with AVX512_BF16, else float32.

    trains: whether the model is trained. If not, auto on a CPU is float32, for exact samples and losses.
    Raises UserError for a dtype that the device does not support.
    """
    if name == "auto":
        has_bf16 = False
        if device.type == "cuda":  # GPUs before Ampere emulate bfloat16, and no fused attention kernel supports that
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        elif device.type == "cpu":
            has_bf16 = trains and has_avx512_bf16()
        return torch.bfloat16 if has_bf16 else torch.float32
    choices = DTYPES if trains else DTYPES | {"int8": torch.int8}
    if name not in choices:
        raise UserError(f"dtype={name} is unknown; set auto, {', '.join(choices)}")
    if name == "float16" and device.type != "cuda" and trains:
        raise UserError(f"dtype=float16 trains only on cuda, not on {device.type}; set dtype=bfloat16 or float32")
    if name == "int8" and device.type != "cpu":
        raise UserError(f"dtype=int8 needs device=cpu, not {device.type}; set dtype=auto")
    return choices[name]


def resolve_compile(requested: bool | None, device: torch.device) -> bool:
    """Resolve the setting compile. None: compile on CUDA if Triton is installed; not on a CPU.

    On a CPU, compiling a small model takes more time than it saves.
    Raises UserError if compilation is requested and no compiler is installed.
    """
    missing = missing_compiler(device)
    if requested and missing:
        raise UserError(f"compile=true needs {missing}, which is not installed; install it, or set compile=false")
    return device.type == "cuda" and not missing if requested is None else requested


def configure_backends(device: torch.device, deterministic: bool, tf32: bool) -> None:
    """Set process-wide options of torch and malloc. Call this before the first tensor is on the device.

    float32 products are exact float32, unless tf32 is set: CUDA then rounds their factors to 10 bits of mantissa.
    """
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if platform.libc_ver()[0] == "glibc":
        # Reuse the memory that a step frees: the system zeroes new memory page by page, a quarter of the default step.
        M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from malloc.h
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, 2**25)  # the largest possible; larger blocks are always new
        libc.mallopt(M_TRIM_THRESHOLD, -1)


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Mixed precision: matrix products in `dtype`, weights and sums in float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


def build_grad_scaler(device: torch.device, dtype: torch.dtype) -> torch.amp.GradScaler:
    """Loss scaling for float16 gradients (Micikevicius et al., arXiv:1710.03740); disabled for other dtypes."""
    return torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
