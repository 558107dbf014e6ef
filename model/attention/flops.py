"""Floating-point operations (FLOPs) of attention: O(T^2 C), a score for each query and key.

T tokens, C channels, H query heads, D head dimension of q and k, Dv head dimension of v.
"""

from model.attention.linear import CHUNK
from model.attention.support import AttentionRequest
from model.config import GPTConfig


def attention_flops_per_token(config: GPTConfig, T: int) -> int:
    """FLOPs of QK^T and the product with V, forward and backward: 12 H D per layer and key.

    A layer has T keys, or at most its window. Kernels may do less or more: causal kernels can skip
    the masked half, and many compute keys outside the window. For layers with linear attention, see
    linear_attention_keys.
    """
    keys = 0
    for attention_type, window in zip(config.attention_types, config.windows, strict=True):
        if attention_type == "linear":
            keys += linear_attention_keys(config.head_dim, T)
        else:
            keys += min(T, window or T)
    return 12 * config.n_head * config.head_dim * keys


def linear_attention_keys(D: int, T: int) -> int:
    """Keys per query with which softmax attention takes as many FLOPs as linear attention.

    These are the keys of a chunk, plus D: products with the state take 4 D Dv FLOPs per head and
    query, and products within a chunk 2 (D + Dv) per key.
    """
    return min(T, CHUNK) + D


def visible_pairs(Tq: int, Tk: int, window: int | None, document_length: int | None = None) -> int:
    """Number of unmasked query-key pairs of one sequence and head.

    document_length: length of all documents; by default, the sequence is one document.
    """
    length = document_length or Tk
    # a query sees the keys of its document up to its own position
    return sum(min(position % length + 1, window or Tk) for position in range(Tk - Tq, Tk))


def attention_flops(
    request: AttentionRequest, attention_type: str = "softmax", document_length: int | None = None
) -> int:
    """FLOPs of a forward pass of one causal attention call.

    These are 2 (D + Dv) per head and unmasked query-key pair. A backward pass takes twice as many:
    the two products have four gradients (of Q, K, V and the weights), and each takes as many FLOPs
    as its product. For linear attention, see linear_attention_keys.
    """
    if attention_type == "linear":
        pairs = request.Tq * linear_attention_keys(request.D, request.Tq)
    else:
        pairs = visible_pairs(request.Tq, request.Tk, request.window, document_length)
    return 2 * request.B * request.H * pairs * (request.D + request.Dv)
