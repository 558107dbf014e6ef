"""Activation checkpointing: less memory for more time (Chen et al., arXiv:1604.06174)."""

from functools import partial

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
        # Dropout needs the random numbers of the forward pass again.
        module.forward = partial(
            checkpoint,
            module.forward,
            use_reentrant=False,
            preserve_rng_state=model.config.dropout > 0,
        )
