"""Functions for tensors that may be sharded: split by rows over processes (training/parallel.py).

A sharded tensor is a DTensor. Importing its module takes two seconds, so only runs that shard tensors import it. Other
tensors are returned unchanged.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

import torch.distributed as torch_dist
from torch import Tensor, nn


def is_sharded(tensor: Tensor) -> TypeGuard[Any]:
    """Whether a tensor is a DTensor."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """All-gather a tensor. All processes must call this function."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def gather(tensor: Tensor) -> Tensor | None:
    """Gather a tensor on the CPU of rank 0. Returns None on other ranks, which must also call this function."""
    if not is_sharded(tensor):
        return tensor
    full = tensor.full_tensor()
    return full.cpu() if torch_dist.get_rank() == 0 else None


def shard_like(full: Tensor, param: Tensor) -> Tensor:
    """Shard a complete tensor as `param`, if both have the same shape."""
    if not is_sharded(param) or full.shape != param.shape:
        return full
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank=None: no communication, because this process has the complete tensor. The clone lets it be freed.
    return distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None).clone()


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load complete weights into a model that may be sharded."""
    state = model.state_dict()
    model.load_state_dict({name: shard_like(weight, state[name]) for name, weight in weights.items()})


def map_matrices(function: Callable[[Tensor], Tensor], stack: Tensor) -> Tensor:
    """Apply `function` to matrices (N, rows, columns). If they are sharded, each process computes its share of N."""
    if not is_sharded(stack):
        return function(stack)
    from torch.distributed.tensor import DTensor, Shard

    split = [Shard(0)]
    result = function(stack.redistribute(placements=split).to_local())
    result = DTensor.from_local(result, stack.device_mesh, split, shape=stack.shape, stride=stack.stride())
    return result.redistribute(placements=stack.placements)
