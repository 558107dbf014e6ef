"""Runtime of training: resolves processes, device, dtype, compilation, micro batches and attention.

The config can set these to auto or null. common/machine.py resolves device and dtype.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn

from common.errors import UserError
from common.machine import autocast, dtype_name, resolve_device, resolve_dtype
from common.process import cpu_count, keep_freed_memory
from model import AttentionConfig
from model.attention import (
    ResolvedAttention,
    missing_compiler,
    pin_kernel_under_compile,
    resolve_model,
)
from training.config import RunConfig
from training.parallel import DDP, FSDP2

# A rank gives up after waiting this long for the others. Rank 0 must save a checkpoint or generate
# a sample in this time.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)
USE_TORCHRUN = "start the processes with torchrun, or unset RANK and WORLD_SIZE"


@dataclass(frozen=True)
class Dist:
    """This process among the processes of a run, and (local) among those on its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> "Dist":
        """Read the variables that torchrun sets. A single process without them.

        Raises UserError if they do not fit together.
        """
        dist = cls(
            rank=int(os.environ.get("RANK", "0")),
            world_size=int(os.environ.get("WORLD_SIZE", "1")),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        )
        if not 0 <= dist.rank < dist.world_size:
            raise UserError(
                f"RANK={dist.rank} must be less than WORLD_SIZE={dist.world_size}; {USE_TORCHRUN}"
            )
        return dist

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only process that writes the run folder and prints."""
        return self.rank == 0

    def connect(self, device: torch.device, dtype: torch.dtype) -> None:
        """Start the process group: NCCL on GPUs, gloo for tensors on the CPU.

        From now on, only rank 0 prints. Raises UserError if the dtypes of the processes differ.
        """
        if self.world_size == 1:
            return
        if not self.is_main:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (stays open)
        try:
            # torch waits for the other ranks in C++: the thread leaves this one free for signals
            ThreadPoolExecutor(1).submit(init_process_group, device).result()
        except ValueError as error:  # a variable such as RANK or MASTER_ADDR is missing
            raise UserError(f"{error}; {USE_TORCHRUN}") from None
        self.require_equal(f"dtype={dtype_name(dtype)}", "set dtype=float32 or dtype=bfloat16")

    def barrier(self) -> None:
        """Wait until all processes have called this method."""
        self.all_reduce(0.0)

    def all_reduce(self, *values: float, op: str = "sum") -> list[float]:
        """Reduce each number over all processes, in float64. op: sum or max."""
        if self.world_size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)  # on the CPU: does not wait for the GPU
        torch_dist.all_reduce(numbers, getattr(torch_dist.ReduceOp, op.upper()))
        return numbers.tolist()

    def all_reduce_mean(self, value: Tensor) -> Tensor:
        """Average a tensor over all processes, in place. Does not wait for the device."""
        if self.world_size > 1:
            torch_dist.all_reduce(value)
            value /= self.world_size
        return value

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0."""
        if self.world_size == 1:
            return value
        values = [value]
        torch_dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def require_equal(self, value: str, advice: str) -> None:
        """Raise UserError in all processes if one of them has another value.

        advice: how to get the same value.
        """
        if self.world_size == 1:
            return
        values: list = [None] * self.world_size
        torch_dist.all_gather_object(values, value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise UserError(f"rank {rank} has {other}, but rank 0 has {values[0]}; {advice}")


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


def init_process_group(device: torch.device) -> None:
    """Connect this process to all others, which takes until the last one has started."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        torch.cuda.set_device(device)  # each thread has its own current device
    torch_dist.init_process_group(
        "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
        timeout=COLLECTIVE_TIMEOUT,
        device_id=device if is_cuda else None,
    )


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


def seed_device(device: torch.device, *numbers: int) -> None:
    """Seed the device's random generator from `numbers`.

    torch.manual_seed would seed the generators of all devices, which is slower.
    """
    seed = int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0])
    generators = {"cuda": torch.cuda, "mps": torch.mps, "cpu": torch.default_generator}
    generators[device.type].manual_seed(seed)
