"""train.micro_batch_size=auto: finds the largest micro batch whose training fits into memory.

On CUDA a run tries optimizer steps, from the device's full share of the batch downwards, until one succeeds. A CPU
process that uses too much memory is swapped or killed without an error, so there the memory is estimated by simulation
(planning/memory.py) and compared with the free memory. Both use steps without torch.compile, which need more memory.
"""

from collections.abc import Callable
from typing import Any

import torch

from common import system
from common.errors import UserError, is_out_of_memory
from model.attention import BACKENDS
from model.gpt import GPT
from training.config import AUTO, TrainConfig
from training.device import autocast
from training.distributed import Dist
from training.optimizer import build_optimizers, optimizer_step, set_lr
from training.planning.memory import STEPS, StepSpec, simulate_memory

USABLE_MEMORY_FRACTION = 0.8  # of the free memory, since estimates are within 20 % of measured runs
GPU_RESERVE_FRACTION = 0.05  # of a GPU's memory, left free for NCCL, fragmentation and other processes


def resolve_micro_batch_size(config: Any, model: GPT, dtype: torch.dtype, dist: Dist) -> tuple[int, int]:
    """Micro-batch size and number of accumulation steps for training `model`, which is on its device.

    All processes get the same result. The weights and the random state do not change. Raises UserError if not even one
    sequence fits.
    """
    if config.train.micro_batch_size != AUTO:
        return config.train.split_batch(dist.world_size)
    device = next(model.parameters()).device
    step = StepSpec(
        config.model, model.vocab_size, config.attention, config.optimizer, dtype, device, config.data.document_mask
    )
    share = config.train.batch_size // dist.world_size
    if device.type == "cuda":
        size = probe_on_device(model, step, share, dist.world_size)
    else:
        size = _estimate_by_simulation(step, share, dist, allocated=sum(p.nbytes for p in model.parameters()))
    return _add_accumulation(dist.all_reduce_min(size), share, step)


def estimate_micro_batch_size(train: TrainConfig, step: StepSpec, dist: Dist) -> tuple[int, int]:
    """Estimate the result of `resolve_micro_batch_size` by simulation, in one process and on any device.

    Raises UserError.
    """
    if train.micro_batch_size != AUTO:
        return train.split_batch(dist.world_size)
    backend = step.attention.backend
    if BACKENDS[backend].needs_compiler and step.device.type == "cuda":
        raise UserError(
            f"train.micro_batch_size={AUTO} cannot be planned for attention={backend}, whose compiled kernel is not "
            "simulated; set a number, or start the run without plan=true, which tries real steps"
        )
    share = train.batch_size // dist.world_size
    return _add_accumulation(_estimate_by_simulation(step, share, dist, allocated=0), share, step)


def largest_fitting_divisor(share: int, fits: Callable[[int], bool]) -> int:
    """The largest divisor of a device's share of the batch for which `fits` returns True; 0 if there is none."""
    divisors = (size for size in range(share, 0, -1) if share % size == 0)
    return next((size for size in divisors if fits(size)), 0)


def _add_accumulation(size: int, share: int, step: StepSpec) -> tuple[int, int]:
    """(micro-batch size, number of accumulation steps). Raises UserError if the size is 0, because nothing fits."""
    if size == 0:
        raise UserError(
            f"train.micro_batch_size={AUTO}: the free memory is too small for one sequence of "
            f"model.block_size={step.model.block_size} tokens; set a smaller model.block_size, model.n_layer or "
            "model.n_embd"
        )
    return size, share // size


def _estimate_by_simulation(step: StepSpec, share: int, dist: Dist, allocated: int) -> int:
    """The largest micro batch whose simulated memory fits into the free memory; 0 if none fits.

    share: sequences per step on one device. allocated: bytes of the weights that the process has already allocated.
    """
    free = system.free_memory(step.device)
    if free is None:
        raise UserError(
            f"train.micro_batch_size={AUTO} cannot read the free memory for device={step.device.type} on this system; "
            "set a number, or null to process a device's sequences all at once"
        )
    processes = dist.local_world_size if step.device.type == "cpu" else 1  # each GPU has one process
    available = USABLE_MEMORY_FRACTION * free / processes

    def fits(size: int) -> bool:
        accumulation = max(share // size, dist.world_size)  # DDP keeps gradients as accumulation does
        return simulate_memory(step, size, accumulation).reserved - allocated <= available

    return largest_fitting_divisor(share, fits)


def probe_on_device(model: GPT, step: StepSpec, share: int, world_size: int) -> int:
    """The largest micro batch that trains without an out-of-memory error on the model's device; 0 if none does.

    The weights and the random state of the device do not change.
    """

    def fits(size: int) -> bool:
        try:
            _run_steps(model, step, size, min(2, max(share // size, world_size)))
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


def _run_steps(model: GPT, step: StepSpec, micro_batch_size: int, accumulation: int) -> None:
    """Run optimizer steps while GPU_RESERVE_FRACTION of the GPU's memory is occupied."""
    device = step.device
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0
    reserve = torch.empty(int(GPU_RESERVE_FRACTION * total), dtype=torch.uint8, device=device)
    optimizers = build_optimizers(model, step.optimizer)
    set_lr(optimizers, 0.0)  # the weights do not change
    # Without a scaler no overflow of float16 skips a step, so the optimizer always allocates its state.
    scaler = torch.amp.GradScaler(device.type, enabled=False)
    shape = (3, micro_batch_size, step.model.block_size)
    tokens, targets, doc_ids = torch.zeros(shape, dtype=torch.int64, device=device)
    for _ in range(STEPS):
        for _ in range(accumulation):
            with autocast(device, step.dtype):
                loss = model(tokens, targets, doc_ids=doc_ids if step.document_mask else None)
            loss.backward()
            del loss
        optimizer_step(model, optimizers, scaler, None)
    del reserve
