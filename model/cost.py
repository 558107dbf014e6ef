"""What a model costs: parameters and floating-point operations."""

from model.config import GPTConfig
from model.gpt import GPT


def n_params(model: GPT, *, embedding: bool = True) -> int:
    """Parameters, a tied head counted once; without the look-up tables (wte, wpe) if embedding is False.

    A tied table is also the head's matrix and stays in the second count: it is multiplied with.
    """
    total = sum(p.numel() for p in model.parameters())
    if not embedding:
        total -= 0 if model.wpe is None else model.wpe.weight.numel()
        total -= 0 if model.config.tie_embeddings else model.wte.weight.numel()
    return total


def flops_per_token(config: GPTConfig, vocab_size: int, T: int) -> int:
    """FLOPs per token of one forward and backward pass over sequences of T tokens.

    Matrix products alone, a multiply and an add each, and the backward pass twice the forward: 6 per weight and
    12 T H D per layer for QK^T and its product with V, as in PaLM (Chowdhery et al., arXiv:2204.02311, appendix B).
    All T x T scores count, though a causal kernel may skip the half that is masked.
    """
    C, D = config.n_embd, config.head_size
    qkv = C * (config.n_head + 2 * config.kv_heads) * D
    weights = config.n_layer * (qkv + C * C + 8 * C * C) + vocab_size * C
    return 6 * weights + 12 * config.n_layer * config.n_head * D * T
