"""What a model costs: parameters and floating-point operations.

Over a sequence of T tokens, with C = n_embd, the projections and the MLP take O(T C^2), since each token goes through
every weight once, while QK^T and its product with V take O(T^2 C), since each token meets every other: the second
overtakes the first where the context is longer than some multiple of the width.
"""

from bisect import bisect_left

from model.attention import AttentionRequest
from model.config import GPTConfig
from model.gpt import GPT

PARTS = {  # by what a parameter's name begins with, or has in it
    "wte.": "token embedding",
    "wpe.": "position embedding",
    "ngrams.": "n-gram embedding",
    ".attn.": "attention",
    ".mlp.": "mlp",
    "norm": "norms",
    "lm_head.": "head",
}


def n_params(model: GPT, *, embedding: bool = True) -> int:
    """Parameters, a tied head counted once; without the look-up tables (wte, wpe, n-grams) if embedding is False.

    A tied table is also the head's matrix and stays in the second count: it is multiplied with.
    """
    total = sum(p.numel() for p in model.parameters())
    if not embedding:
        total -= 0 if model.wpe is None else model.wpe.weight.numel()
        total -= 0 if model.ngrams is None else model.ngrams.table.weight.numel()
        total -= 0 if model.config.tie_embeddings else model.wte.weight.numel()
    return total


def params_by_part(model: GPT) -> dict[str, int]:
    """Parameters of each of PARTS; a tied head has none of its own."""
    counts = dict.fromkeys(PARTS.values(), 0)
    for name, p in model.named_parameters():
        counts[next(part for mark, part in PARTS.items() if mark in name)] += p.numel()
    return counts


def flops_per_token(config: GPTConfig, vocab_size: int, T: int) -> int:
    """FLOPs per token of one forward and backward pass over sequences of T tokens.

    Matrix products alone, a multiply and an add each, and the backward pass twice the forward: 6 per weight and
    12 T H D per layer for QK^T and its product with V, as in PaLM (Chowdhery et al., arXiv:2204.02311, appendix B).
    """
    return linear_flops_per_token(config, vocab_size) + attention_flops_per_token(config, T)


def linear_flops_per_token(config: GPTConfig, vocab_size: int) -> int:
    """The part for projections, MLP and head: 6 per weight that is multiplied with, padded rows apart, whatever T."""
    C, D = config.n_embd, config.head_dim
    qkv = C * (config.n_head + 2 * config.kv_heads) * D
    return 6 * (config.n_layer * (qkv + C * C + 8 * C * C) + vocab_size * C)


def attention_flops_per_token(config: GPTConfig, T: int) -> int:
    """The part for QK^T and its product with V: 12 H D in each layer per key, of which there are T or a window's.

    What the mathematics asks for: all T count, though a causal kernel may skip the half that is masked, and a window's
    keys alone, though most kernels compute what they then hide.
    """
    keys = sum(T if window is None else min(T, window) for window in config.windows)
    return 12 * config.n_head * config.head_dim * keys


def crossover(config: GPTConfig, vocab_size: int) -> int | None:
    """The shortest T at which attention takes at least the FLOPs of all else. None: windows keep it below for ever."""
    linear = linear_flops_per_token(config, vocab_size)
    enough = -(-linear // (12 * config.n_head * config.head_dim))  # for a single layer without a window
    T = bisect_left(range(enough), linear, key=lambda T: attention_flops_per_token(config, T))
    return T if attention_flops_per_token(config, T) >= linear else None


def attention_flops(need: AttentionRequest) -> int:
    """FLOPs of one call of causal attention: 2 (D + Dv) per head for each key that a query sees, a multiply and an add.

    With gradients three times that: dQ, dK, dV and that of the weights are products of the same sizes. What a kernel
    computes twice, or computes and then hides, is not counted.
    """
    behind = need.Tk - need.Tq
    pairs = need.Tq * behind + need.Tq * (need.Tq + 1) // 2  # of a query and a key that it sees
    return (3 if need.grad else 1) * 2 * need.B * need.H * pairs * (need.D + need.Dv)
