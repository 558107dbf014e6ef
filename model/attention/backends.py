"""The attention backends: a function each, with the signature that model/attention/__init__.py describes.

A new one is a function here (or anywhere that is imported) under @backend, which says what it can do, and
configs/attention/<name>.yaml. The tests hold it to `naive`.
"""

import functools
import math
from contextlib import nullcontext
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.attention.support import Support, backend

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
HALF = ("bfloat16", "float16")


def attention_mask(Tq: int, Tk: int, *, window=None, positions=None, doc_ids=None, device=None) -> Tensor:
    """Which keys each query sees -> bool, broadcastable to (B, H, Tq, Tk)."""
    key = torch.arange(Tk, device=device)
    query = torch.arange(Tk - Tq, Tk, device=device) if positions is None else positions  # (Tq) or (B, Tq)
    query = query.unsqueeze(-1)
    seen = key <= query
    if window is not None:
        seen = seen & (key > query - window)
    if doc_ids is not None:
        of_query = doc_ids.gather(1, query.squeeze(-1).expand(doc_ids.shape[0], Tq))
        seen = seen & (of_query.unsqueeze(-1) == doc_ids.unsqueeze(1))  # (B, Tq, Tk)
    return seen.unsqueeze(1) if seen.ndim == 3 else seen


def attention_weights(q: Tensor, k: Tensor, *, window=None, positions=None, doc_ids=None) -> Tensor:
    """The causal weights softmax(mask(QK^T / sqrt(D))) -> (B, H, Tq, Tk): rows sum to one, zero where not seen."""
    k = repeat_kv(k, q.shape[2])
    scores = q.transpose(1, 2) @ k.permute(0, 2, 3, 1) / math.sqrt(q.shape[-1])  # (B, H, Tq, Tk)
    seen = attention_mask(q.shape[1], k.shape[1], window=window, positions=positions, doc_ids=doc_ids, device=q.device)
    return scores.masked_fill(~seen, -torch.inf).softmax(-1)


def repeat_kv(shared: Tensor, H: int) -> Tensor:
    """Keys or values (B, T, G, D) -> (B, T, H, D), each head repeated for the queries that share it."""
    G = shared.shape[2]
    return shared if G == H else shared.repeat_interleave(H // G, dim=2)


EVERYWHERE = {"cpu": Support(), "cuda": Support(), "mps": Support(dtypes=("float32", *HALF))}


@backend(on=EVERYWHERE)
def naive(q, k, v, *, window=None, positions=None, doc_ids=None, dropout_p=0.0) -> Tensor:
    """The definition, with all Tq x Tk weights in memory."""
    weights = attention_weights(q, k, window=window, positions=positions, doc_ids=doc_ids)
    weights = F.dropout(weights, dropout_p, training=dropout_p > 0).to(v.dtype)
    v = repeat_kv(v, q.shape[2])
    return (weights @ v.transpose(1, 2)).transpose(1, 2)  # (B, Tq, H, Dv)


def _sdpa(q, k, v, window, positions, doc_ids, dropout_p, kernels: list[SDPBackend] | None) -> Tensor:
    """PyTorch's scaled_dot_product_attention, told in its own words what the seam means, by one of `kernels`.

    Its is_causal aligns query 0 with key 0, which is right for Tq == Tk alone: a single query on a cache sees
    every key and needs no mask, and anything else gets an explicit one.
    """
    Tq, Tk = q.shape[1], k.shape[1]
    window = None if window is not None and window >= Tk else window  # it hides nothing
    plain = window is None and positions is None and doc_ids is None
    mask = None
    if not plain or 1 < Tq < Tk:
        mask = attention_mask(Tq, Tk, window=window, positions=positions, doc_ids=doc_ids, device=q.device)
        mask = mask.expand(q.shape[0], 1, Tq, Tk)
    # The choice is made here and not around the model: made outside a compiled function, it is no part of the
    # compile cache's key, and a second process can silently be given the first one's kernel.
    with sdpa_kernel(kernels, set_priority=True) if kernels else nullcontext():
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask, dropout_p=dropout_p,
            is_causal=plain and Tq == Tk, enable_gqa=q.shape[2] != k.shape[2],
        )  # fmt: skip
    return y.transpose(1, 2)


@backend(on=EVERYWHERE, picks_kernel=True)
def sdpa(q, k, v, *, window=None, positions=None, doc_ids=None, dropout_p=0.0, kernels=None) -> Tensor:
    """PyTorch's scaled_dot_product_attention, with the kernel that PyTorch chooses.

    kernels: the names of those that it may choose, in order of preference (which counts on CUDA; elsewhere PyTorch
    has one order); None: all of them, in PyTorch's order.
    """
    chosen = [KERNELS[name] for name in kernels] if kernels is not None else None
    return _sdpa(q, k, v, window, positions, doc_ids, dropout_p, chosen)


ON_CUDA = Support(dtypes=HALF, window=False, document_mask=False, positions=False, any_dv=False, head_sizes=(1, 256))
WITHOUT_DROPOUT = Support(**vars(ON_CUDA) | {"dropout": False})


@backend(
    on={
        "cpu": Support(dropout=False, any_dv=False),
        "cuda": ON_CUDA,
        "cuda FA3": WITHOUT_DROPOUT,
        "cuda FA4": WITHOUT_DROPOUT,
    },
    picks_kernel=True,
)
def flash(q, k, v, *, window=None, positions=None, doc_ids=None, dropout_p=0.0) -> Tensor:
    """PyTorch's built-in FlashAttention (Dao, arXiv:2307.08691), or an error: weights never in memory."""
    return _sdpa(q, k, v, window, positions, doc_ids, dropout_p, [KERNELS["flash"]])


@backend(on={"cuda": Support(dtypes=HALF, head_sizes=(1, 256))}, picks_kernel=True)
def cudnn(q, k, v, *, window=None, positions=None, doc_ids=None, dropout_p=0.0) -> Tensor:
    """cuDNN's fused attention, or an error."""
    if k.shape[1] == 1:  # it takes no single key: one that nobody sees is put behind it
        positions = torch.zeros(q.shape[:2], dtype=torch.int64, device=q.device)
        k, v = (F.pad(each, (0, 0, 0, 0, 0, 1)) for each in (k, v))
        doc_ids = None
    return _sdpa(q, k, v, window, positions, doc_ids, dropout_p, [KERNELS["cudnn"]])


@backend(
    on={
        "cpu": Support(dtypes=("float32", *HALF), gradients=False, dropout=False),
        "cuda": Support(dtypes=("float32", *HALF), dropout=False, head_sizes=(16, inf)),
    },
    needs_compiler=True,
)
def flex(q, k, v, *, window=None, positions=None, doc_ids=None, dropout_p=0.0) -> Tensor:
    """FlexAttention (Dong et al., arXiv:2412.05496): a kernel compiled for the mask, which skips what nobody sees.

    Raises ValueError for dropout, which it has not.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if dropout_p > 0:
        raise ValueError("flex attention has no dropout")
    B, Tq, Tk, gqa, device = q.shape[0], q.shape[1], k.shape[1], q.shape[2] != k.shape[2], q.device
    behind = Tk - Tq
    if device.type == "cpu" and Tk % 16:  # one query on, say, 24 keys: there Inductor 2.13 is wrong (see the tests)
        k, v = (F.pad(each, (0, 0, 0, 0, 0, -Tk % 16)) for each in (k, v))  # by keys that no query sees
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    Tk = k.shape[2]
    if torch.compiler.is_compiling():  # what is compiled around it takes it in
        # contiguous: where Inductor 2.13 fuses what makes q and k into the kernel, it is wrong (see the tests)
        q, k, v = (each.contiguous() for each in (q, k, v))
        mask = _block_mask(B, Tq, Tk, behind, window, positions, doc_ids, device)
        y = flex_attention(q, k, v, block_mask=mask, enable_gqa=gqa)
    else:
        mask = _block_mask_once(B, Tq, Tk, behind, window, positions, doc_ids, device)
        y = _compiled_flex()(q, k, v, block_mask=mask, enable_gqa=gqa)
    return y.transpose(1, 2)


@functools.cache
def _compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention

    # Each kind of mask is compiled, with and without gradients, for one length and then for any. Where that is too
    # often, fullgraph fails rather than run it uncompiled, which would write out all scores.
    torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    return torch.compile(flex_attention, fullgraph=True)


def _block_mask(B, Tq, Tk, behind, window, positions, doc_ids, device):
    """`visible` for blocks of 128 x 128: which of them nobody sees, which everybody, and a function for the rest."""
    from torch.nn.attention.flex_attention import create_block_mask

    if doc_ids is not None:
        doc_ids = F.pad(doc_ids, (0, Tk - doc_ids.shape[1]))
    if not torch.compiler.is_compiling():  # as tensors: a kernel would be compiled for each number that it captures
        behind = torch.tensor(behind, device=device)
        window = None if window is None else torch.tensor(window, device=device)
        if device.type == "cpu":
            positions, doc_ids = _pad_to_power_of_two(positions), _pad_to_power_of_two(doc_ids)

    def seen(b, h, i, j):
        at = i + behind if positions is None else positions[b, i]
        sees = j <= at
        if window is not None:
            sees = sees & (j > at - window)
        if doc_ids is not None:
            sees = sees & (doc_ids[b, at] == doc_ids[b, j])
        return sees

    each = None if positions is None and doc_ids is None else B
    return create_block_mask(seen, each, None, Tq, Tk, device=device)


def _pad_to_power_of_two(tensor: Tensor | None) -> Tensor | None:
    """Filled up to powers of two, each of which is compiled for.

    For sizes that vary, Inductor 2.13 writes C++ in which it then takes, say, ks1 of ks19 for a name of its own.
    """
    if tensor is None:
        return None
    rows, columns = ((1 << (n - 1).bit_length()) - n for n in tensor.shape)
    tensor = F.pad(tensor, (0, columns, 0, rows))
    for dim in (0, 1):
        torch._dynamo.mark_static(tensor, dim)
    return tensor


_masks: dict[tuple, tuple] = {}


def _block_mask_once(B, Tq, Tk, behind, window, positions, doc_ids, device):
    """_block_mask, made once for all layers that ask with the same tensors, unchanged since as their version tells."""
    if any(tensor is not None and tensor.is_inference() for tensor in (positions, doc_ids)):
        return _block_mask(B, Tq, Tk, behind, window, positions, doc_ids, device)  # such tensors have no version
    key = (B, Tq, Tk, behind, window, device)
    stand = [(tensor, None if tensor is None else tensor._version) for tensor in (positions, doc_ids)]
    then, mask = _masks.get(key, (None, None))
    if then is None or any(a is not b or v != w for (a, v), (b, w) in zip(then, stand, strict=True)):
        if len(_masks) >= 8:  # as many kinds of layers as a model has; sampling, where T grows, leaves old ones behind
            _masks.clear()
        mask = _block_mask(B, Tq, Tk, behind, window, positions, doc_ids, device)
        _masks[key] = (stand, mask)
    return mask
