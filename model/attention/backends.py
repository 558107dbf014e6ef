"""The attention backends: one function per backend. model/attention/__init__.py has their signature and notation.

To add a backend, write a function here, and decorate it with @backend(...) to state what it supports.
attention.backend=NAME then selects it (docs/hacking.md), and the tests compare it with `naive`.
To add attention that computes something else, decorate its function with @backend(..., attention_type="<name>"), and
add the name to ATTENTION_TYPES in model/config.py.
"""

import functools
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.attention.softcap import apply_softcap
from model.attention.support import Support, backend
from model.attention.torch_internals import raise_recompile_limit

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
HALF_DTYPES = ("bfloat16", "float16")
ALL_DEVICES = {
    "cpu": Support(),
    "cuda": Support(),
    "mps": Support(dtypes=("float32", *HALF_DTYPES)),
}


def attention_mask(
    Tq: int, Tk: int, *, window=None, positions=None, doc_ids=None, device=None
) -> Tensor:
    """Boolean mask, True where a query attends to a key -> (Tq, Tk), or (B, 1, Tq, Tk) with positions or doc_ids."""
    key = torch.arange(Tk, device=device)
    query = (
        torch.arange(Tk - Tq, Tk, device=device) if positions is None else positions
    )  # (Tq) or (B, Tq)
    query = query.unsqueeze(-1)
    visible = key <= query
    if window is not None:
        visible = visible & (key > query - window)
    if doc_ids is not None:
        query_doc = doc_ids.gather(1, query.squeeze(-1).expand(doc_ids.shape[0], Tq))
        visible = visible & (query_doc.unsqueeze(-1) == doc_ids.unsqueeze(1))  # (B, Tq, Tk)
    return visible.unsqueeze(1) if visible.ndim == 3 else visible


def attention_scores(
    q: Tensor, k: Tensor, *, window=None, positions=None, doc_ids=None, softcap=None
) -> Tensor:
    """Attention scores mask(QK^T / sqrt(D)) -> (B, H, Tq, Tk). Masked scores are -inf."""
    Tq, Tk, H, D = q.shape[1], k.shape[1], q.shape[2], q.shape[3]
    scores = (
        q.transpose(1, 2) @ repeat_kv(k, H).permute(0, 2, 3, 1) / math.sqrt(D)
    )  # (B, H, Tq, Tk)
    visible = attention_mask(
        Tq, Tk, window=window, positions=positions, doc_ids=doc_ids, device=q.device
    )
    return apply_softcap(scores, softcap).masked_fill(~visible, -torch.inf)


def attention_weights(q: Tensor, k: Tensor, **options) -> Tensor:
    """Attention weights softmax(scores) -> (B, H, Tq, Tk). Rows sum to one; masked weights are zero.

    options: window, positions, doc_ids and softcap, as of attention_scores.
    """
    return attention_scores(q, k, **options).softmax(-1)


def repeat_kv(x: Tensor, H: int) -> Tensor:
    """Repeat key/value heads for the query heads that share them: (B, Tk, G, D) -> (B, Tk, H, D)."""
    G = x.shape[2]
    return x if G == H else x.repeat_interleave(H // G, dim=2)


@backend(on=ALL_DEVICES)
def naive(
    q, k, v, *, window=None, positions=None, doc_ids=None, dropout_p=0.0, softcap=None
) -> Tensor:
    """The reference: computes the formula step by step, and stores all Tq x Tk weights."""
    weights = attention_weights(
        q, k, window=window, positions=positions, doc_ids=doc_ids, softcap=softcap
    )
    weights = F.dropout(weights, dropout_p, training=dropout_p > 0).to(v.dtype)
    v = repeat_kv(v, q.shape[2])
    return (weights @ v.transpose(1, 2)).transpose(1, 2)  # (B, Tq, H, Dv)


def _sdpa(
    q, k, v, window, positions, doc_ids, dropout_p, softcap, kernels: list[SDPBackend] | None
) -> Tensor:
    """Call PyTorch's scaled_dot_product_attention, restricted to `kernels`.

    PyTorch's is_causal aligns query 0 with key 0, which is right only for Tq == Tk. A single query (a decode step)
    attends to all keys and needs no mask. All other cases get an explicit mask. Raises ValueError for softcaps.
    """
    if softcap is not None:
        raise ValueError("scaled_dot_product_attention does not support softcaps")
    Tq, Tk = q.shape[1], k.shape[1]
    if window is not None and window >= Tk:
        window = None
    is_plain = window is None and positions is None and doc_ids is None
    mask = None
    if not is_plain or 1 < Tq < Tk:
        mask = attention_mask(
            Tq, Tk, window=window, positions=positions, doc_ids=doc_ids, device=q.device
        )
        mask = mask.expand(q.shape[0], 1, Tq, Tk)
    # Select the kernel here, and not around the model: a kernel that is selected outside a compiled function is not
    # part of the compile cache key, so a second process could silently get the kernel of the first.
    with sdpa_kernel(kernels, set_priority=True) if kernels else nullcontext():
        options = {"is_causal": is_plain and Tq == Tk, "enable_gqa": q.shape[2] != k.shape[2]}
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, **options)
    return y.transpose(1, 2)


@backend(
    on={device: replace(support, softcap=False) for device, support in ALL_DEVICES.items()},
    uses_sdpa=True,
    kernels=tuple(KERNELS),
)
def sdpa(
    q, k, v, *, window=None, positions=None, doc_ids=None, dropout_p=0.0, softcap=None, kernels=None
) -> Tensor:
    """PyTorch's scaled_dot_product_attention, which chooses the kernel.

    kernels: names of the kernels that it may use, by default all; cuDNN's not for one query. CUDA tries them in order.
    """
    if q.is_cuda:
        if (
            kernels is None and q.shape[1] == 1
        ):  # cuDNN builds a plan for each number of keys, which is slow to decode
            kernels = ["flash", "efficient", "math"]
        # The efficient kernel refuses grouped queries. It is the only fused one for float32, and often for masks.
        if (
            q.dtype == torch.float32
            or positions is not None
            or doc_ids is not None
            or (window or inf) < k.shape[1]
        ):
            k, v = repeat_kv(k, q.shape[2]), repeat_kv(v, q.shape[2])
    allowed = [KERNELS[name] for name in kernels] if kernels is not None else None
    return _sdpa(q, k, v, window, positions, doc_ids, dropout_p, softcap, allowed)


UNSUPPORTED = ("softcap", "window", "document_mask", "positions", "different_value_dim")
FLASH_CUDA = {"dtypes": HALF_DTYPES, "head_dims": (1, 256)} | dict.fromkeys(UNSUPPORTED, False)


@backend(
    on={
        "cpu": Support(dropout=False, softcap=False, different_value_dim=False),
        "cuda": Support(**FLASH_CUDA),
        "cuda FA3": Support(**FLASH_CUDA, dropout=False),
        "cuda FA4": Support(**FLASH_CUDA, dropout=False),
    },
    uses_sdpa=True,
)
def flash(
    q, k, v, *, window=None, positions=None, doc_ids=None, dropout_p=0.0, softcap=None
) -> Tensor:
    """PyTorch's FlashAttention kernel (Dao, arXiv:2307.08691), or an error. It never stores all weights."""
    return _sdpa(q, k, v, window, positions, doc_ids, dropout_p, softcap, [KERNELS["flash"]])


@backend(
    on={"cuda": Support(dtypes=HALF_DTYPES, softcap=False, head_dims=(1, 256))}, uses_sdpa=True
)
def cudnn(
    q, k, v, *, window=None, positions=None, doc_ids=None, dropout_p=0.0, softcap=None
) -> Tensor:
    """cuDNN's fused attention kernel, or an error."""
    if (
        q.shape[1] == 1
    ):  # cuDNN rejects a single key, and builds a plan for each number of keys: add masked ones
        Tk, padding = k.shape[1], -k.shape[1] % 128
        positions = (
            torch.full(q.shape[:2], Tk - 1, device=q.device) if positions is None else positions
        )
        k, v = (F.pad(x, (0, 0, 0, 0, 0, padding)) for x in (k, v))
        doc_ids = None if doc_ids is None else F.pad(doc_ids, (0, padding))
    return _sdpa(q, k, v, window, positions, doc_ids, dropout_p, softcap, [KERNELS["cudnn"]])


@backend(
    on={
        "cpu": Support(
            dtypes=("float32", *HALF_DTYPES),
            gradients=False,
            dropout=False,
            document_mask=False,
            positions=False,
        ),
        "cuda": Support(dtypes=("float32", *HALF_DTYPES), dropout=False, head_dims=(16, inf)),
    },
    needs_compiler=True,
)
def flex(
    q, k, v, *, window=None, positions=None, doc_ids=None, dropout_p=0.0, softcap=None
) -> Tensor:
    """FlexAttention (Dong et al., arXiv:2412.05496): a kernel that is compiled for the mask and skips masked blocks.

    Outside of torch.compile, block masks without positions are cached by the identity of doc_ids: do not change this
    tensor in place between calls. Raises ValueError for dropout.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if dropout_p > 0:
        raise ValueError("flex attention does not support dropout")
    B, Tq, Tk, use_gqa = q.shape[0], q.shape[1], k.shape[1], q.shape[2] != k.shape[2]
    # On a CPU, Inductor 2.13 gives wrong results for one query and 8, 24, 40, ... keys: add keys that are masked.
    if q.device.type == "cpu" and Tk % 16:
        k, v = (F.pad(x, (0, 0, 0, 0, 0, -Tk % 16)) for x in (k, v))
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    # a cached function would be a graph break with a warning, while the model is compiled
    make_score_mod = (
        _softcap_score_mod.__wrapped__ if torch.compiler.is_compiling() else _softcap_score_mod
    )
    score_mod = make_score_mod(softcap)
    mask_args = (B, Tq, k.shape[2], Tk - Tq, window, positions, doc_ids, q.device)
    if (
        torch.compiler.is_compiling()
    ):  # the torch.compile call around the model also compiles flex_attention
        # contiguous: Inductor 2.13 gives wrong results if it fuses the computation of q and k into the kernel
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        y = flex_attention(
            q, k, v, score_mod, block_mask=_block_mask(*mask_args), enable_gqa=use_gqa
        )
    else:
        # the positions of a decode step are a new tensor in each layer
        block_mask = (
            _cached_block_mask(*mask_args) if positions is None else _block_mask(*mask_args)
        )
        y = _compiled_flex()(q, k, v, score_mod, block_mask=block_mask, enable_gqa=use_gqa)
    return y.transpose(1, 2)


@functools.cache
def _softcap_score_mod(softcap: float | None) -> Callable[..., Tensor] | None:
    """FlexAttention's function of a score; cached, because PyTorch compiles once for each function."""
    return None if softcap is None else lambda score, b, h, i, j: apply_softcap(score, softcap)


@functools.cache
def _compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention

    # PyTorch compiles once per type of mask, with and without gradients, for the first length and for dynamic lengths.
    # Beyond the limit, fullgraph raises an error. Without fullgraph, PyTorch would compute and store all scores.
    raise_recompile_limit(64)
    return torch.compile(flex_attention, fullgraph=True)


def _block_mask(B, Tq, Tk, offset, window, positions, doc_ids, device):
    """Build FlexAttention's BlockMask: which blocks of 128 x 128 are masked, visible or mixed, and the mask function.

    offset: index of query 0 among the keys if positions is None.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    if not torch.compiler.is_compiling():
        # Pass tensors: with Python numbers, PyTorch would compile the kernel again for each value.
        offset = torch.tensor(offset, device=device)
        window = None if window is None else torch.tensor(window, device=device)

    def is_visible(b, h, i, j):
        position = i + offset if positions is None else positions[b, i]
        visible = j <= position
        if window is not None:
            visible = visible & (j > position - window)
        if doc_ids is not None:
            visible = visible & (doc_ids[b, position] == doc_ids[b, j])
        return visible

    is_shared = positions is None and doc_ids is None  # one mask for all sequences
    return create_block_mask(is_visible, None if is_shared else B, None, Tq, Tk, device=device)


# All layers with the same window share one mask per forward pass.
_cached_block_mask = functools.lru_cache(maxsize=8)(_block_mask)
