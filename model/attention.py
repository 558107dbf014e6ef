"""Causal attention, and the truth about which kernel computes it.

Every backend is a function with one signature, the seam between the model and the kernels:

    attend(q, k, v, *, window=None, positions=None, documents=None, dropout_p=0.0)

    q (B, Tq, H, D), k (B, Tk, G, D), v (B, Tk, G, Dv) -> y (B, Tq, H, Dv); H is a multiple of G.

    positions (B, Tq): where each query stands among the keys; None: query i at Tk - Tq + i
        (Tq == Tk trains, Tq < Tk decodes on a cache).
    Key j is seen iff j <= position, it lies within the window (how many keys a query sees, itself
        included; None: all), and in the same document (documents (B, Tk): an id per key; None: one).

`naive` is the definition: softmax(QK^T / sqrt(D), masked) V, as in "Attention Is All You Need", eq. 1. Every
other backend computes the same numbers and is held to it by tests. A backend that cannot do what is asked
refuses; none falls back to another.

B batch, T time, H query heads, G key/value heads, D head size of q and k, Dv head size of v.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from errors import UserError

ALL_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Support:
    """What a backend can do on one kind of device. The checks, their sentences and the tests read this."""

    dtypes: tuple[str, ...] = ALL_DTYPES
    dropout: bool = True
    any_dv: bool = True  # Dv may differ from D
    max_head_size: int | None = None


@dataclass(frozen=True)
class Backend:
    """A way to compute attention; `kernels` are PyTorch's that it may use, empty where it is written out here."""

    name: str
    attend: Callable[..., Tensor]
    kernels: tuple[SDPBackend, ...]
    support: dict[str, Support]  # by device type; a device that is missing cannot run it


@dataclass(frozen=True)
class Resolved:
    """What was asked for and what will run, on record in summary.json."""

    requested: str
    resolved: str  # naive, math, flash, efficient, cudnn
    impl: str | None = None


BACKENDS: dict[str, Backend] = {}


def backend(kernels: tuple[SDPBackend, ...] = (), **support: Support):
    """Register the decorated function as `attention=<its name>`, with what it supports per device type."""

    def register(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        BACKENDS[attend.__name__] = Backend(attend.__name__, attend, kernels, support)
        return attend

    return register


def visible(Tq: int, Tk: int, *, window=None, positions=None, documents=None, device=None) -> Tensor:
    """Which keys each query sees -> bool, broadcastable to (B, H, Tq, Tk)."""
    key = torch.arange(Tk, device=device)
    query = torch.arange(Tk - Tq, Tk, device=device) if positions is None else positions  # (Tq) or (B, Tq)
    query = query.unsqueeze(-1)
    seen = key <= query
    if window is not None:
        seen = seen & (key > query - window)
    if documents is not None:
        of_query = documents.gather(1, query.squeeze(-1).expand(documents.shape[0], Tq))
        seen = seen & (of_query.unsqueeze(-1) == documents.unsqueeze(1))  # (B, Tq, Tk)
    return seen.unsqueeze(1) if seen.ndim == 3 else seen


def attention_weights(q: Tensor, k: Tensor, *, window=None, positions=None, documents=None) -> Tensor:
    """The causal weights softmax(mask(QK^T / sqrt(D))) -> (B, H, Tq, Tk): rows sum to one, zero where not seen."""
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / math.sqrt(q.shape[-1])  # (B, H, Tq, Tk)
    seen = visible(q.shape[1], k.shape[1], window=window, positions=positions, documents=documents, device=q.device)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


EVERYWHERE = {"cpu": Support(), "cuda": Support(), "mps": Support()}


@backend(**EVERYWHERE)
def naive(q, k, v, *, window=None, positions=None, documents=None, dropout_p=0.0) -> Tensor:
    """The definition, with all Tq x Tk weights in memory."""
    weights = attention_weights(q, k, window=window, positions=positions, documents=documents)
    weights = F.dropout(weights, dropout_p, training=dropout_p > 0).to(v.dtype)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    return (weights @ v.transpose(1, 2)).transpose(1, 2)  # (B, Tq, H, Dv)


def _torch_arguments(q, k, v, window, positions, documents, dropout_p) -> dict:
    """The arguments under which PyTorch's scaled_dot_product_attention means what the seam means.

    Its is_causal aligns query 0 with key 0, which is right for Tq == Tk alone: a single query on a cache sees
    every key and needs no mask, and anything else gets an explicit one.
    """
    Tq, Tk = q.shape[1], k.shape[1]
    plain = window is None and positions is None and documents is None
    causal = plain and Tq == Tk
    mask = None
    if not causal and not (plain and Tq == 1):
        mask = visible(Tq, Tk, window=window, positions=positions, documents=documents, device=q.device)
        mask = mask.expand(q.shape[0], 1, Tq, Tk) if mask.ndim == 4 else mask
    return dict(
        query=q.transpose(1, 2),
        key=k.transpose(1, 2),
        value=v.transpose(1, 2),
        attn_mask=mask,
        dropout_p=dropout_p,
        is_causal=causal,
        enable_gqa=q.shape[2] != k.shape[2],
    )


@backend(kernels=(SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION,
                  SDPBackend.MATH), **EVERYWHERE)  # fmt: skip
def sdpa(q, k, v, *, window=None, positions=None, documents=None, dropout_p=0.0) -> Tensor:
    """PyTorch's scaled_dot_product_attention, with the kernel that PyTorch chooses."""
    arguments = _torch_arguments(q, k, v, window, positions, documents, dropout_p)
    return F.scaled_dot_product_attention(**arguments).transpose(1, 2)


@backend(
    kernels=(SDPBackend.FLASH_ATTENTION,),
    cpu=Support(dropout=False, any_dv=False),
    cuda=Support(dtypes=("bfloat16", "float16"), any_dv=False, max_head_size=256),
)
def flash(q, k, v, *, window=None, positions=None, documents=None, dropout_p=0.0) -> Tensor:
    """PyTorch's built-in FlashAttention (Dao, arXiv:2307.08691), or an error: weights never in memory."""
    arguments = _torch_arguments(q, k, v, window, positions, documents, dropout_p)
    # Entered here and not around the model: a choice made outside a compiled function is no part of the compile
    # cache's key, and a second process can silently be given the first one's kernel.
    with sdpa_kernel(list(BACKENDS["flash"].kernels)):
        return F.scaled_dot_product_attention(**arguments).transpose(1, 2)


def find(name: str) -> Backend:
    """The backend called `name`. Raises UserError, listing what there is."""
    if name not in BACKENDS:
        raise UserError(f"attention.backend={name} is unknown; set one of {', '.join(BACKENDS)}")
    return BACKENDS[name]


def resolve(
    name: str, *, B: int, T: int, H: int, G: int, D: int, Dv: int | None = None,
    dtype: torch.dtype, device: torch.device, dropout_p: float, grad: bool = True,
) -> Resolved:  # fmt: skip
    """Which kernel will run `name` on these shapes (see the legend above). Nothing is computed.

    Raises UserError, naming the setting to change, where the backend cannot run: first by the table of what it
    supports, then by asking PyTorch itself, whose own reasons are passed on.
    """
    chosen, Dv = find(name), D if Dv is None else Dv
    _check_support(chosen, D=D, Dv=Dv, dtype=dtype, device=device, dropout_p=dropout_p)
    if not chosen.kernels:
        return Resolved(name, name)

    def empty(heads, size):
        return torch.empty(B, T, heads, size, dtype=dtype, device=device, requires_grad=grad)

    arguments = _torch_arguments(empty(H, D), empty(G, D), empty(G, Dv), None, None, None, dropout_p)
    with warnings.catch_warnings(record=True) as reasons:
        warnings.simplefilter("always")
        try:
            with sdpa_kernel(list(chosen.kernels)):
                kernel = SDPBackend(torch._fused_sdp_choice(**arguments))
        except RuntimeError as error:
            said = [str(reason.message).split(" (Triggered")[0] for reason in reasons] or [str(error)]
            raise UserError(
                f"attention={name} cannot run here ({' '.join(said)}); set attention=sdpa, which picks what can"
            ) from None
    return Resolved(name, kernel.name.removesuffix("_ATTENTION").lower())


def _check_support(chosen: Backend, *, D: int, Dv: int, dtype, device, dropout_p: float) -> None:
    """Hold a request against the table. Raises UserError."""
    able = chosen.support.get(device.type)
    if able is None:
        raise UserError(
            f"attention={chosen.name} does not run on {device.type}; set attention=sdpa, or device to one of "
            f"{', '.join(chosen.support)}"
        )
    name = f"attention={chosen.name} on {device.type}"
    if dropout_p > 0 and not able.dropout:
        raise UserError(f"{name} has no dropout; set model.dropout=0, or attention=sdpa")
    if str(dtype).removeprefix("torch.") not in able.dtypes:
        raise UserError(
            f"{name} does not compute in {str(dtype).removeprefix('torch.')}; "
            f"set dtype={able.dtypes[0]}, or attention=sdpa"
        )
    if Dv != D and not able.any_dv:
        raise UserError(f"{name} needs values as wide as keys, not Dv={Dv} and D={D}; set attention=sdpa")
    if able.max_head_size is not None and able.max_head_size < D:
        raise UserError(
            f"{name} takes heads of at most {able.max_head_size} channels, not {D}; set a larger model.n_head, "
            "or attention=sdpa"
        )
