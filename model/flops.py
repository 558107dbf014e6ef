"""Number of parameters and floating-point operations (FLOPs) of a model.

Per sequence of T tokens, with C = n_embd, the linear layers take O(T C^2) FLOPs: each weight is multiplied once per
token. Attention takes O(T^2 C), because each query has a score for each key. For long sequences, attention dominates.
T tokens, C channels, H query heads, D head dimension of q and k, Dv head dimension of v.
"""

import numpy as np

from model.attention import AttentionRequest
from model.attention.linear import CHUNK
from model.config import GATED_MLPS, GPTConfig
from model.gpt import GPT

PARTS = {  # substring of a parameter's name -> part of the model
    "wte.": "token embedding",
    "wpe.": "position embedding",
    "ngrams.": "n-gram embedding",
    ".attn.": "attention",
    ".mlp.": "mlp",
    "norm": "norms",
    "lm_head.": "head",
}


def n_params(model: GPT) -> int:
    """Number of parameters; a tied head counts once."""
    return sum(p.numel() for p in model.parameters())


def params_by_part(model: GPT) -> dict[str, int]:
    """Number of parameters of each part in PARTS. A tied head counts as token embedding."""
    counts = dict.fromkeys(PARTS.values(), 0)
    for name, p in model.named_parameters():
        counts[next(part for substring, part in PARTS.items() if substring in name)] += p.numel()
    return counts


def flops_per_token(config: GPTConfig, vocab_size: int, T: int) -> int:
    """FLOPs per token of a forward and backward pass over sequences of T tokens.

    Only matrix products count. A multiply-add is two FLOPs, and the backward pass takes twice as many as the forward
    pass. This gives 6 per weight, and 12 T H D per layer for attention, as in PaLM (Chowdhery et al.,
    arXiv:2204.02311, appendix B).
    """
    return weight_flops_per_token(config, vocab_size) + attention_flops_per_token(config, T)


def weight_flops_per_token(config: GPTConfig, vocab_size: int) -> int:
    """FLOPs of the projections, the MLPs and the head: 6 per weight, without padded rows of the vocabulary."""
    C, D = config.n_embd, config.head_dim
    qkv = C * (config.n_head + 2 * config.kv_heads) * D
    mlp = (3 if config.mlp in GATED_MLPS else 2) * C * config.mlp_channels
    return 6 * (config.n_layer * (qkv + C * C + mlp) + vocab_size * C)


def attention_flops_per_token(config: GPTConfig, T: int) -> int:
    """FLOPs of QK^T and the product with V: 12 H D per layer and key. A layer has T keys, or at most its window.

    Kernels may do less or more: causal kernels can skip the masked half, and many compute keys outside the window.
    For layers with linear attention, see linear_attention_keys.
    """
    keys = sum(
        linear_attention_keys(config.head_dim, T) if attention_type == "linear" else min(T, window or T)
        for attention_type, window in zip(config.attention_types, config.windows, strict=True)
    )
    return 12 * config.n_head * config.head_dim * keys


def linear_attention_keys(D: int, T: int) -> int:
    """Keys per query with which softmax attention takes as many FLOPs as linear attention: a chunk's keys, plus D.

    Products with the state take 4 D Dv FLOPs per head and query. Products within a chunk take 2 (D + Dv) per key.
    """
    return min(T, CHUNK) + D


def visible_pairs(Tq: int, Tk: int, window: int | None, document_length: int | None = None) -> int:
    """Number of unmasked query-key pairs of one sequence and head.

    document_length: length of all documents; by default, the sequence is one document.
    """
    keys = np.arange(Tk - Tq, Tk) % (document_length or Tk) + 1  # up to the query, in its document
    return int(np.minimum(keys, window or Tk).sum())


def attention_flops(
    request: AttentionRequest, attention_type: str = "softmax", document_length: int | None = None
) -> int:
    """FLOPs of a forward pass of one causal attention call: 2 (D + Dv) per head and unmasked query-key pair.

    A backward pass takes twice as many: the two products have four gradients (of Q, K, V and the weights), and each
    takes as many FLOPs as its product. For linear attention, see linear_attention_keys.
    """
    pairs = visible_pairs(request.Tq, request.Tk, request.window, document_length)
    if attention_type == "linear":
        pairs = request.Tq * linear_attention_keys(request.D, request.Tq)
    return 2 * request.B * request.H * pairs * (request.D + request.Dv)
