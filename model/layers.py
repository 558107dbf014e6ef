"""Linear and embedding layers without PyTorch's default initialization, and RMSNorm.

GPT.init_weights initializes all weights. PyTorch's default would be overwritten, takes a second for
GPT-2, and on the meta device it imports torch._dynamo, which takes another one.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Linear(nn.Linear):
    """nn.Linear whose weights are not initialized."""

    def reset_parameters(self) -> None:
        pass


class Embedding(nn.Embedding):
    """nn.Embedding whose weights are not initialized."""

    def reset_parameters(self) -> None:
        pass


class RMSNorm(nn.RMSNorm):
    """nn.RMSNorm that is fast on CPUs, too."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.eps, self.weight).type_as(x)


def rms_norm(x: Tensor, eps: float | None = None, weight: Tensor | None = None) -> Tensor:
    """Divide x (..., C) by its root mean square over the C channels, and multiply by the weight.

    eps: added to the mean square. By default, the machine epsilon of the dtype.
    weight (C): by default, ones.
    On CPUs, the result of half precision is float32, as with autocast on GPUs. Values that overflow
    give nan there. First derivatives only.
    """
    if x.device.type != "cpu":
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    if eps is None:
        eps = torch.finfo(x.dtype).eps
    if torch.is_grad_enabled():
        y = _RMSNorm.apply(x, eps)
    else:  # a call of an autograd function takes longer than the norm of one token
        y, _ = _divide_by_rms(x, eps)
    return y if weight is None else y * weight


def _divide_by_rms(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """rms_norm without weight, and the scale 1 / rms(x) (..., 1), in few passes over memory.

    F.rms_norm has no fused kernel for CPUs in torch 2.15.
    """
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    mean_square = norm.square() / x.shape[-1]
    # nan instead of zero after an overflow: a run that has diverged must not look trained
    scale = (mean_square + eps).rsqrt().masked_fill(mean_square.isinf(), torch.nan)
    return x * scale, scale


class _RMSNorm(torch.autograd.Function):
    """rms_norm without weight, with its own gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, eps: float) -> Tensor:
        y, scale = _divide_by_rms(x, eps)
        ctx.save_for_backward(y, scale)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y: Tensor) -> tuple[Tensor, None]:
        """dx = (dy - y mean(y dy)) / rms(x)"""
        y, scale = ctx.saved_tensors
        projection = (grad_y * y).mean(dim=-1, keepdim=True)
        return torch.addcmul(grad_y, y, projection, value=-1).mul_(scale), None


def apply_softcap(x: Tensor, cap: float | None) -> Tensor:
    """Elementwise cap tanh(x / cap). Returns x if cap is None."""
    return x if cap is None else cap * (x / cap).tanh()
