"""Looking inside: the causal weights that a model gives to one text, and how widely each head spreads them.

T tokens, H query heads.
"""

import math

import torch
from torch import Tensor

from model.attention import attention_weights, naive
from model.gpt import GPT


@torch.no_grad()
def attention_maps(model: GPT, tokens: Tensor, doc_ids: Tensor | None = None) -> Tensor:
    """The causal weights of every layer and head over tokens (1, T) -> (n_layer, H, T, T), float32 on the CPU.

    Row i holds how much query i takes from each key j <= i; it sums to one. The weights are the definition's
    (`attention_weights`), whichever kernel the model uses: the others never have them in memory. Dropout is off,
    and the model is as it was afterwards. doc_ids (1, T) as the model takes them. Raises UserError where T exceeds
    block_size.
    """
    maps = []

    def record(q, k, v, *, dropout_p=0.0, **seen) -> Tensor:  # seen: window, positions, doc_ids
        maps.append(attention_weights(q, k, **seen)[0].float().cpu())  # (H, T, T)
        return naive(q, k, v, **seen)

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
    """How widely heads look: weights (..., T, T) -> (...) the mean over queries of -sum_j w_ij log w_ij, in nats.

    0 where each query looks at one key alone; e to this power is about how many keys it looks at.
    """
    return torch.special.entr(weights).sum(-1).mean(-1)


def uniform_entropy(T: int) -> float:
    """The largest entropy over T tokens, in nats, all seen keys alike: the mean over i < T of log(i + 1).

    A layer with a window sees fewer keys, and stays below it.
    """
    return math.lgamma(T + 1) / T  # log(T!) / T


def layer_entropies(weights: Tensor) -> dict[str, float]:
    """Weights (n_layer, H, T, T) -> {"entropy/layer-1": nats, ...}, the mean over a layer's heads, as metrics."""
    return {f"entropy/layer-{i}": value for i, value in enumerate(entropy(weights).mean(-1).tolist(), start=1)}
