"""Statistics of attention heads, compared with their definitions, pair by pair."""

import math

import pytest
import torch
from generation_helpers import make_peaked_model
from hypothesis import given
from hypothesis import strategies as st
from model_helpers import GPT2, random_tokens

from generation.attention_maps import attention_statistics, name_statistics, record_attention
from generation.head_statistics import STATISTICS, entropy, head_statistics
from model.attention.backends import attention_scores

DOCUMENTS = torch.tensor([[0] * 3 + [1] * 4 + [2] * 2])


def measure(model, tokens, doc_ids=None) -> dict[str, float]:
    return name_statistics(attention_statistics(model, tokens, doc_ids))


def is_causal(i, j):
    return True


def is_in_window(i, j):
    return i - j < 3


def is_in_document(i, j):
    return DOCUMENTS[0, i] == DOCUMENTS[0, j]


def compute_by_definition(q, k, is_visible) -> list[float]:
    """The statistics of one head, in the order of STATISTICS: q, k (T, D)."""
    T, D = q.shape
    keys = []
    scores = []
    weights = []
    for i in range(T):
        keys.append([j for j in range(i + 1) if is_visible(i, j)])
        scores.append({j: (q[i] @ k[j] / math.sqrt(D)).item() for j in keys[i]})
        total = sum(math.exp(score) for score in scores[i].values())
        weights.append({j: math.exp(score) / total for j, score in scores[i].items()})
    visible_scores = [score for row in scores for score in row.values()]
    center = sum(visible_scores) / len(visible_scores)
    later = [i for i in range(T) if len(keys[i]) > 1]  # queries that see more than themselves
    return [
        sum((score - center) ** 2 for score in visible_scores) / len(visible_scores),
        -sum(w * math.log(w) for row in weights for w in row.values()) / T,
        sum(weights[i][keys[i][0]] for i in later) / len(later),
        sum(weights[i][i - 1] for i in later) / len(later),
        sum(w * (i - j) for i in range(T) for j, w in weights[i].items()) / T,
    ]


@pytest.mark.parametrize(
    ("is_visible", "mask"),
    [
        (is_causal, {}),
        (is_in_window, dict(window=3)),
        (is_in_document, dict(doc_ids=DOCUMENTS)),
    ],
    ids=["causal", "window", "documents"],
)
def test_statistics_equal_their_definitions(is_visible, mask):
    generator = torch.Generator().manual_seed(0)
    q, k = 2 * torch.randn(2, 1, 9, 4, 8, dtype=torch.float64, generator=generator)
    values = head_statistics(attention_scores(q, k, **mask)[0])
    heads = [compute_by_definition(q[0, :, i], k[0, :, i], is_visible) for i in range(4)]
    torch.testing.assert_close(values, torch.tensor(heads, dtype=torch.float64).T)


@given(st.integers(1, 300))
def test_entropy_of_uniform_weights_is_the_mean_of_the_logarithms(T):
    num_keys = torch.arange(1, T + 1, dtype=torch.float64)
    uniform = torch.ones(T, T, dtype=torch.float64).tril() / num_keys[:, None]
    assert entropy(uniform).item() == pytest.approx(num_keys.log().mean().item(), abs=1e-12)


def test_entropy_of_single_keys_is_zero():
    assert entropy(torch.eye(9)).item() == 0


@pytest.fixture(scope="module")
def model():
    return make_peaked_model(GPT2 | dict(window=[None, 5]))


TOKENS = random_tokens(3, 24)
DOC_IDS = (torch.arange(24) >= torch.tensor([[8], [12], [24]])).long()


@pytest.fixture(scope="module")
def metrics(model):
    return measure(model, TOKENS, DOC_IDS)


def test_metrics_are_named_by_statistic_layer_and_head(metrics):
    expected = set()
    for name in STATISTICS:
        expected.add(f"attention/{name}")
        for layer in (1, 2):
            expected |= {f"attention/{name}/layer_{layer}/head_{head}" for head in (1, 2, 3, 4)}
    assert set(metrics) == expected


def test_metrics_are_means_over_sequences(model, metrics):
    sequences = zip(TOKENS.split(1), DOC_IDS.split(1), strict=True)
    parts = [measure(model, *sequence) for sequence in sequences]
    for key, value in metrics.items():
        assert value == pytest.approx(sum(part[key] for part in parts) / 3, rel=1e-5)


@pytest.mark.parametrize("name", STATISTICS)
def test_mean_of_a_statistic_is_over_layers_and_heads(metrics, name):
    heads = [value for key, value in metrics.items() if key.startswith(f"attention/{name}/")]
    assert metrics[f"attention/{name}"] == pytest.approx(sum(heads) / 8, rel=1e-5)


def test_statistics_under_autocast_are_close(model, metrics):
    with torch.autocast("cpu", torch.bfloat16):
        assert measure(model, TOKENS, DOC_IDS) == pytest.approx(metrics, rel=0.05)


def test_scores_under_autocast_are_in_float32(model):
    with torch.autocast("cpu", torch.bfloat16):
        scores = record_attention(model, TOKENS[:1], None, torch.clone)
    assert scores.dtype == torch.float32


def test_sequence_whose_queries_see_only_themselves_is_not_part_of_the_mean(model):
    doc_ids = torch.stack([torch.zeros(24), torch.arange(24)]).long()
    key = "attention/previous_token_weight/layer_1/head_1"
    both = measure(model, TOKENS[:2], doc_ids)
    first = measure(model, TOKENS[:1], doc_ids[:1])
    assert both[key] == pytest.approx(first[key], rel=1e-5)


def test_layer_whose_queries_see_only_themselves_is_not_part_of_the_mean():
    model = make_peaked_model(GPT2 | dict(window=[None, 1]))
    metrics = measure(model, random_tokens(1, 24))
    key = "attention/previous_token_weight"
    first_layer = [metrics[f"{key}/layer_1/head_{head}"] for head in range(1, 5)]
    assert metrics[key] == pytest.approx(sum(first_layer) / 4)
    assert math.isnan(metrics[f"{key}/layer_2/head_1"])
