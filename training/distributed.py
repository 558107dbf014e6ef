"""One process among several. A world of one is the default of the same code: the loop never asks which it is."""

import os
from dataclasses import dataclass

import numpy as np
import torch

from errors import UserError


@dataclass(frozen=True)
class Dist:
    rank: int
    world_size: int

    @classmethod
    def from_environment(cls) -> "Dist":
        """What torchrun says. Raises UserError for more than one process, which training does not support yet."""
        world_size = int(os.environ.get("WORLD_SIZE", "1"))
        if world_size > 1:
            raise UserError(f"training runs as one process, not {world_size}; start python train.py without torchrun")
        return cls(rank=0, world_size=1)

    def seed(self, device: torch.device, *numbers: int) -> None:
        """Seed what is random within a step (dropout) from `numbers` and the rank: there is no state to save."""
        seed = int(np.random.SeedSequence((*numbers, self.rank)).generate_state(1, np.uint64)[0])
        generators = {"cuda": lambda: torch.cuda.default_generators[torch.cuda.current_device()],
                      "mps": torch.mps._get_default_mps_generator}  # fmt: skip
        # The device's own generator alone: torch.manual_seed goes through every kind of device, a part of a small step.
        generators.get(device.type, lambda: torch.default_generator)().manual_seed(seed)

    def share(self, first: int, count: int) -> tuple[int, int]:
        """This process's (first, count) of the sequences first to first + count; the world divides count."""
        each = count // self.world_size
        return first + self.rank * each, each
