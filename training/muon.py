"""Muon: momentum with orthogonalized updates (Jordan et al., 2024).

https://kellerjordan.github.io/posts/muon/. torch.optim.Muon always computes in bfloat16, which is a
thousand times slower than float32 on a CPU without bfloat16 instructions. This class computes in
either dtype, and updates all matrices of one shape together.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from functools import partial

import torch
from torch import Tensor
from torch.optim import Optimizer

from common.process import without_dynamo
from training.parallel import map_matrices

# a, b and c of the Newton-Schulz iteration, chosen so that small singular values grow fast
NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: Tensor, steps: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Approximate the nearest semi-orthogonal matrices: (N, rows, columns) -> the same shape.

    Newton-Schulz iteration X <- aX + (bS + cS^2)X with S = XX^T, where S has the size of the
    shorter side. The singular values of the result are between 0.7 and 1.2.
    steps: iterations.
    dtype: dtype of X.
    """
    if matrices.shape[-2] > matrices.shape[-1]:  # so that S has the size of the shorter side
        return orthogonalize(matrices.mT, steps, dtype).mT
    X = matrices.to(dtype)
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    a, b, c = NS_COEFFICIENTS
    for _ in range(steps):
        S = X @ X.mT
        polynomial = torch.baddbmm(S, S, S, beta=b, alpha=c)  # bS + cS^2
        X = torch.baddbmm(X, polynomial, X, beta=a)
    return X.type_as(matrices)


@without_dynamo
class Muon(Optimizer):
    """Muon for the matrices of hidden layers.

    Use AdamW for embeddings, the output layer, and norms and biases.
    params: parameters with two dimensions, or parameter groups.
    lr: learning rate. Updates are also scaled by sqrt(max(1, rows / columns)).
    ns_steps: Newton-Schulz iterations.
    dtype: dtype of the orthogonalization. torch.bfloat16 is faster on GPUs.
    """

    def __init__(
        self,
        params: Iterable,
        lr: float,
        momentum: float,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        dtype: torch.dtype = torch.float32,
    ):
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "ns_steps": ns_steps,
        }
        super().__init__(params, defaults)
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    by_shape[p.shape].append(p)
            for (rows, columns), params in by_shape.items():
                # with more rows than columns, an orthogonal matrix spreads the norm of its inputs
                # over more outputs: keep their root mean square instead
                self._update(params, group, math.sqrt(max(1.0, rows / columns)))

    def _update(self, params: list[Tensor], group: dict, scale: float) -> None:
        """Update parameters of one shape. scale: factor of the learning rate."""
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        # a mean of gradients instead of SGD's sum: orthogonalizing removes the difference in scale
        torch._foreach_lerp_(buffers, [p.grad for p in params], 1 - group["momentum"])
        # a clone and an in-place lerp, because FSDP2 has no out-of-place lerp in torch 2.12
        nesterov = [p.grad.clone() for p in params]
        torch._foreach_lerp_(nesterov, buffers, group["momentum"])
        function = partial(orthogonalize, steps=group["ns_steps"], dtype=self.dtype)
        updates = map_matrices(function, torch.stack(nesterov))  # one batch of products
        # decoupled weight decay, as in AdamW
        torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(params, list(updates.unbind()), alpha=-group["lr"] * scale)
