"""Communication between the processes of a run: one process per device, started by torchrun.

Without torchrun there is one process, and all methods of Dist do nothing or return their argument.
Values that control the training loop are reduced over all processes. Otherwise the processes would
wait for each other forever.
"""

import os
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor

from common.errors import UserError

# A rank gives up after waiting this long for the others. Rank 0 must save a checkpoint or generate
# a sample in this time.
COLLECTIVE_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Dist:
    """This process among the processes of a run, and (local) among those on its machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> "Dist":
        """Read the variables that torchrun sets. A single process without them."""
        if os.environ.get("WORLD_SIZE", "1") == "1":
            return cls()
        return cls(
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            local_rank=int(os.environ["LOCAL_RANK"]),
            local_world_size=int(os.environ["LOCAL_WORLD_SIZE"]),
        )

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the only process that writes files and prints."""
        return self.rank == 0

    def connect(self, device: torch.device, dtype: torch.dtype) -> None:
        """Start the process group: NCCL on GPUs, gloo for tensors on the CPU.

        From now on, only rank 0 prints. Raises UserError if the dtypes of the processes differ.
        """
        if self.world_size == 1:
            return
        if not self.is_main:
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (stays open)
        is_cuda = device.type == "cuda"
        torch_dist.init_process_group(
            "cpu:gloo,cuda:nccl" if is_cuda else "gloo",
            timeout=COLLECTIVE_TIMEOUT,
            device_id=device if is_cuda else None,
        )
        name = str(dtype).removeprefix("torch.")
        self.require_equal(f"dtype={name}", "set dtype=float32 or dtype=bfloat16")

    def barrier(self) -> None:
        """Wait until all processes have called this method."""
        self.all_reduce(0.0)

    def all_reduce(self, *values: float, op: str = "sum") -> list[float]:
        """Reduce each number over all processes, in float64. op: sum, min or max."""
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
