"""Runtime of a command: resolves processes, device, dtype and compilation, which the config can set to auto or null."""

import os
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

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
from training.config import AUTO, RunConfig
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

    def autocast(self) -> AbstractContextManager:
        return autocast(self.device, self.dtype)

    def resolve_attention(self, config: RunConfig, micro_batch_size: int) -> ResolvedAttention:
        """Resolve the attention kernel that trains on micro batches of this size. Raises UserError."""
        options = {
            "dtype": self.dtype,
            "device": self.device,
            "document_mask": config.data.document_mask,
        }
        return resolve_model(
            config.attention, config.model, B=micro_batch_size, grad=True, **options
        )

    def wrap(self, model: nn.Module, attention: AttentionConfig) -> nn.Module:
        """Wrap the model for the training loop: for several processes, and with torch.compile if requested."""
        if self.compile:
            pin_kernel_under_compile(attention)
        return self.parallel.wrap(model, self.compile)


def resolve_runtime(config: RunConfig) -> Runtime:
    """Resolve where and how a run computes, and configure torch. Raises UserError if it cannot run here."""
    dist = (
        Dist.from_environment() if config.world_size is None else Dist(world_size=config.world_size)
    )
    device = resolve_device(config.device, dist.local_rank)
    dtype = resolve_dtype(config.dtype, device)
    is_fsdp = config.parallel == "fsdp"
    if is_fsdp and dist.world_size == 1:
        raise UserError(
            "parallel=fsdp needs several processes; start them with torchrun, or set parallel=ddp"
        )
    if is_fsdp and dtype == torch.float16:
        raise UserError(
            "dtype=float16 cannot be combined with parallel=fsdp; set dtype=bfloat16, or parallel=ddp"
        )
    if config.train.micro_batch_size == AUTO and (device.type != "cuda" or is_fsdp or config.plan):
        raise UserError(
            f"train.micro_batch_size={AUTO} needs device=cuda, parallel=ddp and plan=false; set a number"
        )
    parallel = (FSDP2 if is_fsdp else DDP)(dist.world_size, device, dtype)
    runtime = Runtime(dist, parallel, device, dtype, resolve_compile(config.compile, device))
    configure_backends(device, config.deterministic, config.tf32)
    if (
        dist.local_world_size > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1"
    ):  # torchrun sets 1
        torch.set_num_threads(max(1, cpu_count() // dist.local_world_size))
    runtime.resolve_attention(config, config.train.split_batch(dist.world_size)[0])
    return runtime


def resolve_compile(requested: bool | None, device: torch.device) -> bool:
    """Resolve the setting compile. None: on CUDA, if Triton is installed. Raises UserError without a compiler."""
    missing = missing_compiler(device)
    if requested and missing:
        raise UserError(
            f"compile=true needs {missing}, which is not installed; install it, or set compile=false"
        )
    return device.type == "cuda" and not missing if requested is None else requested


def configure_backends(device: torch.device, deterministic: bool, tf32: bool) -> None:
    """Set process-wide options of torch and malloc. Call this before the first tensor is on the device."""
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    keep_freed_memory()


def build_grad_scaler(device: torch.device, dtype: torch.dtype) -> torch.amp.GradScaler:
    """Loss scaling for float16 gradients (Micikevicius et al., arXiv:1710.03740); disabled for other dtypes."""
    return torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)


def seed_device(device: torch.device, *numbers: int) -> None:
    """Seed the device's random generator from `numbers`. torch.manual_seed seeds all devices, which is slower."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
    generators = {"cuda": torch.cuda, "mps": torch.mps, "cpu": torch.default_generator}
    generators[device.type].manual_seed(seed)
