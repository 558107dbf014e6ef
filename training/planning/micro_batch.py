"""train.micro_batch_size=auto: finds the largest micro batch whose training fits into memory.

On CUDA a run tries optimizer steps, from the device's full share of the batch downwards, until one succeeds. A CPU
process that uses too much memory is swapped or killed without an error, so there the memory is estimated by simulation
(planning/memory.py) and compared with the free memory. Both use steps without torch.compile, which need more memory.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from common import system
from common.errors import UserError, is_out_of_memory
from model.gpt import GPT
from training.config import AUTO, TrainConfig
from training.distributed import Dist
from training.fsdp import FSDP
from training.optimizer import build_optimizers
from training.planning.memory import StepSpec, allocate_optimizer_state, run_steps, simulate_memory
from training.sharding import local_tensor

USABLE_MEMORY_FRACTION = 0.8  # of the free memory, since estimates are within 20 % of measured runs
MAX_CONTEXT = 2**24  # tokens; a longer one is not searched
CONTEXT_PRECISION = 0.02
GPU_RESERVE_FRACTION = 0.05  # of a GPU's memory, left free for NCCL, fragmentation and other processes


def resolve_micro_batch_size(
    train: TrainConfig, step: StepSpec, dist: Dist, model: GPT | None = None
) -> tuple[int, int]:
    """Micro-batch size and number of accumulation steps.

    model: the model of a run, on its device; its weights and the random state do not change, and all processes get the
    same result. None: plan=true, which also simulates CUDA. Raises UserError if not even one sequence fits.
    """
    if train.micro_batch_size != AUTO:
        return train.split_batch(dist.world_size)
    share = train.batch_size // dist.world_size
    if step.device.type == "cuda" and model is not None and not isinstance(dist, FSDP):
        size = probe_on_device(model, step, share, dist.world_size)
    else:
        allocated = 0 if model is None else sum(local_tensor(p).nbytes for p in model.parameters())
        size = _estimate_by_simulation(step, share, dist, allocated)
    if model is not None:
        size = dist.all_reduce_min(size)
    if size == 0:
        raise UserError(
            f"train.micro_batch_size={AUTO}: the free memory is too small for one sequence of "
            f"model.block_size={step.model.block_size} tokens; set a smaller model.block_size, model.n_layer or "
            "model.n_embd"
        )
    return size, share // size


def usable_memory(device: torch.device, dist: Dist) -> float | None:
    """Bytes that a process can plan with; None: unknown. The processes of a machine share its memory."""
    free = system.free_memory(device)
    processes = dist.local_world_size if device.type == "cpu" else 1  # each GPU has one process
    return None if free is None else USABLE_MEMORY_FRACTION * free / processes


def find_longest_context(step: StepSpec, micro_batch_size: int, accumulation: int, available: float) -> int:
    """The longest block_size whose simulated memory is at most `available` bytes, within CONTEXT_PRECISION.

    0: not even one token fits. At most MAX_CONTEXT.
    """

    def memory(T: int) -> int:
        longer = replace(step, model=replace(step.model, block_size=T))
        return simulate_memory(longer, micro_batch_size, accumulation).reserved

    low, low_bytes, high, high_bytes = 1, memory(1), MAX_CONTEXT + 1, math.inf
    if low_bytes > available:
        return 0
    while high - low > max(1, CONTEXT_PRECISION * low):
        # Interpolate on logarithmic scales, where memory is almost a line. Its slope is 1 until a context is too long.
        slope = 1.0 if high_bytes == math.inf else math.log(high_bytes / low_bytes) / math.log(high / low)
        T = int(low * (available / low_bytes) ** (1 / slope))
        T = min(max(T, low + 1, int(low * (1 + CONTEXT_PRECISION))), high - 1)
        size = memory(T)
        if size <= available:
            low, low_bytes = T, size
        else:
            high, high_bytes = T, size
    return low


def largest_fitting_divisor(share: int, fits: Callable[[int], bool]) -> int:
    """The largest divisor of a device's share of the batch for which `fits` returns True; 0 if there is none."""
    divisors = (size for size in range(share, 0, -1) if share % size == 0)
    return next((size for size in divisors if fits(size)), 0)


def _estimate_by_simulation(step: StepSpec, share: int, dist: Dist, allocated: int) -> int:
    """The largest micro batch whose simulated memory fits into the free memory; 0 if none fits.

    share: sequences per step on one device. allocated: bytes of the weights that the process has already allocated.
    """
    available = usable_memory(step.device, dist)
    if available is None:
        raise UserError(
            f"train.micro_batch_size={AUTO} cannot read the free memory for device={step.device.type} on this system; "
            "set a number, or null to process a device's sequences all at once"
        )

    def fits(size: int) -> bool:
        return simulate_memory(step, size, share // size).reserved - allocated <= available

    return largest_fitting_divisor(share, fits)


def probe_on_device(model: GPT, step: StepSpec, share: int, world_size: int) -> int:
    """The largest micro batch that trains without an out-of-memory error on the model's device; 0 if none does.

    The weights and the random state of the device do not change.
    """

    def fits(size: int) -> bool:
        try:
            _run_steps_with_reserve(model, step, size, min(2, max(share // size, world_size)))
            return True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            model.zero_grad(set_to_none=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    with torch.random.fork_rng([step.device] if step.device.type == "cuda" else []):
        return largest_fitting_divisor(share, fits)


def _run_steps_with_reserve(model: GPT, step: StepSpec, micro_batch_size: int, accumulation: int) -> None:
    """Run optimizer steps while GPU_RESERVE_FRACTION of the GPU's memory is occupied."""
    total = torch.cuda.mem_get_info(step.device)[1] if step.device.type == "cuda" else 0
    reserve = torch.empty(int(GPU_RESERVE_FRACTION * total), dtype=torch.uint8, device=step.device)
    optimizers = build_optimizers(model, step.optimizer, step.dtype)
    allocate_optimizer_state(model, optimizers)
    run_steps(model, optimizers, replace(step, dist=Dist()), micro_batch_size, accumulation)
    del reserve
