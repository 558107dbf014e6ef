"""The attention backends: one function per backend. The causal mask is attention_mask, below.

Without windows, positions and documents, a kernel uses its own causal mask instead. FlexAttention
has the same mask as a function, in _block_mask.

model/attention/__init__.py has the signature of the functions and the notation.

To add a backend, write a function here, and decorate it with @backend(...) to state what it
supports. attention.backend=NAME then selects it (docs/hacking.md), and the tests compare it with
`naive`. Attention that computes something else is not a backend: see the end of linear.py.
"""

import functools
import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from model.attention.support import Support, backend
from model.attention.torch_internals import raise_recompile_limit
from model.layers import apply_softcap

KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
HALF_DTYPES = ("bfloat16", "float16")
NO_FLOAT64 = ("float32", "bfloat16", "float16")
ALL_DEVICES = {"cpu": Support(), "cuda": Support(), "mps": Support(NO_FLOAT64)}


def attention_mask(
    Tq: int, Tk: int, *, window=None, positions=None, doc_ids=None, device=None
) -> Tensor:
    """Causal mask: True where a query attends to a key.

    (Tq, Tk), or (B, 1, Tq, Tk) with positions or doc_ids.
    """
    key = torch.arange(Tk, device=device)
    if positions is None:
        query = torch.arange(Tk - Tq, Tk, device=device)  # (Tq)
    else:
        query = positions  # (B, Tq)
    is_visible = key <= query.unsqueeze(-1)  # (Tq, Tk) or (B, Tq, Tk)
    if window is not None:
        is_visible = is_visible & (key > query.unsqueeze(-1) - window)
    if doc_ids is not None:
        query_doc_ids = doc_ids.gather(1, query.expand(doc_ids.shape[0], Tq))
        is_same_document = query_doc_ids.unsqueeze(-1) == doc_ids.unsqueeze(1)
        is_visible = is_visible & is_same_document  # (B, Tq, Tk)
    if is_visible.ndim == 3:
        is_visible = is_visible.unsqueeze(1)  # the same for all heads
    return is_visible


def attention_scores(
    q: Tensor, k: Tensor, *, window=None, positions=None, doc_ids=None, softcap=None
) -> Tensor:
    """Attention scores mask(QK^T / sqrt(D)) -> (B, H, Tq, Tk). Masked scores are -inf."""
    _, Tq, H, D = q.shape
    Tk = k.shape[1]
    queries = q.transpose(1, 2)  # (B, H, Tq, D)
    keys = repeat_kv(k, H).permute(0, 2, 3, 1)  # (B, H, D, Tk)
    scores = apply_softcap(queries @ keys / math.sqrt(D), softcap)  # (B, H, Tq, Tk)
    is_visible = attention_mask(
        Tq, Tk, window=window, positions=positions, doc_ids=doc_ids, device=q.device
    )
    return scores.masked_fill(~is_visible, -torch.inf)


def attention_weights(q: Tensor, k: Tensor, **options) -> Tensor:
    """Attention weights softmax(scores) -> (B, H, Tq, Tk).

    Rows sum to one, and masked weights are zero.
    options: window, positions, doc_ids and softcap, as of attention_scores.
    """
    return attention_scores(q, k, **options).softmax(-1)


def repeat_kv(x: Tensor, H: int) -> Tensor:
    """Repeat key/value heads for query heads that share them: (B, Tk, G, D) -> (B, Tk, H, D)."""
    G = x.shape[2]
    return x if G == H else x.repeat_interleave(H // G, dim=2)


def pad_keys(x: Tensor, padding: int) -> Tensor:
    """Append zeros to keys or values: (B, Tk, G, D) -> (B, Tk + padding, G, D).

    The mask must hide these keys.
    """
    return F.pad(x, (0, 0, 0, 0, 0, padding))


@backend(on=ALL_DEVICES)
def naive(
    q, k, v, *, window=None, positions=None, doc_ids=None, dropout_p=0.0, softcap=None
) -> Tensor:
    """The reference: computes the formula step by step, and stores all Tq x Tk weights."""
    weights = attention_weights(
        q, k, window=window, positions=positions, doc_ids=doc_ids, softcap=softcap
    )
    weights = F.dropout(weights, dropout_p, training=dropout_p > 0).to(v.dtype)
    values = repeat_kv(v, q.shape[2]).transpose(1, 2)  # (B, H, Tk, Dv)
    return (weights @ values).transpose(1, 2)  # (B, Tq, H, Dv)


def _sdpa(
    q, k, v, window, positions, doc_ids, dropout_p, softcap, kernels: list[SDPBackend] | None
) -> Tensor:
    """Call PyTorch's scaled_dot_product_attention, restricted to `kernels` (None allows all).

    PyTorch's is_causal aligns query 0 with key 0, which is right only for Tq == Tk. A single query
    (a decode step) attends to all keys and needs no mask. All other cases get an explicit mask.
    Raises ValueError for softcaps.
    """
    if softcap is not None:
        raise ValueError("scaled_dot_product_attention does not support softcaps")
    B, Tq, H, _ = q.shape
    Tk, G = k.shape[1:3]
    if window is not None and window >= Tk:
        window = None
    is_plain = window is None and positions is None and doc_ids is None
    mask = None
    if not is_plain or 1 < Tq < Tk:
        mask = attention_mask(
            Tq, Tk, window=window, positions=positions, doc_ids=doc_ids, device=q.device
        )
        mask = mask.expand(B, 1, Tq, Tk)
    # Select the kernel here, and not around the model: a kernel that is selected outside a compiled
    # function is not part of the compile cache key, so a second process could silently get the
    # kernel of the first.
    with nullcontext() if kernels is None else sdpa_kernel(kernels, set_priority=True):
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            dropout_p=dropout_p,
            is_causal=is_plain and Tq == Tk,
            enable_gqa=G != H,
        )
    return y.transpose(1, 2)


@backend(
    on={
        "cpu": Support(lacks=("softcaps",)),
        "cuda": Support(lacks=("softcaps",)),
        "mps": Support(NO_FLOAT64, lacks=("softcaps",)),
    },
    uses_sdpa=True,
    kernels=tuple(KERNELS),
)
def sdpa(
    q, k, v, *, window=None, positions=None, doc_ids=None, dropout_p=0.0, softcap=None, kernels=None
) -> Tensor:
    """PyTorch's scaled_dot_product_attention, which chooses the kernel.

    kernels: names of the kernels that it may use. CUDA tries them in order. By default, all may be
        used, except cuDNN's for a single query.
    """
    if q.is_cuda:
        if kernels is None and q.shape[1] == 1:
            # cuDNN builds a plan for each number of keys, which is slow to decode
            kernels = ["flash", "efficient", "math"]
        # The efficient kernel refuses grouped queries. It is the only fused kernel for float32, and
        # often for masks.
        has_window = window is not None and window < k.shape[1]
        has_mask = has_window or positions is not None or doc_ids is not None
        if has_mask or q.dtype == torch.float32:
            k = repeat_kv(k, q.shape[2])
            v = repeat_kv(v, q.shape[2])
    allowed = None if kernels is None else [KERNELS[name] for name in kernels]
    return _sdpa(q, k, v, window, positions, doc_ids, dropout_p, softcap, allowed)


FLASH_CUDA_LACKS = ("softcaps", "windows", "document masks", "arbitrary positions", "Dv ≠ D")
FLASH_PACKAGE = Support(HALF_DTYPES, lacks=("dropout", *FLASH_CUDA_LACKS))


@backend(
    on={
        "cpu": Support(lacks=("dropout", "softcaps", "Dv ≠ D")),
        "cuda": Support(HALF_DTYPES, lacks=FLASH_CUDA_LACKS),
    },
    packages={"FA3": FLASH_PACKAGE, "FA4": FLASH_PACKAGE},
    uses_sdpa=True,
)
def flash(
    q, k, v, *, window=None, positions=None, doc_ids=None, dropout_p=0.0, softcap=None
) -> Tensor:
    """PyTorch's FlashAttention kernel (Dao, arXiv:2307.08691), or an error.

    It never stores all weights.
    """
    return _sdpa(q, k, v, window, positions, doc_ids, dropout_p, softcap, [KERNELS["flash"]])


@backend(
    on={"cuda": Support(HALF_DTYPES, lacks=("softcaps",))},
    uses_sdpa=True,
)
def cudnn(
    q, k, v, *, window=None, positions=None, doc_ids=None, dropout_p=0.0, softcap=None
) -> Tensor:
    """cuDNN's fused attention kernel, or an error."""
    if q.shape[1] == 1:
        # cuDNN rejects a single key, and builds a plan for each number of keys: add masked ones
        Tk = k.shape[1]
        padding = -Tk % 128
        k = pad_keys(k, padding)
        v = pad_keys(v, padding)
        if positions is None:
            positions = torch.full(q.shape[:2], Tk - 1, device=q.device)
        if doc_ids is not None:
            doc_ids = F.pad(doc_ids, (0, padding))
    return _sdpa(q, k, v, window, positions, doc_ids, dropout_p, softcap, [KERNELS["cudnn"]])


@backend(
    on={
        "cpu": Support(
            NO_FLOAT64, lacks=("training", "dropout", "document masks", "arbitrary positions")
        ),
        "cuda": Support(NO_FLOAT64, lacks=("dropout",)),
    },
    needs_compiler=True,
)
def flex(
    q, k, v, *, window=None, positions=None, doc_ids=None, dropout_p=0.0, softcap=None
) -> Tensor:
    """FlexAttention (Dong et al., arXiv:2412.05496): a kernel compiled for the mask.

    It skips masked blocks.
    Outside of torch.compile, block masks without positions are cached by the identity of doc_ids:
    do not change this tensor in place between calls. Raises ValueError for dropout.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if dropout_p > 0:
        raise ValueError("flex attention does not support dropout")
    B, Tq, H, _ = q.shape
    Tk, G = k.shape[1:3]
    if q.device.type == "cpu" and Tk % 16 != 0:
        # Inductor 2.13 gives wrong results for one query and 8, 24, 40, ... keys: add masked keys
        k = pad_keys(k, -Tk % 16)
        v = pad_keys(v, -Tk % 16)
    mask_args = (B, Tq, k.shape[1], Tk - Tq, window, positions, doc_ids, q.device)
    if torch.compiler.is_compiling():
        # The torch.compile call around the model also compiles flex_attention.
        run_kernel = flex_attention
        block_mask = _block_mask(*mask_args)
    else:
        run_kernel = _compiled_flex()
        # the positions of a decode step are a new tensor in each layer
        make_block_mask = _cached_block_mask if positions is None else _block_mask
        block_mask = make_block_mask(*mask_args)

    def cap_score(score, b, h, query, key):  # PyTorch 2.13 compiles it for one softcap per process
        return apply_softcap(score, softcap)

    y = run_kernel(
        _heads_first(q),
        _heads_first(k),
        _heads_first(v),
        None if softcap is None else cap_score,
        block_mask=block_mask,
        enable_gqa=G != H,
    )
    return y.transpose(1, 2)


def _heads_first(x: Tensor) -> Tensor:
    """(B, T, H, D) -> (B, H, T, D)"""
    x = x.transpose(1, 2)
    # Inductor 2.13 gives wrong results if it fuses the computation of q and k into the kernel.
    return x.contiguous() if torch.compiler.is_compiling() else x


@functools.cache
def _compiled_flex():
    from torch.nn.attention.flex_attention import flex_attention

    # PyTorch compiles once per type of mask, with and without gradients, for the first length and
    # for dynamic lengths. Beyond the limit, fullgraph raises an error. Without fullgraph, PyTorch
    # would compute and store all scores.
    raise_recompile_limit(64)
    return torch.compile(flex_attention, fullgraph=True)


def _block_mask(B, Tq, Tk, first_position, window, positions, doc_ids, device):
    """FlexAttention's BlockMask: which blocks of 128 x 128 are masked, visible or mixed.

    It also contains the mask function, for the mixed blocks.
    first_position: index of query 0 among the keys if positions is None.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    if not torch.compiler.is_compiling():
        # Pass tensors: with Python numbers, PyTorch would compile the kernel again for each value.
        first_position = torch.tensor(first_position, device=device)
        if window is not None:
            window = torch.tensor(window, device=device)

    def is_visible(b, h, query, key):
        position = query + first_position if positions is None else positions[b, query]
        visible = key <= position
        if window is not None:
            visible = visible & (key > position - window)
        if doc_ids is not None:
            visible = visible & (doc_ids[b, position] == doc_ids[b, key])
        return visible

    is_shared = positions is None and doc_ids is None  # one mask for all sequences
    return create_block_mask(is_visible, None if is_shared else B, None, Tq, Tk, device=device)


# All layers with the same window share one mask per forward pass.
_cached_block_mask = functools.lru_cache(maxsize=8)(_block_mask)
