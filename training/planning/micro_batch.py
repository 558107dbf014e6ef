"""train.micro_batch_size=auto: the most sequences at a time whose training fits into memory.

On CUDA it is tried out, from a device's whole share of the batch down: optimizer steps, until they do not run out of
memory. On a CPU a process that takes too much is not told so, it is swapped or killed, and a trial would take as long
as the steps themselves. There it is reckoned: planning/memory.py follows a step on tensors without numbers, and what
that comes to is held against what the machine has left. Either is of steps that are not compiled, which hold more.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from common import system
from common.errors import UserError, is_out_of_memory
from model.attention import BACKENDS, get_attention_fn
from model.gpt import GPT
from training import optimizer
from training.config import AUTO
from training.device import autocast, grad_scaler
from training.distributed import Dist
from training.planning.memory import STEPS, simulate_memory

MEMORY_SAFETY = 0.8  # of the free memory may be reckoned with: what is simulated is right within a fifth
GPU_RESERVE = 0.05  # of a GPU's memory, in a trial: for NCCL, the allocator's gaps, and who else computes there


def resolve_micro_batch_size(config: Any, model: GPT, dtype: torch.dtype, dist: Dist) -> tuple[int, int]:
    """(sequences per forward pass on one device, forward passes per optimizer step) for training `model`.

    As train.micro_batch_size says; where it says auto, the most that fit in all processes. The model, on its device,
    and the random numbers to come are afterwards as they were. Raises UserError where not even one sequence fits.
    """
    if config.train.micro_batch_size != AUTO:
        return config.train.plan(dist.world_size)
    device = next(model.parameters()).device
    if device.type == "cuda":
        most = probe_on_device(config, model, dtype, dist)
    else:
        shapes = GPT(config.model, model.vocab_size, get_attention_fn(config.attention), device="meta")
        there = sum(weight.nbytes for weight in model.parameters())
        most = _estimate_by_simulation(config, shapes, dtype, device, dist, there)
    return _with_accumulation(config, dist, dist.all_reduce_min(most))


def estimate_micro_batch_size(
    config: Any, shapes: GPT, dtype: torch.dtype, device: torch.device, dist: Dist
) -> tuple[int, int]:
    """What `settle` will come to on `device`, for a plan: reckoned everywhere, and by one process for all.

    shapes: the model, on the meta device. Raises UserError.
    """
    if config.train.micro_batch_size != AUTO:
        return config.train.plan(dist.world_size)
    if BACKENDS[config.attention.backend].needs_compiler and device.type == "cuda":
        raise UserError(
            f"attention={config.attention.backend} is compiled, and what fits is not reckoned for it; set a number "
            "for train.micro_batch_size, or leave out plan=true, since a run tries it out"
        )
    return _with_accumulation(config, dist, _estimate_by_simulation(config, shapes, dtype, device, dist, there=0))


def _most(config: Any, dist: Dist, fits: Callable[[int, int], bool]) -> int:
    """The largest divisor of a device's share that fits(size, parts); 0: none.

    parts: how many such passes a step has. From two on gradients live beside the activations, as they do among
    several processes from the first.
    """
    share = config.train.batch_size // dist.world_size
    sizes = (size for size in range(share, 0, -1) if share % size == 0)
    return next((size for size in sizes if fits(size, max(share // size, dist.world_size))), 0)


def _with_accumulation(config: Any, dist: Dist, size: int) -> tuple[int, int]:
    if size == 0:
        raise UserError(
            f"train.micro_batch_size={AUTO}: the free memory is too small for training with even one sequence of "
            f"model.block_size={config.model.block_size} tokens at a time; set a smaller model.block_size, "
            "model.n_layer or model.n_embd"
        )
    return size, config.train.batch_size // dist.world_size // size


def _estimate_by_simulation(
    config: Any, shapes: GPT, dtype: torch.dtype, device: torch.device, dist: Dist, there: int
) -> int:
    """there: bytes of the model that the process holds already."""
    free = system.free_memory(device)
    if free is None:
        raise UserError(
            f"train.micro_batch_size={AUTO} needs to know how much memory is free, which this system does not tell "
            f"for device={device.type}; set a number, or null for all of a device's sequences at a time"
        )
    own = (
        MEMORY_SAFETY * free / (dist.local_world_size if device.type == "cpu" else 1)
    )  # each GPU is of one process alone

    def fits(size: int, parts: int) -> bool:
        memory = simulate_memory(
            shapes, get_attention_fn(config.attention), config.optimizer, B=size, T=config.model.block_size,
            accumulation=parts, dtype=dtype, device=device, document_mask=config.data.document_mask,
        )  # fmt: skip
        return memory.reserved - there <= own

    return _most(config, dist, fits)


def probe_on_device(config: Any, model: GPT, dtype: torch.dtype, dist: Dist) -> int:
    """The most sequences at a time that `model` can be trained with where it is, on a device that says when it is full.

    0: none. The model and the device's random numbers are afterwards as they were.
    """

    def fits(size: int, parts: int) -> bool:
        try:
            _train(config, model, dtype, size, min(2, parts))
            return True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return False
        finally:
            model.zero_grad(set_to_none=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    with _unchanged(model):
        return _most(config, dist, fits)


def _train(config: Any, model: GPT, dtype: torch.dtype, size: int, parts: int) -> None:
    """Optimizer steps of `parts` passes over `size` sequences each."""
    device = next(model.parameters()).device
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0
    kept_free = torch.empty(int(GPU_RESERVE * total), dtype=torch.uint8, device=device)
    optimizers, scaler = optimizer.build_optimizers(model, config.optimizer), grad_scaler(device, dtype)
    tokens = torch.zeros(3, size, config.model.block_size, dtype=torch.int64, device=device)
    for _ in range(STEPS):  # the second has the optimizer's state from the start
        for _ in range(parts):
            with autocast(device, dtype):
                loss = model(tokens[0], tokens[1], doc_ids=tokens[2] if config.data.document_mask else None)
            scaler.scale(loss).backward()
            del loss
        for each in optimizers:
            each.step()
        model.zero_grad(set_to_none=True)
    del kept_free


@contextmanager
def _unchanged(model: GPT) -> Iterator[None]:
    """What happens to weights and random numbers inside is undone. The weights wait in the machine's own memory."""
    device = next(model.parameters()).device
    kept = {name: weight.to("cpu", copy=True) for name, weight in model.state_dict().items()}
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    model.load_state_dict(kept)
