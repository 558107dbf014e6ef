"""Number of parameters, floating-point operations (FLOPs), and size of the KV cache of a model.

The peak FLOP/s of GPUs, by which the MFU is computed, are in training/speed.py.

Linear layers take O(T C^2) FLOPs per sequence of T tokens, with C = n_embd, and attention takes
O(T^2 C).
"""

import torch

from model.attention import NON_SOFTMAX
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
        for substring, part in PARTS.items():
            if substring in name:
                counts[part] += p.numel()
    return counts


def flops_per_token(config: GPTConfig, vocab_size: int, T: int) -> int:
    """FLOPs per token of a forward and backward pass over sequences of T tokens.

    Only matrix products count. A multiply-add is two FLOPs, and the backward pass takes twice as
    many as the forward pass. This gives 6 per weight, and 12 T H D per layer for attention, as in
    PaLM (Chowdhery et al., arXiv:2204.02311, appendix B).
    """
    return weight_flops_per_token(config, vocab_size) + attention_flops_per_token(config, T)


def weight_flops_per_token(config: GPTConfig, vocab_size: int) -> int:
    """FLOPs of the projections, the MLPs and the head: 6 per weight.

    Padded rows of the vocabulary do not count.
    """
    C = config.n_embd
    qkv = C * (config.n_head + 2 * config.kv_heads) * config.head_dim
    proj = C * C
    mlp = (3 if config.mlp in GATED_MLPS else 2) * C * config.mlp_channels
    return 6 * (config.n_layer * (qkv + proj + mlp) + vocab_size * C)


def attention_flops_per_token(config: GPTConfig, T: int) -> int:
    """FLOPs of QK^T and the product with V, forward and backward: 12 H D per layer and key.

    A layer has T keys, or at most its window. Kernels may do less or more: causal kernels can skip
    the masked half, and many compute keys outside the window.
    """
    keys = 0
    for attention_type, window in zip(config.attention_types, config.windows, strict=True):
        if attention_type in NON_SOFTMAX:
            keys += NON_SOFTMAX[attention_type].count_keys(config.head_dim, T)
        else:
            keys += min(T, window or T)
    return 12 * config.n_head * config.head_dim * keys


def kv_cache_bytes_per_token(config: GPTConfig, dtype: torch.dtype) -> float:
    """Size of the KV cache of block_size tokens, divided by block_size.

    dtype: of keys and values, as on a GPU. On a CPU, sample.py computes and stores them in float32.
    The half of a key that a key offset stores per layer is not counted.
    """
    slots = sum(window or config.block_size for window in config.windows)
    return slots * 2 * config.kv_heads * config.head_dim * dtype.itemsize / config.block_size
