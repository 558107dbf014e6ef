"""train.micro_batch_size=auto: halves the micro batch until training fits into the memory of a GPU.

It needs CUDA, because a CPU process that uses too much memory is swapped or killed without an error. It needs DDP,
because an FSDP process that lacks memory would leave the others waiting. The tried steps are not compiled. Compiled
steps need less memory.
"""

from typing import NamedTuple

import torch

from common.errors import UserError, is_out_of_memory
from model.attention import ResolvedAttention
from model.gpt import GPT
from training.config import AUTO, RunConfig
from training.device import Runtime
from training.optimizer import build_optimizers, optimizer_step, set_lr

GPU_RESERVE_FRACTION = (
    0.05  # of a GPU's memory, left free for NCCL, fragmentation and other processes
)


class MicroBatches(NamedTuple):
    """The micro batches of an optimizer step on one device."""

    size: int  # sequences per forward pass
    count: int  # forward passes per step
    attention: ResolvedAttention


def resolve_micro_batches(config: RunConfig, runtime: Runtime, model: GPT) -> MicroBatches:
    """Resolve the micro batches, which are equal on all processes.

    Weights and random state do not change. Raises UserError if one sequence does not fit.
    """
    size, count = config.train.split_batch(runtime.dist.world_size)
    if config.train.micro_batch_size == AUTO:
        size = share = config.train.batch_size // runtime.dist.world_size
        while size and not fits(size, config, runtime, model):
            size = next((smaller for smaller in range(size // 2, 0, -1) if share % smaller == 0), 0)
        size = int(runtime.dist.all_reduce(size, op="min")[0])
        if size == 0:
            raise UserError(
                f"train.micro_batch_size={AUTO}: one sequence of model.block_size={config.model.block_size} tokens "
                "does not fit into memory; set a smaller model.block_size, model.n_layer or model.n_embd"
            )
        count = share // size
    return MicroBatches(size, count, runtime.resolve_attention(config, size))


def fits(micro_batch_size: int, config: RunConfig, runtime: Runtime, model: GPT) -> bool:
    """Try two steps with learning rate 0 while GPU_RESERVE_FRACTION of the memory is occupied."""
    device = runtime.device
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else 0
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            reserve = torch.empty(
                int(GPU_RESERVE_FRACTION * total), dtype=torch.uint8, device=device
            )
            optimizers = build_optimizers(model, config.optimizer, runtime.dtype)
            set_lr(optimizers, 0.0)
            for _ in range(2):  # in the second step, the optimizer state also exists
                for _ in range(2):  # in the second micro batch, the gradients also exist
                    run_micro_batch(micro_batch_size, config, runtime, model)
                optimizer_step(model, optimizers, torch.amp.GradScaler(enabled=False), None)
            del reserve
        return True
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False
    finally:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()  # does nothing without CUDA


def run_micro_batch(micro_batch_size: int, config: RunConfig, runtime: Runtime, model: GPT) -> None:
    """Run a forward and backward pass on random tokens."""
    tokens = torch.randint(
        model.vocab_size, (micro_batch_size, config.model.block_size), device=runtime.device
    )
    doc_ids = torch.zeros_like(tokens) if config.data.document_mask else None
    with runtime.autocast():
        loss = model(tokens, tokens, doc_ids=doc_ids)
    loss.backward()
