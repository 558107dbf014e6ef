"""Causal attention with interchangeable backends. The causal mask is attention_mask in backends.py.

backends.py           one function per backend; the mask
support.py            what each backend supports, refusals, and the kernel that a backend runs
linear.py             linear attention, which is no backend: it computes something else
torch_internals.py    the private PyTorch names that the model needs

docs/attention-backends.md describes how to use the backends. Every backend is a function with this
signature:

    attend(q, k, v, *, window=None, positions=None, doc_ids=None, dropout_p=0.0, softcap=None)

    q (B, Tq, H, D), k (B, Tk, G, D), v (B, Tk, G, Dv) -> y (B, Tq, H, Dv); H is a multiple of G.

    positions (B, Tq): index of each query among the keys. By default, query i has index Tk - Tq + i
        (Tq == Tk in training, Tq < Tk when decoding with a KV cache).
    window: number of keys that a query attends to, including its own. None is all keys.
    doc_ids (B, Tk): document of each key. None is one document.
    softcap: bound of the scores before the mask (model/layers.py). None is no bound.

    A query at index p attends to key j if p - window < j <= p, and if keys p and j are in the same
    document.

`naive` is the reference: softmax(mask(QK^T / sqrt(D))) V ("Attention Is All You Need", eq. 1).
Tests compare all other backends with `naive`. A backend that does not support a request raises an
error. It never falls back to another one.

B batch, Tq queries, Tk keys, H query heads, G key/value heads, D head dimension of q and k, Dv head
dimension of v.
"""

from model.attention.backends import (
    attention_mask,
    attention_weights,
    cudnn,
    flash,
    flex,
    naive,
    sdpa,
)
from model.attention.linear import linear_attention, linear_attention_scores
from model.attention.support import (
    BACKENDS,
    NON_SOFTMAX,
    AttentionRequest,
    ResolvedAttention,
    Support,
    all_variants,
    backend,
    get_attention_fn,
    missing_compiler,
    pin_kernel_under_compile,
    resolve,
    resolve_model,
)
