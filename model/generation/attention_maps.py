"""Attention weights of a model for given tokens, and statistics of each head.

T tokens, H query heads, D head dimension.

scores (..., T, T): s_ij = q_i . k_j / sqrt(D) of query i and key j; -inf where key j is masked. In layers with linear
    attention, log phi(q_i) . phi(k_j).
weights (..., T, T): w_ij, the softmax of the scores over j.
visible (T, T): True where key j is not masked.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from model.attention.backends import attention_scores, repeat_kv
from model.attention.linear import linear_attention_scores
from model.gpt import GPT

SCORES = {"softmax": attention_scores, "linear": linear_attention_scores}  # by model.attention_type
# Metrics of each layer and head, in the order of `head_statistics`.
STATISTICS = ("score_variance", "entropy", "first_token_weight", "previous_token_weight", "mean_distance")


@torch.no_grad()
def record_attention(model: GPT, tokens: Tensor, doc_ids: Tensor | None, measure: Callable[[Tensor], Tensor]) -> Tensor:
    """Call measure(scores) for each layer, with the scores (H, T, T) for tokens (1, T) -> the results, stacked.

    The scores come from the reference formula, because the model's kernel does not store them. They are float32, also
    under autocast. There is no dropout. doc_ids (1, T): see GPT.backbone. Raises UserError if T exceeds block_size.
    """
    results = []

    def record(compute_scores, q, k, v, *, dropout_p=0.0, **options) -> Tensor:  # window, positions, doc_ids, softcap
        dtype = torch.promote_types(q.dtype, torch.float32)
        with torch.autocast(q.device.type, enabled=False):
            scores = compute_scores(q.to(dtype), k.to(dtype), **options)
            results.append(measure(scores[0]))
            y = scores.softmax(-1) @ repeat_kv(v, q.shape[2]).to(dtype).transpose(1, 2)
        return y.transpose(1, 2).to(v.dtype)

    layers = [block.attn for block in model.blocks]
    functions, was_training = [layer.attend for layer in layers], model.training
    model.eval()
    try:
        for layer in layers:
            layer.attend = partial(record, SCORES[layer.attention_type])
        model.backbone(tokens, doc_ids=doc_ids)
    finally:
        for layer, attend in zip(layers, functions, strict=True):
            layer.attend = attend
        model.train(was_training)
    return torch.stack(results)


def attention_maps(model: GPT, tokens: Tensor, doc_ids: Tensor | None = None) -> Tensor:
    """Causal attention weights of all layers and heads: tokens (1, T) -> (n_layer, H, T, T), float32 on the CPU.

    Row i has the weights of the keys j <= i for query i, and sums to 1. For doc_ids and errors see `record_attention`.
    """
    return record_attention(model, tokens, doc_ids, lambda scores: scores.softmax(-1).float().cpu())


def entropy(weights: Tensor) -> Tensor:
    """Mean entropy of the attention weights over queries, in nats: -sum_j w_ij log w_ij, (..., T, T) -> (...).

    It is 0 if each query attends to one key. exp(entropy) is roughly the number of keys that a query attends to.
    """
    return torch.special.entr(weights).sum(-1).mean(-1)


def uniform_entropy(T: int) -> float:
    """Entropy of uniform causal attention over T tokens, in nats: the mean of log(i + 1), 0 <= i < T. The maximum."""
    return math.lgamma(T + 1) / T  # log(T!) / T


def score_variance(scores: Tensor, visible: Tensor) -> Tensor:
    """Variance of the scores of all visible pairs: the mean of (s_ij - mean of s)^2, (..., T, T) -> (...).

    It is 1 if the components of queries and keys are independent with mean 0 and variance 1 ("Attention Is All You
    Need", section 3.2.1).
    """
    return scores[..., visible].var(-1, correction=0)


def first_token_weight(weights: Tensor, visible: Tensor) -> Tensor:
    """Mean weight on the first visible key f(i) over the queries i > f(i): w_if(i), (..., T, T) -> (...).

    f(i) is token 0; with a document mask, the first token of the document; with a window, the oldest key in the window.
    """
    query = torch.arange(len(visible), device=visible.device)
    first = visible.int().argmax(-1)  # of equal values, the first
    return weights[..., query, first][..., first < query].mean(-1)


def previous_token_weight(weights: Tensor, visible: Tensor) -> Tensor:
    """Mean weight on the previous token over the queries that see it: w_i,i-1, (..., T, T) -> (...)."""
    return weights.diagonal(-1, -2, -1)[..., visible.diagonal(-1)].mean(-1)


def mean_distance(weights: Tensor) -> Tensor:
    """Mean distance of the attended keys over queries, in tokens: sum_j w_ij (i - j), (..., T, T) -> (...)."""
    index = torch.arange(weights.shape[-1], device=weights.device)
    return (weights * (index.unsqueeze(-1) - index)).sum(-1).mean(-1)


def head_statistics(scores: Tensor) -> Tensor:
    """All STATISTICS of a layer's heads: scores (H, T, T) -> (5, H), on the CPU."""
    weights, visible = scores.softmax(-1), (scores > -torch.inf).any(0)
    return torch.stack([
        score_variance(scores, visible),
        entropy(weights),
        first_token_weight(weights, visible),
        previous_token_weight(weights, visible),
        mean_distance(weights),
    ]).cpu()  # fmt: skip


def attention_statistics(model: GPT, tokens: Tensor, doc_ids: Tensor | None = None) -> dict[str, float]:
    """Statistics of each head as metrics, means over sequences: tokens (B, T) -> {"attention/entropy/layer-1/head-1"}.

    "attention/entropy" and so on are the means over layers and heads. One sequence at a time is in memory. A value is
    NaN, and not part of a mean, if no query sees an earlier key.
    """
    documents = [None] * len(tokens) if doc_ids is None else doc_ids.split(1)
    sequences = zip(tokens.split(1), documents, strict=True)
    values = [record_attention(model, x, ids, head_statistics) for x, ids in sequences]
    values = torch.stack(values).nanmean(0)  # (n_layer, 5, H)
    metrics = {}
    for i, name in enumerate(STATISTICS):
        metrics[f"attention/{name}"] = values[:, i].nanmean().item()
        for layer, heads in enumerate(values[:, i].tolist(), start=1):
            for head, value in enumerate(heads, start=1):
                metrics[f"attention/{name}/layer-{layer}/head-{head}"] = value
    return metrics


def layer_entropies(weights: Tensor) -> dict[str, float]:
    """Mean entropy of each layer's heads, as metrics: (n_layer, H, T, T) -> {"entropy/layer-1": nats, ...}."""
    return {f"entropy/layer-{i}": value for i, value in enumerate(entropy(weights).mean(-1).tolist(), start=1)}
