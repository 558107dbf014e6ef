"""Output head and cross entropy in one function. Logits that would need too much memory are computed in chunks.

A change of the loss, such as label smoothing, belongs in both ways to compute it. Validation uses the same function.
N tokens, C channels. The weight has one row per token of the vocabulary, and then rows of padding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.attention.softcap import apply_softcap

IGNORE_INDEX = -100  # target that is not counted
CHUNK_LOGITS = 2**26  # 256 MiB in float32; 1,335 tokens with GPT-2's vocabulary
MAX_COMPILED_CHUNKS = 16  # torch.compile unrolls the loop over chunks


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    reduction: str = "mean",
    chunk_logits: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Cross entropy of the logits x weight^T in nats, as a float32 scalar.

    x (N, C): hidden states.
    weight (rows, C): rows from vocab_size on are padding.
    targets (N): token ids; IGNORE_INDEX is not counted.
    reduction: "mean" or "sum" over the counted targets.
    chunk_logits: more logits are computed in chunks, to save memory. None: CHUNK_LOGITS, or 1/16 of a GPU's memory.
    softcap: bound of the logits (model/attention/softcap.py).

    float16 logits are never chunked: GradScaler must scale their gradients before they are rounded.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r} must be mean or sum")
    device = x.device.type
    if chunk_logits is None:
        is_cuda = device == "cuda"
        chunk_logits = (
            torch.cuda.get_device_properties(x.device).total_memory // 64
            if is_cuda
            else CHUNK_LOGITS
        )
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    if x.shape[0] * weight.shape[0] <= chunk_logits or dtype == torch.float16:
        logits = apply_softcap(F.linear(x, weight)[:, :vocab_size].float(), softcap)
        return F.cross_entropy(logits, targets, reduction=reduction)
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    chunk = max(chunk_logits // weight.shape[0], 1)  # tokens
    if torch.compiler.is_compiling():
        chunk = max(chunk, -(-x.shape[0] // MAX_COMPILED_CHUNKS))
    total = _ChunkedCrossEntropy.apply(
        x.to(dtype), weight, targets, vocab_size, chunk, needs_grad, softcap
    )
    return total / (targets != IGNORE_INDEX).sum() if reduction == "mean" else total


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Cross entropy summed over tokens. The forward pass also computes the logits' gradient, softmax minus one-hot."""

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size, chunk, needs_grad, softcap) -> Tensor:
        total = torch.zeros((), device=x.device)
        grad_x = torch.empty_like(x) if needs_grad else None
        grad_weight = (
            torch.zeros_like(weight) if needs_grad else None
        )  # summed in the dtype of the parameter
        cast_weight = weight.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            for first in range(0, x.shape[0], chunk):
                part = slice(first, first + chunk)
                is_counted = (targets[part] != IGNORE_INDEX).unsqueeze(1)
                target = targets[part].masked_fill(~is_counted[:, 0], 0).unsqueeze(1)
                logits = apply_softcap((x[part] @ cast_weight.mT).float(), softcap)
                slope = (
                    None if softcap is None else 1 - (logits / softcap).square()
                )  # derivative of the softcap
                logits[:, vocab_size:] = -torch.inf
                log_probs = logits.log_softmax(1)
                total -= (log_probs.gather(1, target) * is_counted).sum()
                if needs_grad:
                    dlogits = log_probs.exp_()
                    dlogits.scatter_add_(1, target, dlogits.new_full(target.shape, -1.0))
                    if slope is not None:
                        dlogits *= slope
                    dlogits = dlogits.mul_(is_counted).to(x.dtype)
                    grad_x[part] = dlogits @ cast_weight
                    grad_weight += dlogits.mT @ x[part]
        if needs_grad:
            ctx.save_for_backward(grad_x, grad_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total: Tensor):
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad_total, grad_weight * grad_total, None, None, None, None, None
