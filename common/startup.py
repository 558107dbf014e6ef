"""Start-up optimizations: avoid PyTorch features that import its compiler, which saves 2 to 2.5 s per command.

Importing torch._dynamo takes 1.4 to 1.9 s and sympy 0.5 s on two cores (docs/experiments/nanogpt-training-speed.md).
A test checks that a run without torch.compile imports neither.
"""

from inspect import unwrap

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Uncompiled(Optimizer):
    """Base class of optimizers without the `torch._dynamo.disable` wrappers, which import torch._dynamo when called."""

    add_param_group = unwrap(Optimizer.add_param_group)
    state_dict = unwrap(Optimizer.state_dict)
    load_state_dict = unwrap(Optimizer.load_state_dict)


class AdamW(Uncompiled, torch.optim.AdamW):
    """torch.optim.AdamW without `torch._dynamo.disable` wrappers."""

    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


def empty_embedding(rows: int, width: int) -> nn.Embedding:
    """An embedding without initial values: initializing one on the meta device would import torch._dynamo."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


def load_or_allocate(module: nn.Module, weights: dict[str, Tensor] | None, device: str) -> None:
    """Load `weights` into a module that was built on the meta device. weights None: allocate uninitialized memory.

    module.to_empty would import sympy to compute strides.
    """
    if weights is None:
        weights = {name: torch.empty(weight.shape, device=device) for name, weight in module.state_dict().items()}
    module.load_state_dict(weights, assign=True)
