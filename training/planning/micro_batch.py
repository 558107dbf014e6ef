"""train.micro_batch_size=auto: halves the micro batch until training fits into a GPU's memory.

It needs CUDA, because a CPU process that uses too much memory is swapped or killed without an
error. It needs DDP, because an FSDP process that lacks memory would leave the others waiting. The
tried steps are not compiled. Compiled steps need less memory.
"""

from dataclasses import replace

import torch

from common.errors import UserError, is_out_of_memory
from model.gpt import GPT
from training.config import AUTO, RunConfig
from training.device import Runtime, resolve_attention
from training.optimizer import build_optimizers, optimizer_step, set_lr

GPU_RESERVE_FRACTION = 0.05  # of a GPU's memory: for NCCL, fragmentation and other processes


def fit_micro_batches(config: RunConfig, runtime: Runtime, model: GPT) -> Runtime:
    """The runtime with the largest micro batches that fit into memory, equal on all processes.

    Weights and random state do not change. Raises UserError if one sequence does not fit.
    """
    dist = runtime.dist
    share = config.train.batch_size // dist.world_size
    divisors = [size for size in range(1, share + 1) if share % size == 0]
    size = share
    while size > 0 and not fits(size, config, runtime, model):
        size = max([smaller for smaller in divisors if smaller <= size // 2], default=0)
    smallest = int(dist.all_reduce(size, op="min")[0])
    if smallest == 0:
        raise UserError(
            f"train.micro_batch_size={AUTO}: one sequence of model.block_size="
            f"{config.model.block_size} tokens does not fit into memory; set a smaller "
            "model.block_size, model.n_layer or model.n_embd"
        )
    attention = resolve_attention(config, runtime.device, runtime.dtype, smallest)
    return replace(
        runtime,
        micro_batch_size=smallest,
        accumulation=share // smallest,
        attention=attention,
    )


def fits(micro_batch_size: int, config: RunConfig, runtime: Runtime, model: GPT) -> bool:
    """Try two steps with learning rate 0 while GPU_RESERVE_FRACTION of the memory is occupied."""
    device = runtime.device
    is_cuda = device.type == "cuda"
    total = torch.cuda.mem_get_info(device)[1] if is_cuda else 0
    try:
        with torch.random.fork_rng([device] if is_cuda else []):
            reserved_bytes = int(GPU_RESERVE_FRACTION * total)
            reserve = torch.empty(reserved_bytes, dtype=torch.uint8, device=device)
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
    shape = (micro_batch_size, config.model.block_size)
    tokens = torch.randint(model.vocab_size, shape, device=runtime.device)
    doc_ids = torch.zeros_like(tokens) if config.data.document_mask else None
    with runtime.autocast():
        loss = model(tokens, tokens, doc_ids=doc_ids)
    loss.backward()
