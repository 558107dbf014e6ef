"""Avoid features of PyTorch that import its compiler: this takes 2 s (docs/experiments/nanogpt-training-speed.md)."""

from inspect import unwrap

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class OptimizerWithoutDynamo(Optimizer):
    """Optimizer whose methods are not wrapped by torch._dynamo.disable: the wrappers import torch._dynamo."""

    add_param_group = unwrap(Optimizer.add_param_group)
    state_dict = unwrap(Optimizer.state_dict)
    load_state_dict = unwrap(Optimizer.load_state_dict)


class AdamW(OptimizerWithoutDynamo, torch.optim.AdamW):
    """torch.optim.AdamW that does not import torch._dynamo."""

    step = torch.no_grad()(unwrap(torch.optim.AdamW.step))


def empty_embedding(rows: int, width: int) -> nn.Embedding:
    """Build an uninitialized embedding. Initializing one on the meta device would import torch._dynamo."""
    return nn.Embedding.from_pretrained(torch.empty(rows, width), freeze=False)


def materialize(module: nn.Module, weights: dict[str, Tensor] | None, device: str) -> None:
    """Give a module on the meta device the tensors of a state_dict, or uninitialized ones. to_empty imports sympy."""
    if weights is None:
        weights = {name: torch.empty(weight.shape, device=device) for name, weight in module.state_dict().items()}
    module.load_state_dict(weights, assign=True)
