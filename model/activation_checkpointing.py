"""Activation checkpointing: less memory for more time (Chen et al., arXiv:1604.06174)."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from model.gpt import GPT


def checkpoint_activations(model: GPT, part: str) -> None:
    """Save only the inputs of each block or attention, and recompute the rest in the backward pass.

    part: "block", "attention" or "none". Losses and gradients do not change.
    """
    modules = {
        "none": [],
        "block": model.blocks,
        "attention": [block.attn for block in model.blocks],
    }
    for module in modules[part]:
        _checkpoint_forward(module, preserve_rng_state=model.config.dropout > 0)


def _checkpoint_forward(module: nn.Module, preserve_rng_state: bool) -> None:
    forward = module.forward

    def checkpointed_forward(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(
            forward, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **kwargs
        )

    module.forward = checkpointed_forward
