"""Functions for tensors that may be sharded: split by rows among processes (training/fsdp.py).

A sharded tensor is a DTensor of torch.distributed.tensor. Importing that module takes two seconds, so only runs that
shard import it, and the functions recognize a DTensor by its methods. Other tensors are returned unchanged.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeGuard

import torch.distributed as torch_dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(tensor: Tensor) -> TypeGuard["DTensor"]:
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: Tensor) -> Tensor:
    """The complete tensor, in all processes. All of them must call this function."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def gather(tensor: Tensor) -> Tensor | None:
    """The complete tensor, on the CPU of rank 0. None in the other processes, which must call this function, too."""
    if is_sharded(tensor):
        full = tensor.full_tensor()
        return full.cpu() if torch_dist.get_rank() == 0 else None
    return tensor


def shard_like(full: Tensor, param: Tensor) -> Tensor:
    """This process's part of a complete tensor, sharded as `param`, if that has the same shape."""
    if is_sharded(param) and full.shape == param.shape:
        from torch.distributed.tensor import distribute_tensor

        # No communication: this process has the complete tensor. The clone of its rows lets that be freed.
        return distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None).clone()
    return full


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load complete weights into a model that can be sharded."""
    state = model.state_dict()
    model.load_state_dict({name: shard_like(weight, state[name]) for name, weight in weights.items()})


def map_matrices(function: Callable[[Tensor], Tensor], stack: Tensor) -> Tensor:
    """Apply `function` to a stack of matrices (N, rows, columns).

    If their rows are sharded, each process gets its share of the N complete matrices, so that no work is repeated.
    """
    if is_sharded(stack):
        from torch.distributed.tensor import DTensor, Shard

        mesh, split = stack.device_mesh, [Shard(0)]
        matrices = stack.redistribute(placements=split).to_local()
        result = DTensor.from_local(function(matrices), mesh, split, shape=stack.shape, stride=stack.stride())
        return result.redistribute(placements=stack.placements)
    return function(stack)
