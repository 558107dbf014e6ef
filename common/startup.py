"""torch's optimizers, bared of wrappers that hide them from its compiler, which is not used on them.

The wrappers import the compiler in order to hide from it, and that takes two seconds of every start.
"""

from inspect import unwrap

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class Uncompiled(Optimizer):
    add_param_group = unwrap(Optimizer.add_param_group)
    state_dict = unwrap(Optimizer.state_dict)
    load_state_dict = unwrap(Optimizer.load_state_dict)


class AdamW(Uncompiled, torch.optim.AdamW):
    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


def empty_embedding(rows: int, width: int) -> nn.Embedding:
    """An embedding without initial values. nn.Embedding draws them, which on the meta device imports torch._dynamo."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


def load_or_allocate(module: nn.Module, weights: dict[str, Tensor] | None, device: str) -> None:
    """Give a module that was built on the meta device its parameters: `weights`, or uninitialised memory if None.

    Module.to_empty would compute strides with sympy, whose import takes 0.5 s.
    """
    if weights is None:
        weights = {name: torch.empty(weight.shape, device=device) for name, weight in module.state_dict().items()}
    module.load_state_dict(weights, assign=True)
