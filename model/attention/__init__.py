"""Causal attention, and the truth about which kernel computes it.

Every backend is a function with one signature, the seam between the model and the kernels:

    attend(q, k, v, *, window=None, positions=None, doc_ids=None, dropout_p=0.0)

    q (B, Tq, H, D), k (B, Tk, G, D), v (B, Tk, G, Dv) -> y (B, Tq, H, Dv); H is a multiple of G.

    positions (B, Tq): where each query stands among the keys; None: query i at Tk - Tq + i
        (Tq == Tk trains, Tq < Tk decodes on a cache).
    Key j is seen iff j <= position, it lies within the window (how many keys a query sees, itself
        included; None: all), and in the same document (doc_ids (B, Tk): an id per key; None: one).

`naive` is the definition: softmax(QK^T / sqrt(D), masked) V, as in "Attention Is All You Need", eq. 1. Every
other backend computes the same numbers and is held to it by tests. A backend that cannot do what is asked
refuses; none falls back to another.

B batch, T time, H query heads, G key/value heads, D head size of q and k, Dv head size of v.

backends.py has the functions, support.py the table of what each can do, resolution.py the kernel that will run.
"""

from model.attention.backends import attention_mask, attention_weights, cudnn, flash, flex, naive, sdpa
from model.attention.resolve import (
    Resolved,
    all_variants,
    get_attention_fn,
    pin_kernel_under_compile,
    resolve,
    resolve_model,
)
from model.attention.support import BACKENDS, AttentionRequest, Support, backend, support_table

__all__ = [
    "BACKENDS",
    "AttentionRequest",
    "Resolved",
    "Support",
    "all_variants",
    "attention_mask",
    "attention_weights",
    "backend",
    "cudnn",
    "flash",
    "flex",
    "get_attention_fn",
    "naive",
    "pin_kernel_under_compile",
    "resolve",
    "resolve_model",
    "sdpa",
    "support_table",
]  # fmt: skip
