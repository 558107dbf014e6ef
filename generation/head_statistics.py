"""Statistics of attention heads. T tokens, H query heads, D head dimension.

scores (..., T, T): s_ij = q_i . k_j / sqrt(D) of query i and key j, or log phi(q_i) . phi(k_j) in
    layers with linear attention. They are -inf where key j is masked.
weights (..., T, T): w_ij, the softmax of the scores over j.
visible (T, T): True where key j is not masked.
"""

import torch
from torch import Tensor

# Metrics of each layer and head, in the order of `head_statistics`.
STATISTICS = (
    "score_variance",
    "entropy",
    "first_token_weight",
    "previous_token_weight",
    "mean_distance",
)


def entropy(weights: Tensor) -> Tensor:
    """Mean entropy of the weights over queries, in nats: -sum_j w_ij log w_ij.

    (..., T, T) -> (...)
    It is 0 if each query attends to one key. exp(entropy) is roughly the number of keys that a
    query attends to. The maximum is the mean of log(i + 1), i < T: uniform attention.
    """
    return torch.special.entr(weights).sum(-1).mean(-1)


def score_variance(scores: Tensor, visible: Tensor) -> Tensor:
    """Variance of the scores of all visible pairs: the mean of (s_ij - mean of s)^2.

    (..., T, T) -> (...)
    It is 1 if the components of queries and keys are independent with mean 0 and variance 1
    ("Attention Is All You Need", section 3.2.1).
    """
    return scores[..., visible].var(-1, correction=0)


def first_token_weight(weights: Tensor, visible: Tensor) -> Tensor:
    """Mean weight on the first visible key f(i) over the queries i > f(i): w_if(i).

    (..., T, T) -> (...)
    f(i) is the first token of the sequence, of the document or of the window.
    """
    query = torch.arange(len(visible), device=visible.device)
    first = visible.int().argmax(-1)  # of equal values, the first
    return weights[..., query, first][..., first < query].mean(-1)


def previous_token_weight(weights: Tensor, visible: Tensor) -> Tensor:
    """Mean weight on the previous token over the queries that see it: w_i,i-1.

    (..., T, T) -> (...)
    """
    return weights.diagonal(-1, -2, -1)[..., visible.diagonal(-1)].mean(-1)


def mean_distance(weights: Tensor) -> Tensor:
    """Mean distance of the attended keys over queries, in tokens: sum_j w_ij (i - j).

    (..., T, T) -> (...)
    """
    index = torch.arange(weights.shape[-1], device=weights.device)
    return (weights * (index.unsqueeze(-1) - index)).sum(-1).mean(-1)


def head_statistics(scores: Tensor) -> Tensor:
    """All STATISTICS of a layer's heads: scores (H, T, T) -> (5, H), on the CPU."""
    weights = scores.softmax(-1)
    visible = (scores > -torch.inf).any(0)
    values = [
        score_variance(scores, visible),
        entropy(weights),
        first_token_weight(weights, visible),
        previous_token_weight(weights, visible),
        mean_distance(weights),
    ]
    return torch.stack(values).cpu()
