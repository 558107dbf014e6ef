"""Runtime of training: resolves processes, device, dtype, compilation, micro batches and attention.

The config can set these to auto or null. common/device.py resolves device and dtype.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from common.device import autocast, resolve_device, resolve_dtype
from common.errors import UserError
from common.system import cpu_count
from model import AttentionConfig
from model.attention import (
    ResolvedAttention,
    missing_compiler,
    pin_kernel_under_compile,
    resolve_model,
)
from training.config import RunConfig
from training.distributed import Dist
from training.parallel import DDP, FSDP2
from training.startup import keep_freed_memory


@dataclass(frozen=True)
class Runtime:
    """Where and how a run computes."""

    dist: Dist
    parallel: DDP | FSDP2
    device: torch.device
    dtype: torch.dtype
    compile: bool
    micro_batch_size: int  # sequences per forward pass on one device
    accumulation: int  # forward passes per optimizer step on one device
    attend: Callable[..., Tensor]  # the model's attention function
    attention: ResolvedAttention  # its kernel for these micro batches

    def autocast(self) -> AbstractContextManager:
        """Context manager: mixed precision of the forward pass."""
        return autocast(self.device, self.dtype)

    def wrap(self, model: nn.Module, attention: AttentionConfig) -> nn.Module:
        """Wrap the model for the loop: for several processes, and compiled if requested."""
        if self.compile:
            pin_kernel_under_compile(attention)
        return self.parallel.wrap(model, self.compile)


def resolve_runtime(config: RunConfig) -> Runtime:
    """Resolve where and how a run computes, and configure torch.

    Raises UserError if the run cannot compute here.
    """
    dist = Dist.from_environment()
    if config.world_size is not None:
        dist = Dist(world_size=config.world_size)
    device = resolve_device(config.device, dist.local_rank)
    dtype = resolve_dtype(config.dtype, device)
    compiles = resolve_compile(config.compile, device)
    parallel = resolve_parallel(config, dist, device, dtype)
    micro_batch_size, accumulation = config.train.split_batch(dist.world_size)
    configure_backends(device, config.deterministic, config.tf32)
    share_cores(dist)
    attend, attention = resolve_model(
        config.attention,
        config.model,
        B=micro_batch_size,
        grad=True,
        dtype=dtype,
        device=device,
        document_mask=config.data.document_mask,
    )
    return Runtime(
        dist, parallel, device, dtype, compiles, micro_batch_size, accumulation, attend, attention
    )


def resolve_parallel(
    config: RunConfig, dist: Dist, device: torch.device, dtype: torch.dtype
) -> DDP | FSDP2:
    """Resolve the setting parallel. Raises UserError if other settings do not allow it."""
    if config.parallel == "ddp":
        return DDP(dist.world_size, device, dtype)
    if dist.world_size == 1:
        raise UserError(
            "parallel=fsdp needs several processes; start them with torchrun, or set parallel=ddp"
        )
    if dtype == torch.float16:
        raise UserError(
            "dtype=float16 cannot be combined with parallel=fsdp; set dtype=bfloat16, or "
            "parallel=ddp"
        )
    return FSDP2(dist.world_size, device, dtype)


def resolve_compile(requested: bool | None, device: torch.device) -> bool:
    """Resolve the setting compile. Raises UserError if a compiler is requested and missing.

    None: on CUDA, if Triton is installed.
    """
    missing = missing_compiler(device)
    if requested and missing:
        raise UserError(
            f"compile=true needs {missing}, which is not installed; install it, or set "
            "compile=false"
        )
    if requested is None:
        return device.type == "cuda" and not missing
    return requested


def configure_backends(device: torch.device, deterministic: bool, tf32: bool) -> None:
    """Set process-wide options of torch and malloc, before the first tensor is on the device."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    keep_freed_memory()


def share_cores(dist: Dist) -> None:
    """Divide the cores of a machine among its processes. torchrun sets OMP_NUM_THREADS=1."""
    if dist.local_world_size > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":
        torch.set_num_threads(max(1, cpu_count() // dist.local_world_size))


def build_grad_scaler(device: torch.device, dtype: torch.dtype) -> torch.amp.GradScaler:
    """Loss scaling for float16 (Micikevicius et al., arXiv:1710.03740), else disabled."""
    return torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)


def seed_device(device: torch.device, *numbers: int) -> None:
    """Seed the device's random generator from `numbers`.

    torch.manual_seed would seed the generators of all devices, which is slower.
    """
    seed = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
    generators = {"cuda": torch.cuda, "mps": torch.mps, "cpu": torch.default_generator}
    generators[device.type].manual_seed(seed)
