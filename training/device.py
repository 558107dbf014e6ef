"""Runtime of a command: resolves processes, device, dtype and compilation, which the config can set to auto or null."""

import ctypes
import os
import platform
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from common.errors import UserError
from common.process import cpu_count
from model import AttentionConfig
from model.attention import ResolvedAttention, missing_compiler, pin_kernel_under_compile, resolve_model
from training.config import AUTO, RunConfig
from training.distributed import Dist
from training.parallel import DDP, FSDP2

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Runtime:
    """Where and how a run computes."""

    dist: Dist
    parallel: DDP | FSDP2
    device: torch.device
    dtype: torch.dtype
    compile: bool

    def autocast(self) -> AbstractContextManager:
        return autocast(self.device, self.dtype)

    def resolve_attention(self, config: RunConfig, micro_batch_size: int) -> ResolvedAttention:
        """Resolve the attention kernel that trains on micro batches of this size. Raises UserError."""
        options = {"dtype": self.dtype, "device": self.device, "document_mask": config.data.document_mask}
        return resolve_model(config.attention, config.model, B=micro_batch_size, grad=True, **options)

    def wrap(self, model: nn.Module, attention: AttentionConfig) -> nn.Module:
        """Wrap the model for the training loop: for several processes, and with torch.compile if requested."""
        if self.compile:
            pin_kernel_under_compile(attention)
        return self.parallel.wrap(model, self.compile)


def resolve_runtime(config: RunConfig) -> Runtime:
    """Resolve where and how a run computes, and configure torch. Raises UserError if it cannot run here."""
    dist = Dist.from_environment() if config.world_size is None else Dist(world_size=config.world_size)
    device = resolve_device(config.device, dist.local_rank)
    dtype = resolve_dtype(config.dtype, device)
    is_fsdp = config.parallel == "fsdp"
    if is_fsdp and dist.world_size == 1:
        raise UserError("parallel=fsdp needs several processes; start them with torchrun, or set parallel=ddp")
    if is_fsdp and dtype == torch.float16:
        raise UserError("dtype=float16 cannot be combined with parallel=fsdp; set dtype=bfloat16, or parallel=ddp")
    if config.train.micro_batch_size == AUTO and (device.type != "cuda" or is_fsdp or config.plan):
        raise UserError(f"train.micro_batch_size={AUTO} needs device=cuda, parallel=ddp and plan=false; set a number")
    parallel = (FSDP2 if is_fsdp else DDP)(dist.world_size, device, dtype)
    runtime = Runtime(dist, parallel, device, dtype, resolve_compile(config.compile, device))
    configure_backends(device, config.deterministic, config.tf32)
    if dist.local_world_size > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":  # torchrun sets 1
        torch.set_num_threads(max(1, cpu_count() // dist.local_world_size))
    runtime.resolve_attention(config, config.train.split_batch(dist.world_size)[0])
    return runtime


def resolve_device(name: str, local_rank: int = 0) -> torch.device:
    """Resolve the setting device: the GPU `local_rank` or the CPU. Raises UserError if the device is not available."""
    works = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    available = [device for device in works if works[device]]
    name = available[0] if name == "auto" else name
    if name not in available:
        raise UserError(f"torch {torch.__version__} finds no {name} device; set device={' or '.join(available)}")
    return torch.device(name, local_rank) if name == "cuda" else torch.device(name)


def resolve_dtype(name: str, device: torch.device, trains: bool = True) -> torch.dtype:
    """Resolve the setting dtype. auto: bfloat16 on GPUs that support it and on x86 CPUs with AVX512_BF16, else float32.

    name: auto, int8 or a key of DTYPES.
    trains: whether the model is trained. Otherwise auto on a CPU is float32, for exact samples and losses.
    Raises UserError for a dtype that the device does not support.
    """
    if name == "auto":
        if device.type == "cuda":  # GPUs before Ampere emulate bfloat16, and no fused attention kernel supports that
            has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        else:
            has_bf16 = device.type == "cpu" and trains and torch.cpu.get_capabilities().get("avx512_bf16", False)
        return torch.bfloat16 if has_bf16 else torch.float32
    if name == "float16" and device.type != "cuda" and trains:
        raise UserError(f"dtype=float16 trains only on cuda, not on {device.type}; set dtype=bfloat16 or float32")
    if name == "int8" and device.type != "cpu":
        raise UserError(f"dtype=int8 needs device=cpu, not {device.type}; set dtype=auto")
    return (DTYPES | {"int8": torch.int8})[name]


def resolve_compile(requested: bool | None, device: torch.device) -> bool:
    """Resolve the setting compile. None: on CUDA, if Triton is installed. Raises UserError without a compiler."""
    missing = missing_compiler(device)
    if requested and missing:
        raise UserError(f"compile=true needs {missing}, which is not installed; install it, or set compile=false")
    return device.type == "cuda" and not missing if requested is None else requested


def configure_backends(device: torch.device, deterministic: bool, tf32: bool) -> None:
    """Set process-wide options of torch and malloc. Call this before the first tensor is on the device."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if platform.libc_ver()[0] == "glibc":
        # Reuse the memory that a step frees: the system zeroes new memory page by page, a quarter of the default step.
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: the largest possible; larger blocks are always new
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never


def autocast(device: torch.device, dtype: torch.dtype) -> AbstractContextManager:
    """Mixed precision: matrix products in `dtype`, weights and sums in float32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


def build_grad_scaler(device: torch.device, dtype: torch.dtype) -> torch.amp.GradScaler:
    """Loss scaling for float16 gradients (Micikevicius et al., arXiv:1710.03740); disabled for other dtypes."""
    return torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)


def seed_device(device: torch.device, *numbers: int) -> None:
    """Seed the device's random generator from `numbers`. torch.manual_seed seeds all devices, which is slower."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
    generators = {"cuda": torch.cuda, "mps": torch.mps, "cpu": torch.default_generator}
    generators[device.type].manual_seed(seed)
