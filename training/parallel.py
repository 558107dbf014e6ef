"""Data parallel training: how processes divide the model, its gradients and optimizer state.

DDP and FSDP2 have the same four methods. To add another class, write it here and select it in
resolve_parallel (training/runtime.py).
"""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from generation.load import model_from_weights
from model.gpt import GPT


@dataclass(frozen=True)
class DDP:
    """Distributed data parallel: each process has the model, and gradients are averaged."""

    world_size: int
    device: torch.device
    dtype: torch.dtype  # of matrix products

    def build(self, make_model: Callable[[], GPT]) -> GPT:
        """Build a model with initial weights.

        They are drawn on the CPU, so that all devices get the same weights.
        """
        return make_model().to(self.device)

    def wrap(self, model: nn.Module, compile: bool) -> nn.Module:
        """Wrap the model for the training loop. Copies the weights of rank 0 to all processes."""
        if self.world_size > 1:
            model = DistributedDataParallel(model, gradient_as_bucket_view=True)
        return torch.compile(model, dynamic=False) if compile else model

    def sync_gradients(self, wrapped_model: nn.Module, enabled: bool) -> None:
        """Choose whether the next backward pass averages the accumulated gradients."""
        if self.world_size > 1:
            wrapped_model.require_backward_grad_sync = enabled  # as no_sync() does

    def unshard(self, model: GPT, wrapped_model: nn.Module) -> tuple[GPT, nn.Module]:
        """Both models with complete weights, so that each process can run them alone."""
        return model, wrapped_model


@dataclass(frozen=True)
class FSDP2:
    """Fully sharded data parallel (Zhao et al., arXiv:2304.11277): PyTorch's fully_shard.

    Each process stores its rows of weights, gradients and optimizer state. A block's weights are
    collected in the dtype of matrix products before it computes, and released after it. All other
    sums and weights are float32.
    """

    world_size: int
    device: torch.device
    dtype: torch.dtype

    def build(self, make_model: Callable[[], GPT]) -> GPT:
        """Build a model with initial weights on the CPU, and keep this process's rows of them."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        model = make_model()
        # Norms mix float32 inputs with low-precision weights, for which PyTorch has only a slower
        # kernel.
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        policy = MixedPrecisionPolicy(
            param_dtype=self.dtype,
            reduce_dtype=torch.float32,
            cast_forward_inputs=False,  # the autocast of the loop casts them
        )
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh)

    def wrap(self, model: GPT, compile: bool) -> nn.Module:
        """Compile the blocks, without the collective operations around them."""
        if compile:
            for block in model.blocks:
                block.forward = torch.compile(block.forward, dynamic=False)
        return model

    def sync_gradients(self, wrapped_model: nn.Module, enabled: bool) -> None:
        """Choose whether the next backward pass averages the accumulated gradients."""
        wrapped_model.set_requires_gradient_sync(enabled)

    def unshard(self, model: GPT, wrapped_model: nn.Module) -> tuple[GPT, nn.Module]:
        """Gather a full copy of the model. Block weights have the dtype of matrix products."""
        weights = {}
        for name, p in model.named_parameters():
            weight = p.detach()
            if name.startswith("blocks."):
                weight = weight.to(self.dtype)
            weights[p] = full_tensor(weight)
        by_name = {name: weights[p] for name, p in model.state_dict(keep_vars=True).items()}
        full = model_from_weights(model.config, model.vocab_size, model.attend, by_name)
        return full, full


def full_tensor(tensor: Tensor) -> Tensor:
    """All-gather a tensor, if it is a DTensor. All processes must call this function."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def gather(tensor: Tensor) -> Tensor | None:
    """Gather a DTensor on the CPU of rank 0. Other ranks must call this function, and get None.

    Returns any other tensor as it is.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    full = tensor.full_tensor()
    return full.cpu() if torch_dist.get_rank() == 0 else None


def shard_like(full: Tensor, param: Any) -> Tensor:
    """Shard a complete tensor as `param`, if both have the same shape."""
    if not hasattr(param, "full_tensor") or full.shape != param.shape:
        return full
    from torch.distributed.tensor import distribute_tensor

    # src_data_rank=None: no communication, because this process has the complete tensor
    shard = distribute_tensor(full, param.device_mesh, param.placements, src_data_rank=None)
    return shard.clone()  # lets the complete tensor be freed


def load_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load complete weights into a model that may be sharded."""
    state = model.state_dict()
    shards = {name: shard_like(weight, state[name]) for name, weight in weights.items()}
    model.load_state_dict(shards)


def map_matrices(function: Callable[[Tensor], Tensor], stack: Any) -> Tensor:
    """Apply `function` to matrices (N, rows, columns).

    If they are sharded, each process computes its share of N.
    """
    if not hasattr(stack, "full_tensor"):
        return function(stack)
    from torch.distributed.tensor import DTensor, Shard

    by_matrix = [Shard(0)]
    share = function(stack.redistribute(placements=by_matrix).to_local())
    result = DTensor.from_local(
        share, stack.device_mesh, by_matrix, shape=stack.shape, stride=stack.stride()
    )
    return result.redistribute(placements=stack.placements)
