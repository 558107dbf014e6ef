"""One process among several, as torchrun starts them. A world of one is the default of the same code.

The loop never asks which it is: with one process every method below does nothing, or gives back what it was given.
Numbers that decide something (stop now? how long has it been?) are agreed on, or processes would part ways.
"""

import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common.errors import TrainingFailed, UserError
from common.system import cpu_count

FOREVER = timedelta(days=365)
CONNECTION_ERRORS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed", "NCCL")


@dataclass(frozen=True)
class Dist:
    """rank, of world_size processes; local_rank, of local_world_size on this machine."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1

    @classmethod
    def from_environment(cls) -> "Dist":
        """What torchrun says; alone where it does not."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return cls(*(int(os.environ[name]) for name in names)) if set(names) <= set(os.environ) else cls()

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that writes and speaks."""
        return self.rank == 0

    def connect(self, device: torch.device) -> None:
        """Meet the others: gloo on CPUs, NCCL between GPUs. All but one fall silent, save for errors.

        Raises UserError for a device that several processes cannot use.
        """
        if self.world_size == 1:
            return
        if device.type not in ("cpu", "cuda"):
            raise UserError(f"several processes cannot share {device.type}; set device=cpu, or leave out torchrun")
        self.share_cores()
        if not self.is_main:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (as long as the process)
        backends = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        torch_dist.init_process_group(backends, device_id=device if device.type == "cuda" else None)

    def share_cores(self) -> None:
        """Compute with this process's share of the machine's cores, unless OMP_NUM_THREADS is set above 1."""
        if self.world_size > 1 and os.environ.get("OMP_NUM_THREADS", "1") == "1":  # torchrun's own default is 1
            torch.set_num_threads(max(1, cpu_count() // self.local_world_size))

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """Rank 0 goes through the block, then the others. They wait however long it takes, in no collective."""
        if self.world_size == 1:
            yield
            return
        store = torch_dist.distributed_c10d._get_default_store()
        if not self.is_main:
            store.wait(["main_first"], FOREVER)
        yield
        if self.is_main:
            store.set("main_first", "done")

    @contextmanager
    def raise_on_lost_rank(self) -> Iterator[None]:
        """Ends this process where another was lost; rank 0 says so. Raises TrainingFailed."""
        try:
            yield
        except RuntimeError as error:
            if self.world_size > 1 and any(word in str(error) for word in CONNECTION_ERRORS):
                time.sleep(2)  # that torchrun sees the other end first, and names it as the cause
                if not self.is_main and "NCCL" not in str(error):
                    raise SystemExit(1) from None  # said once is enough
                raise TrainingFailed(
                    f"rank {self.rank} lost another process, whose error, or what killed it, is the one to mend; "
                    "start the same command with the run's name= again: it continues from its last checkpoint "
                    f"({str(error).splitlines()[0]})"
                ) from None
            raise

    def share(self, first: int, size: int) -> tuple[int, int]:
        """This process's (first, size) of the sequences first to first + size; the world divides size."""
        each = size // self.world_size
        return first + self.rank * each, each

    def micro_batch_starts(self, step: int, batch_size: int, size: int) -> Iterator[int]:
        """The first sequence of each of this process's micro batches of `size`, from `step` on and without end."""
        for each in count(step):
            first, share = self.share(each * batch_size, batch_size)
            yield from range(first, first + share, size)

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model whose backward pass averages gradients over all processes."""
        if self.world_size == 1:
            return model
        with warnings.catch_warnings():  # the option has another name from torch 2.13 on
            warnings.simplefilter("ignore", FutureWarning)
            return DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)

    def sync_gradients(self, wrapped: nn.Module, now: bool) -> AbstractContextManager:
        """Around forward and backward of a micro batch: gradients are only added up until `now`, then averaged."""
        return nullcontext() if now or self.world_size == 1 else wrapped.no_sync()

    def mean(self, value: Tensor) -> Tensor:
        """The mean over all processes of a tensor on the device. Nothing waits for it."""
        if self.world_size > 1:
            torch_dist.all_reduce(value)
            value /= self.world_size
        return value

    def sum(self, *values: float) -> list[float]:
        """Sums over all processes of numbers, in float64."""
        return self._reduce(values, torch_dist.ReduceOp.SUM)

    def all_reduce_min(self, value: int) -> int:
        """The smallest of the values of all processes."""
        return int(self._reduce((value,), torch_dist.ReduceOp.MIN)[0])

    def barrier(self) -> None:
        """Wait until all processes are here: one that leaves early is taken for one that failed."""
        self.sum(0.0)

    def check_same(self, what: str, value: Any) -> None:
        """Raises TrainingFailed where another process has another value."""
        if self.broadcast(value) != value:
            raise TrainingFailed(
                f"rank {self.rank} starts from another {what} than rank 0; all machines must see the same runs/ folder"
            )

    def sync_stop_and_time(self, stop: bool, seconds: float, off_the_clock: float) -> tuple[bool, float]:
        """Whether any process was asked to stop, and the time by the slowest clock, less what does not count of it."""
        stop, seconds, off_the_clock = self._reduce((stop, seconds, off_the_clock), torch_dist.ReduceOp.MAX)
        return bool(stop), seconds - off_the_clock

    def _reduce(self, values: tuple[float, ...], how) -> list[float]:
        if self.world_size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)  # on the CPU, so that no GPU is waited for
        torch_dist.all_reduce(numbers, how)
        return numbers.tolist()

    def broadcast(self, value: Any) -> Any:
        """Rank 0's value, on all."""
        if self.world_size == 1:
            return value
        values = [value]
        torch_dist.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def seed(self, device: torch.device, *numbers: int) -> None:
        """Seed what is random within a step (dropout) from `numbers` and the rank: there is no state to save."""
        seed = int(np.random.SeedSequence((*numbers, self.rank)).generate_state(1, np.uint64)[0])
        generators = {"cuda": lambda: torch.cuda.default_generators[torch.cuda.current_device()],
                      "mps": torch.mps._get_default_mps_generator}  # fmt: skip
        # The device's own generator alone: torch.manual_seed goes through every kind of device, a part of a small step.
        generators.get(device.type, lambda: torch.default_generator)().manual_seed(seed)
