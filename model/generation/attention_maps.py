"""Attention weights of a model for given tokens, and the entropy of each head.

T tokens, H query heads.
"""

import math

import torch
from torch import Tensor

from model.attention import attention_weights, naive
from model.gpt import GPT


@torch.no_grad()
def attention_maps(model: GPT, tokens: Tensor, doc_ids: Tensor | None = None) -> Tensor:
    """Causal attention weights of all layers and heads: tokens (1, T) -> (n_layer, H, T, T), float32 on the CPU.

    Row i has the weights of the keys j <= i for query i, and sums to 1. The weights come from the reference formula
    (`attention_weights`) without dropout, because the model's kernel does not store them. doc_ids (1, T): see
    GPT.backbone. Raises UserError if T exceeds block_size.
    """
    maps = []

    def record(q, k, v, *, dropout_p=0.0, **mask) -> Tensor:  # mask: window, positions, doc_ids
        maps.append(attention_weights(q, k, **mask)[0].float().cpu())  # (H, T, T)
        return naive(q, k, v, **mask)

    layers = [block.attn for block in model.blocks]
    functions, was_training = [layer.attend for layer in layers], model.training
    model.eval()
    try:
        for layer in layers:
            layer.attend = record
        model.backbone(tokens, doc_ids=doc_ids)
    finally:
        for layer, attend in zip(layers, functions, strict=True):
            layer.attend = attend
        model.train(was_training)
    return torch.stack(maps)


def entropy(weights: Tensor) -> Tensor:
    """Mean entropy of the attention weights over queries, in nats: -sum_j w_ij log w_ij, (..., T, T) -> (...).

    It is 0 if each query attends to one key. exp(entropy) is roughly the number of keys that a query attends to.
    """
    return torch.special.entr(weights).sum(-1).mean(-1)


def uniform_entropy(T: int) -> float:
    """Entropy of uniform causal attention over T tokens, in nats: the mean of log(i + 1), 0 <= i < T. The maximum."""
    return math.lgamma(T + 1) / T  # log(T!) / T


def layer_entropies(weights: Tensor) -> dict[str, float]:
    """Mean entropy of each layer's heads, as metrics: (n_layer, H, T, T) -> {"entropy/layer-1": nats, ...}."""
    return {f"entropy/layer-{i}": value for i, value in enumerate(entropy(weights).mean(-1).tolist(), start=1)}
