"""Activation checkpointing: less memory for more time (Chen et al., arXiv:1604.06174)."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from model.gpt import GPT


def checkpoint_activations(model: GPT, part: str) -> None:
    """Keep only the inputs of each block or of each attention; the backward pass computes the rest again.

    part: "block", "attention" or "none". Losses and gradients do not change.
    """
    modules = {"none": [], "block": model.blocks, "attention": [block.attn for block in model.blocks]}
    for module in modules[part]:
        _checkpoint_forward(module, uses_random_numbers=model.config.dropout > 0)


def _checkpoint_forward(module: nn.Module, uses_random_numbers: bool) -> None:
    forward = module.forward

    def checkpointed_forward(*args, **kwargs):
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=uses_random_numbers, **kwargs)

    module.forward = checkpointed_forward
