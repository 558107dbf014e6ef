"""Worked examples of attention: published numbers, and formulas written out for small inputs."""

import math

import pytest
import torch
from model_helpers import GPT2
from torch import nn

from common.errors import UserError
from model import AttentionConfig, GPTConfig
from model.attention import AttentionRequest, attention_weights, flash, naive, resolve, sdpa
from model.gpt import CausalSelfAttention

WEIGHTS = torch.tensor([
    [1.0000e00, 0.0000e00, 0.0000e00, 0.0000e00, 0.0000e00, 0.0000e00],
    [3.7234e-01, 6.2766e-01, 0.0000e00, 0.0000e00, 0.0000e00, 0.0000e00],
    [5.5693e-04, 2.1600e-03, 9.9728e-01, 0.0000e00, 0.0000e00, 0.0000e00],
    [3.1876e-01, 1.9339e-01, 3.3315e-02, 4.5453e-01, 0.0000e00, 0.0000e00],
    [1.1268e-02, 6.2110e-03, 1.9630e-04, 1.9320e-02, 9.6300e-01, 0.0000e00],
    [1.2501e-01, 1.5636e-01, 4.6546e-01, 1.0391e-01, 3.1637e-02, 1.1761e-01],
])  # fmt: skip
CONTEXT = torch.tensor([
    [-0.0516, 0.0810, 0.1769, -0.0080],
    [-0.3604, -0.2803, -0.5713, -0.8148],
    [-2.3388, -2.1658, -3.4319, -4.1303],
    [-0.0487, 0.1351, 0.2232, -0.0545],
    [1.9519, 1.4915, 2.0308, 2.9340],
    [-1.0856, -0.9284, -1.5621, -2.0410],
])  # fmt: skip


@pytest.fixture
def qkv():
    """q, k and v of "Life is short, eat dessert first": six words, three channels, D = 2, Dv = 4."""
    torch.manual_seed(123)
    x = nn.Embedding(6, 3)(torch.tensor([0, 4, 5, 2, 1, 3])).detach()
    W_query, W_key, W_value = torch.rand(3, 2), torch.rand(3, 2), torch.rand(3, 4)
    return tuple((x @ W)[None, :, None] for W in (W_query, W_key, W_value))  # (B, T, H, D or Dv), B = H = 1


def test_both_ways_to_mask_give_the_published_weights(qkv):
    q, k, _ = (t[0, :, 0] for t in qkv)
    scores = q @ k.T / math.sqrt(2)
    multiplied = scores.softmax(-1) * torch.tril(torch.ones(6, 6))
    renormalised = multiplied / multiplied.sum(-1, keepdim=True)
    filled = scores.masked_fill(torch.triu(torch.ones(6, 6), diagonal=1).bool(), -torch.inf).softmax(-1)
    torch.testing.assert_close(renormalised, filled)
    torch.testing.assert_close(attention_weights(*qkv[:2])[0, 0], filled)
    torch.testing.assert_close(filled, WEIGHTS, atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("attend", [naive, sdpa], ids=lambda f: f.__name__)
def test_context_vectors_are_the_published_ones(qkv, attend):
    torch.testing.assert_close(attend(*qkv)[0, :, 0], CONTEXT, atol=5.1e-5, rtol=0)


def test_flash_refuses_values_of_another_head_dimension(qkv):
    request = AttentionRequest(
        B=1, Tq=6, Tk=6, H=1, G=1, D=2, Dv=4, dtype=torch.float32, device=torch.device("cpu"), grad=True
    )  # fmt: skip
    with pytest.raises(UserError, match="head dimension differs from that of queries and keys; set attention=naive"):
        resolve(AttentionConfig("flash", None, None), request)
    with pytest.warns(UserWarning), pytest.raises(RuntimeError):
        flash(*qkv)


@pytest.mark.parametrize("D", [4, 64, 256])
@pytest.mark.parametrize("attend", [naive, sdpa, flash], ids=lambda f: f.__name__)
def test_scores_of_random_queries_and_keys_have_variance_1(attend, D):
    """Without the factor 1/sqrt(D), the variance would be D.

    For one query and two keys, the logarithm of the ratio of the weights is the difference of the scores, with
    variance 2.
    """
    B = 20_000
    generator = torch.Generator().manual_seed(D)
    q, k = torch.randn(2, B, 2, 1, D, dtype=torch.float64, generator=generator)
    v = torch.eye(2, D, dtype=torch.float64)[:, None].expand(B, 2, 1, D)  # the output then contains the weights
    first, second = attend(q, k, v)[:, 1, 0, :2].unbind(-1)
    assert (second / first).log().var() == pytest.approx(2, rel=0.05)


@pytest.mark.parametrize("attend", [naive, sdpa, flash], ids=lambda f: f.__name__)
def test_multi_head_attention_equals_projected_concatenation_of_heads(attend):
    H, C, T = 4, 32, 10
    config = GPTConfig(**GPT2 | dict(n_layer=1, n_head=H, n_embd=C, block_size=T))
    torch.manual_seed(0)
    layer = CausalSelfAttention(config, attend, layer=0)
    x = torch.randn(2, T, C)
    W_q, W_k, W_v = layer.qkv.weight.chunk(3)
    b_q, b_k, b_v = layer.qkv.bias.chunk(3)
    heads = []
    for rows in torch.arange(C).chunk(H):
        q, k, v = (x @ W[rows].T + b[rows] for W, b in ((W_q, b_q), (W_k, b_k), (W_v, b_v)))
        scores = (q @ k.mT / math.sqrt(C // H)).masked_fill(torch.ones(T, T).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ v)
    expected = torch.cat(heads, dim=-1) @ layer.proj.weight.T + layer.proj.bias
    torch.testing.assert_close(layer(x, None), expected, atol=1e-5, rtol=1e-4)


def test_identity_projections_give_unweighted_dot_product_attention():
    """y_i = sum_{j <= i} softmax_j(x_i . x_j) x_j has no factor 1/sqrt(C), so q is multiplied by sqrt(C)."""
    T, C = 7, 5
    x = torch.randn(T, C, generator=torch.Generator().manual_seed(0))
    identity = torch.eye(C)
    q, k, v = (x @ identity * math.sqrt(C), x @ identity, x @ identity)
    y = naive(*(t[None, :, None] for t in (q, k, v)))[0, :, 0]
    for i in range(T):
        w = torch.stack([x[i] @ x[j] for j in range(i + 1)]).exp()
        torch.testing.assert_close(y[i], (w / w.sum()) @ x[: i + 1], atol=1e-5, rtol=1e-4)
