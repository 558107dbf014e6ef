"""Fully sharded data parallel training: FSDP2, PyTorch's torch.distributed.fsdp.fully_shard.

Each process stores its part of the rows of every weight, gradient and optimizer state (ZeRO stage 3, Rajbhandari et
al., arXiv:1910.02054; Zhao et al., arXiv:2304.11277). Before a block computes, its weights are collected from all
processes (all-gather), and released after it. The gradients of a step are summed and split again (reduce-scatter).
"""

import logging
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from common.startup import materialize
from model.gpt import GPT, Block
from training.distributed import Dist
from training.sharding import full_tensor


@dataclass(frozen=True)
class FSDP(Dist):
    """Like Dist, but the processes share one copy of the model.

    The weights of the blocks are collected in the dtype of matrix products. Embeddings, head and the sums of gradients
    are float32.
    """

    def build_model(self, build: Callable[..., GPT], device: torch.device, dtype: torch.dtype) -> GPT:
        """Build a model, and keep this process's part of its weights. One block at a time has complete weights."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        model = build(device="meta")
        # On CPUs, torch warns that it emulates a collective operation.
        logging.getLogger("torch.distributed.tensor._collective_utils").setLevel(logging.ERROR)
        # A norm's input is float32 and its weight is not: the result is right, but the kernel is not the fastest.
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        mesh = init_device_mesh(device.type, (self.world_size,))
        # The loop has autocast, which casts the inputs.
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for name, part in model.parts():
            if part is model.lm_head and model.config.tie_embeddings:
                model.lm_head.weight = model.wte.weight
                continue
            materialize(part, None, "cpu")
            model.init_weights(part, f"{name}.")
            if isinstance(part, Block):
                fully_shard(part, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh)

    def wrap(self, model: GPT, compile: bool) -> nn.Module:
        if compile:  # without the collective operations around each block, which cannot be compiled
            for block in model.blocks:
                block.forward = torch.compile(block.forward, dynamic=False)
        return model

    def sync_gradients(self, wrapped_model: nn.Module, is_last: bool) -> AbstractContextManager:
        wrapped_model.set_requires_gradient_sync(is_last)
        return nullcontext()

    def unshard(self, model: GPT, wrapped_model: nn.Module, dtype: torch.dtype) -> tuple[GPT, nn.Module]:
        """A second model with complete weights, those of the blocks in `dtype`."""
        weights = {
            p: full_tensor(p.detach().to(dtype) if name.startswith("blocks.") else p.detach())
            for name, p in model.named_parameters()
        }
        by_name = {name: weights[p] for name, p in model.state_dict(keep_vars=True).items()}
        with by_name["wte.weight"].device:
            full = GPT(model.config, model.vocab_size, model.attend, weights=by_name)
        return full, full
