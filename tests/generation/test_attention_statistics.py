"""Statistics of attention heads, compared with their definitions, pair by pair."""

import math

import pytest
import torch
from generation_helpers import make_peaked_model
from model_helpers import GPT2, random_tokens

from generation.attention_maps import attention_statistics, record_attention
from generation.head_statistics import STATISTICS, head_statistics
from model.attention.backends import attention_scores

DOCUMENTS = torch.tensor([[0] * 3 + [1] * 4 + [2] * 2])
MASKS = {
    "causal": (lambda i, j: True, {}),
    "window": (lambda i, j: i - j < 3, dict(window=3)),
    "documents": (lambda i, j: DOCUMENTS[0, i] == DOCUMENTS[0, j], dict(doc_ids=DOCUMENTS)),
}


def compute_by_definition(q, k, is_visible) -> list[float]:
    """The statistics of one head: q, k (T, D)."""
    T, D = q.shape
    keys = [[j for j in range(i + 1) if is_visible(i, j)] for i in range(T)]
    scores = [{j: (q[i] @ k[j] / math.sqrt(D)).item() for j in keys[i]} for i in range(T)]
    weights = [
        {j: math.exp(s) / sum(map(math.exp, row.values())) for j, s in row.items()}
        for row in scores
    ]
    visible_scores = [s for row in scores for s in row.values()]
    center = sum(visible_scores) / len(visible_scores)
    later = [i for i in range(T) if len(keys[i]) > 1]  # queries that see more than themselves
    return [
        sum((s - center) ** 2 for s in visible_scores) / len(visible_scores),
        -sum(w * math.log(w) for row in weights for w in row.values()) / T,
        sum(weights[i][keys[i][0]] for i in later) / len(later),
        sum(weights[i][i - 1] for i in later) / len(later),
        sum(w * (i - j) for i in range(T) for j, w in weights[i].items()) / T,
    ]


@pytest.mark.parametrize("mask", MASKS)
def test_statistics_equal_their_definitions(mask):
    is_visible, arguments = MASKS[mask]
    q, k = (
        torch.randn(2, 1, 9, 4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        * 2
    )
    values = head_statistics(attention_scores(q, k, **arguments)[0])
    expected = [
        compute_by_definition(q[0, :, head], k[0, :, head], is_visible) for head in range(4)
    ]
    torch.testing.assert_close(values, torch.tensor(expected, dtype=torch.float64).T)


def test_metrics_are_means_over_sequences_under_autocast_too():
    model, tokens = make_peaked_model(GPT2 | dict(window=[None, 5])), random_tokens(3, 24)
    doc_ids = (torch.arange(24) >= torch.tensor([[8], [12], [24]])).long()
    metrics = attention_statistics(model, tokens, doc_ids)
    assert list(metrics)[:3] == [
        f"attention/score_variance{end}" for end in ("", "/layer-1/head-1", "/layer-1/head-2")
    ]
    assert len(metrics) == len(STATISTICS) * (1 + 2 * 4)
    parts = [attention_statistics(model, tokens[i : i + 1], doc_ids[i : i + 1]) for i in range(3)]
    for key, value in metrics.items():
        assert value == pytest.approx(sum(part[key] for part in parts) / 3, rel=1e-5)
    for name in STATISTICS:
        heads = [value for key, value in metrics.items() if key.startswith(f"attention/{name}/")]
        assert metrics[f"attention/{name}"] == pytest.approx(sum(heads) / 8, rel=1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention_statistics(model, tokens, doc_ids) == pytest.approx(metrics, rel=0.05)
        assert (
            record_attention(model, tokens[:1], None, lambda scores: scores).dtype == torch.float32
        )


def test_layer_whose_queries_see_only_themselves_is_not_part_of_the_mean():
    metrics = attention_statistics(
        make_peaked_model(GPT2 | dict(window=[None, 1])), random_tokens(1, 24)
    )
    heads = [
        metrics[f"attention/previous_token_weight/layer-1/head-{head}"] for head in range(1, 5)
    ]
    assert metrics["attention/previous_token_weight"] == pytest.approx(sum(heads) / 4)
    assert math.isnan(metrics["attention/previous_token_weight/layer-2/head-1"])
