"""Cross entropy over a vocabulary, without all of its logits in memory where they are many."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100  # cross_entropy's own mark for a target that does not count
CHUNK = 2**26  # logits at a time, 256 MiB in float32: 1,334 tokens of GPT-2's vocabulary
MAX_COMPILED_CHUNKS = 16  # chunks under torch.compile, which compiles each on its own


def linear_cross_entropy(
    x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, reduction: str = "mean", chunk: int = CHUNK
) -> Tensor:
    """Cross entropy in nats, in float32, of the logits x weight^T: x (N, C), weight (rows, C), targets (N).

    Rows from vocab_size on are padding, and no part of the vocabulary. Where there are more than `chunk` logits, they
    are made, and their gradient taken, some tokens at a time: each block is gone before the next is made, so that none
    waits in memory for the backward pass. Not so in float16, whose gradients have to be scaled before they are rounded.
    reduction: mean or sum, over the targets that are not IGNORE.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r} is neither mean nor sum")
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if x.shape[0] * weight.shape[0] <= chunk or dtype == torch.float16:
        logits = F.linear(x, weight)[:, :vocab_size].float()
        return F.cross_entropy(logits, targets, reduction=reduction)
    grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    tokens = max(chunk // weight.shape[0], 1)
    if torch.compiler.is_compiling():
        tokens = max(tokens, -(-x.shape[0] // MAX_COMPILED_CHUNKS))
    total = _InChunks.apply(x.to(dtype), weight, targets, vocab_size, tokens, grad)
    return total / (targets != IGNORE_INDEX).sum() if reduction == "mean" else total


class _InChunks(torch.autograd.Function):
    """The sum over all tokens. Its gradient is taken on the way forward: softmax, minus one at the target."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, targets: Tensor, vocab_size: int, tokens: int, grad: bool) -> Tensor:
        total = torch.zeros((), device=x.device)
        grad_x = torch.empty_like(x) if grad else None
        grad_weight = torch.zeros_like(weight) if grad else None  # summed up in the weight's own float32
        rounded = weight.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            for first in range(0, x.shape[0], tokens):
                part = slice(first, first + tokens)
                counts = (targets[part] != IGNORE_INDEX).unsqueeze(1)
                target = targets[part].masked_fill(~counts[:, 0], 0).unsqueeze(1)
                logits = (x[part] @ rounded.mT).float()
                logits[:, vocab_size:] = -torch.inf
                log_likely = logits.log_softmax(1)
                total -= (log_likely.gather(1, target) * counts).sum()
                if grad:
                    slope = log_likely.exp_()
                    slope.scatter_add_(1, target, slope.new_full(target.shape, -1.0))
                    slope = slope.mul_(counts).to(x.dtype)
                    grad_x[part] = slope @ rounded
                    grad_weight += slope.mT @ x[part]
        if grad:
            ctx.save_for_backward(grad_x, grad_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream: Tensor):
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * upstream, grad_weight * upstream, None, None, None, None
