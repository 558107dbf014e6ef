"""Number of parameters and floating-point operations (FLOPs) of a model.

Per sequence of T tokens, with C = n_embd, the linear layers take O(T C^2) FLOPs: every token passes every weight once.
Attention takes O(T^2 C), because every token attends to every other. Beyond `crossover` tokens, attention dominates.
"""

from bisect import bisect_left

from model.attention import AttentionRequest
from model.config import GPTConfig
from model.gpt import GPT

PARTS = {  # a part of the parameter's name -> its part of the model
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
        counts[next(part for mark, part in PARTS.items() if mark in name)] += p.numel()
    return counts


def flops_per_token(config: GPTConfig, vocab_size: int, T: int) -> int:
    """FLOPs per token of a forward and backward pass over sequences of T tokens.

    Counts matrix products only. A multiply-add is two FLOPs, and the backward pass costs twice the forward pass: 6 per
    weight, and 12 T H D per layer for attention, as in PaLM (Chowdhery et al., arXiv:2204.02311, appendix B).
    """
    return linear_flops_per_token(config, vocab_size) + attention_flops_per_token(config, T)


def linear_flops_per_token(config: GPTConfig, vocab_size: int) -> int:
    """FLOPs of the projections, the MLPs and the head: 6 per weight, without padded rows of the vocabulary."""
    C, D = config.n_embd, config.head_dim
    qkv = C * (config.n_head + 2 * config.kv_heads) * D
    return 6 * (config.n_layer * (qkv + C * C + 8 * C * C) + vocab_size * C)


def attention_flops_per_token(config: GPTConfig, T: int) -> int:
    """FLOPs of QK^T and the product with V: 12 H D per layer and key, for T keys or the keys of the window.

    Kernels may do less or more: causal kernels can skip the masked half, and many compute keys outside the window.
    """
    keys = sum(T if window is None else min(T, window) for window in config.windows)
    return 12 * config.n_head * config.head_dim * keys


def crossover(config: GPTConfig, vocab_size: int) -> int | None:
    """The smallest T at which attention takes as many FLOPs as everything else; None: never, because of windows."""
    linear = linear_flops_per_token(config, vocab_size)
    largest = -(-linear // (12 * config.n_head * config.head_dim))  # if only one layer has no window
    T = bisect_left(range(largest), linear, key=lambda T: attention_flops_per_token(config, T))
    return T if attention_flops_per_token(config, T) >= linear else None


def attention_flops(request: AttentionRequest) -> int:
    """FLOPs of one causal attention call: 2 (D + Dv) per head and visible pair of query and key.

    With gradients three times as many: dQ, dK, dV and the gradient of the weights are products of the same sizes.
    """
    offset = request.Tk - request.Tq
    pairs = request.Tq * offset + request.Tq * (request.Tq + 1) // 2
    return (3 if request.grad else 1) * 2 * request.B * request.H * pairs * (request.D + request.Dv)
