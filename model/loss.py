"""Output head and cross entropy in one function. Many logits are computed in chunks to save memory.

To change the loss, change two places: linear_cross_entropy, which calls F.cross_entropy, and
_chunk_loss, which has the formula and its gradient for one of several chunks. Validation uses the
same functions. docs/hacking.md adds label smoothing to training alone.

N tokens, C channels. The weight has one row per token of the vocabulary, and then rows of padding.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.layers import apply_softcap

IGNORE_INDEX = -100  # target that is not counted
CHUNK_LOGITS = 2**26  # 256 MiB in float32; 1,335 tokens with GPT-2's vocabulary


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int,
    reduction: str = "mean",
    softcap: float | None = None,
) -> Tensor:
    """Cross entropy of the logits x weight^T in nats, as a float32 scalar.

    x (N, C): hidden states.
    weight (rows, C): rows from vocab_size on are padding.
    targets (N): token ids; IGNORE_INDEX is not counted. Or (N, vocab_size): probabilities, whose
        logits are never chunked. A row of zeros adds nothing to the sum.
    reduction: "mean" or "sum" over the counted targets.
    softcap: bound of the logits (model/layers.py).

    float16 logits are never chunked: GradScaler must scale their gradients before they are rounded.
    """
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
    max_logits = max_chunk_logits(x.device)
    rows = weight.shape[0]
    is_small = x.shape[0] * rows <= max_logits
    if is_small or dtype == torch.float16 or targets.is_floating_point():
        logits = apply_softcap(F.linear(x, weight)[:, :vocab_size].float(), softcap)
        return F.cross_entropy(logits, targets, reduction=reduction)

    chunk_tokens = max(max_logits // rows, 1)
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    total = _ChunkedCrossEntropy.apply(
        x.to(dtype), weight, targets, vocab_size, softcap, chunk_tokens, needs_grad
    )
    if reduction == "sum":
        return total
    return total / (targets != IGNORE_INDEX).sum()


def max_chunk_logits(device: torch.device) -> int:
    """Number of logits that are computed at once.

    CHUNK_LOGITS. On CUDA, as many as fill a sixteenth of the GPU's memory in float32.
    """
    if device.type != "cuda":
        return CHUNK_LOGITS
    return torch.cuda.get_device_properties(device).total_memory // 16 // 4


def _chunk_loss(
    logits: Tensor, targets: Tensor, vocab_size: int, softcap: float | None, needs_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Cross entropy summed over the n tokens of a chunk, and its gradient for the logits.

    logits (n, rows): float32, without softcap; changed in place.
    The gradient (n, rows) is softmax minus one-hot, times the derivative of the softcap. It is None
    without needs_grad.
    """
    is_counted = (targets != IGNORE_INDEX).unsqueeze(1)  # (n, 1)
    targets = targets.unsqueeze(1).masked_fill(~is_counted, 0)  # (n, 1)
    logits = apply_softcap(logits, softcap)
    softcap_slope = None if softcap is None else 1 - (logits / softcap).square()
    logits[:, vocab_size:] = -torch.inf
    log_probs = logits.log_softmax(1)
    loss = -(log_probs.gather(1, targets) * is_counted).sum()
    if not needs_grad:
        return loss, None
    grad_logits = log_probs.exp_()
    grad_logits.scatter_add_(1, targets, grad_logits.new_full(targets.shape, -1.0))
    if softcap_slope is not None:
        grad_logits *= softcap_slope
    return loss, grad_logits.mul_(is_counted)


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Cross entropy summed over all tokens. Only one chunk of logits is in memory.

    The forward pass also computes the gradients of x and weight, because no logits are left for the
    backward pass.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, vocab_size, softcap, chunk_tokens, needs_grad) -> Tensor:
        total = torch.zeros((), device=x.device)
        grad_x = torch.empty_like(x) if needs_grad else None
        # summed in the dtype of the parameter
        grad_weight = torch.zeros_like(weight) if needs_grad else None
        cast_weight = weight.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            for start in range(0, x.shape[0], chunk_tokens):
                chunk = slice(start, start + chunk_tokens)
                logits = (x[chunk] @ cast_weight.mT).float()
                loss, grad_logits = _chunk_loss(
                    logits, targets[chunk], vocab_size, softcap, needs_grad
                )
                total = total + loss  # with += and torch 2.11, compiled gradients are zero
                if needs_grad:
                    grad_logits = grad_logits.to(x.dtype)
                    grad_x[chunk] = grad_logits @ cast_weight
                    grad_weight += grad_logits.mT @ x[chunk]
        if needs_grad:
            ctx.save_for_backward(grad_x, grad_weight)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_total: Tensor):
        grad_x, grad_weight = ctx.saved_tensors
        return grad_x * grad_total, grad_weight * grad_total, None, None, None, None, None
