"""Distributed training: one process per device, started by torchrun.

Without torchrun the world has one process, and all methods of Dist do nothing or return their argument. So the loop
is the same for one process and for many. Values that control the loop, such as when to stop, are reduced over all
processes; otherwise the processes would wait for each other forever.
"""

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.errors import UserError
from common.system import cpu_count
from model.gpt import GPT

# A rank gives up after waiting this long for the others. Rank 0 must save a checkpoint or sample in this time.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Dist:
    """This process among `world_size` processes. local_rank: its rank among the local_world_size on this machine.

    Each process has a copy of the model (DDP). training/fsdp.py has a subclass whose processes share one.
    """

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> "Dist":
        """Read the variables that torchrun sets; a single process without WORLD_SIZE. Raises UserError."""
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return cls()
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        try:
            return cls(*(int(os.environ[name]) for name in names))
        except (KeyError, ValueError) as error:
            raise UserError(
                f"WORLD_SIZE={os.environ['WORLD_SIZE']} is set, but not the other variables of torchrun ({error}); "
                "start several processes with torchrun, or unset WORLD_SIZE to train with one process"
            ) from None

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only process that writes files and prints."""
        return self.rank == 0

    def connect(self, device: torch.device) -> None:
        """Start the process group: gloo on CPUs, NCCL on GPUs. All ranks except 0 stop printing, except errors.

        Raises UserError for a device that several processes cannot use.
        """
        if self.world_size == 1:
            return
        if device.type not in ("cpu", "cuda"):
            raise UserError(f"several processes cannot share {device.type}; set device=cpu, or run without torchrun")
        self.share_cores()
        if not self.is_main:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (open as long as the process)
        backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        device_id = device if device.type == "cuda" else None
        torch_dist.init_process_group(backends, timeout=COLLECTIVE_TIMEOUT, device_id=device_id)

    def share_cores(self) -> None:
        """Use this process's share of the machine's cores, unless OMP_NUM_THREADS is set to more than 1."""
        if self.world_size > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":  # torchrun sets 1
            torch.set_num_threads(max(1, cpu_count() // self.local_world_size))

    def micro_batch_starts(self, step: int, batch_size: int, micro_batch_size: int) -> Iterator[int]:
        """Yield the first sequence of each micro batch of this process, beginning with `step`, without end."""
        share = batch_size // self.world_size  # sequences of a step that this process trains on
        for current_step in count(step):
            first = current_step * batch_size + self.rank * share
            yield from range(first, first + share, micro_batch_size)

    def build_model(self, build: Callable[..., GPT], device: torch.device, dtype: torch.dtype) -> GPT:
        """Build a model with initial weights on `device`. Weights are drawn on the CPU: all devices get the same ones.

        build: function of the device on which the model's parameters are allocated. dtype: of matrix products.
        """
        return build(device="cpu").to(device)

    def wrap(self, model: nn.Module, compile: bool) -> nn.Module:
        """Wrap the model so that its backward pass averages the gradients over all processes."""
        if self.world_size > 1:
            with warnings.catch_warnings():  # torch 2.13 renamed an option
                warnings.simplefilter("ignore", FutureWarning)
                model = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
        return torch.compile(model, dynamic=False) if compile else model

    def unshard(self, model: nn.Module, wrapped_model: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
        """Both models with complete weights, so that each process can run them without the others."""
        return model, wrapped_model

    def sync_gradients(self, wrapped_model: nn.Module, is_last: bool) -> AbstractContextManager:
        """Context manager around a micro batch: only the last one of a step averages gradients over the processes."""
        return nullcontext() if is_last or self.world_size == 1 else wrapped_model.no_sync()

    def all_reduce_mean(self, value: Tensor) -> Tensor:
        """Average a tensor over all processes, in place. Does not wait for the device."""
        if self.world_size > 1:
            torch_dist.all_reduce(value)
            value /= self.world_size
        return value

    def all_reduce_sum(self, *values: float) -> list[float]:
        """The sum of each value over all processes, in float64."""
        return self._all_reduce(values, torch_dist.ReduceOp.SUM)

    def all_reduce_min(self, value: int) -> int:
        """The minimum over all processes."""
        return int(self._all_reduce((value,), torch_dist.ReduceOp.MIN)[0])

    def barrier(self) -> None:
        """Wait until all processes are here."""
        self.all_reduce_sum(0.0)

    def check_same(self, value: str, advice: str) -> None:
        """Raises UserError in all processes if one of them has another value. advice: how to get the same one."""
        if self.world_size == 1:
            return
        values: list = [None] * self.world_size
        torch_dist.all_gather_object(values, value)
        for rank, other in enumerate(values):
            if other != values[0]:
                raise UserError(f"rank {rank} has {other}, but rank 0 has {values[0]}; {advice}")

    def sync_stop_and_time(self, stop: bool, seconds: float) -> tuple[bool, float]:
        """Whether any process was asked to stop, and the training time of the slowest process."""
        stop, seconds = self._all_reduce((stop, seconds), torch_dist.ReduceOp.MAX)
        return bool(stop), seconds

    def _all_reduce(self, values: tuple[float, ...], operation) -> list[float]:
        if self.world_size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)  # on the CPU: does not wait for the GPU
        torch_dist.all_reduce(numbers, operation)
        return numbers.tolist()

    def broadcast(self, value: Any) -> Any:
        """The value of rank 0."""
        if self.world_size == 1:
            return value
        values = [value]
        torch_dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def seed(self, device: torch.device, *numbers: int) -> None:
        """Seed dropout from `numbers` and the rank, so that checkpoints need no random state.

        Only the device's generator is seeded: torch.manual_seed seeds all devices, which slows small steps.
        """
        seed = int(np.random.SeedSequence((*numbers, self.rank)).generate_state(1, np.uint64)[0])
        if device.type == "cuda":
            torch.cuda.manual_seed(seed)
        elif device.type == "mps":
            torch.mps.manual_seed(seed)
        else:
            torch.default_generator.manual_seed(seed)
