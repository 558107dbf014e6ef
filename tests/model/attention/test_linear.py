"""Linear attention: the definition, the equality of its forms, and models that use it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from attention_helpers import REQUEST, choose, random_qkv
from generation_helpers import MIXED
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import GROUPED

from common.errors import UserError
from model import GPTConfig
from model.attention import linear_attention, linear_attention_scores, resolve_model
from model.attention.linear import CHUNK

LINEAR = GROUPED | dict(attention_type="linear")
EXACT = dict(atol=1e-12, rtol=1e-12)
HEADS = [(1, 1), (4, 2), (3, 1)]  # H, G
HEAD_DIMS = [(8, 8), (4, 6)]  # D, Dv


def draw(T, B=1, H=4, G=2, D=8, Dv=8, dtype=torch.float64, grad=False, seed=0):
    request = replace(REQUEST, B=B, Tq=T, Tk=T, H=H, G=G, D=D, Dv=Dv, dtype=dtype, grad=grad)
    return random_qkv(request, seed)


def by_weights(q, k, v):
    """The definition, with all T x T weights."""
    v = v.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    weights = linear_attention_scores(q, k).softmax(-1)
    return (weights @ v.transpose(1, 2)).transpose(1, 2)


def by_steps(q, k, v):
    """Token by token, as in decoding."""
    positions = range(q.shape[1])
    steps = [linear_attention(q[:, [i]], k[:, : i + 1], v[:, : i + 1]) for i in positions]
    return torch.cat(steps, dim=1)


@pytest.mark.parametrize("i", range(5))
def test_weights_follow_the_definition(i):
    """Equation 8 of arXiv:2006.16236, for query i."""
    q, k, _ = draw(5, H=1, G=1, D=3)
    query = F.elu(q[0, i, 0]) + 1
    keys = F.elu(k[0, : i + 1, 0]) + 1
    scores = keys @ query
    expected = torch.zeros(5, dtype=torch.float64)
    expected[: i + 1] = scores / scores.sum()
    weights = linear_attention_scores(q, k).softmax(-1)
    torch.testing.assert_close(weights[0, 0, i], expected)


@settings(max_examples=40, deadline=None)
@given(
    T=st.sampled_from([1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK - 5]),
    heads=st.sampled_from(HEADS),
    head_dims=st.sampled_from(HEAD_DIMS),
    seed=st.integers(0, 99),
)
def test_chunks_have_the_outputs_and_gradients_of_the_definition(T, heads, head_dims, seed):
    qkv = draw(T, 2, *heads, *head_dims, grad=True, seed=seed)
    y = linear_attention(*qkv)
    expected = by_weights(*qkv)
    torch.testing.assert_close(y, expected, **EXACT)
    dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(seed))
    gradients = torch.autograd.grad(y, qkv, dy)
    expected_gradients = torch.autograd.grad(expected, qkv, dy)
    torch.testing.assert_close(gradients, expected_gradients, **EXACT)


@pytest.mark.parametrize(("heads", "head_dims"), [((4, 2), (8, 8)), ((3, 1), (4, 6))])
def test_decoding_equals_the_definition(heads, head_dims):
    qkv = draw(20, 2, *heads, *head_dims)
    torch.testing.assert_close(by_steps(*qkv), by_weights(*qkv), **EXACT)


def test_decoding_at_different_positions_equals_the_definition():
    """Keys after a position are masked."""
    q, k, v = draw(9, B=2)
    y = linear_attention(q[:, [8]], k, v, positions=torch.tensor([[3], [8]]))
    for row, end in enumerate((4, 9)):
        expected = linear_attention(q[[row], 8:], k[[row], :end], v[[row], :end])
        torch.testing.assert_close(y[[row]], expected)


@pytest.mark.parametrize("i", [0, CHUNK - 1, CHUNK, 2 * CHUNK + 1])
def test_outputs_do_not_depend_on_later_tokens(i):
    """Not even by rounding. Later tokens of the same chunk are finite: masked weights are zero."""
    T = 3 * CHUNK
    q, k, v = draw(T, dtype=torch.float32)
    later_k = k.clone()
    later_v = v.clone()
    for x in (later_k, later_v):
        x[:, i + 1 :] = 20 * x[:, i + 1 :] + 10
        x[:, (i // CHUNK + 1) * CHUNK :] = torch.inf
    expected = linear_attention(q, k, v)
    y = linear_attention(q, later_k, later_v)
    assert torch.equal(y[:, : i + 1], expected[:, : i + 1])
    assert not torch.equal(y[:, i + 1 :], expected[:, i + 1 :])


def test_small_keys_before_large_ones_keep_their_precision():
    q, k, v = draw(256, H=1, G=1, D=16, Dv=16, dtype=torch.float32)
    k[:, :120] -= 18
    k[:, 120:128] += 5
    expected = by_weights(q.double(), k.double(), v.double())
    assert (linear_attention(q, k, v) - expected).abs().max() < 1e-5


# bfloat16 rounds only the inputs and the output.
@pytest.mark.parametrize(("autocast", "bound"), [(False, 2e-3), (True, 1e-5)])
@pytest.mark.parametrize(("form", "T"), [(linear_attention, 500), (by_steps, 100)])
def test_sums_are_in_float32_under_bfloat16(form, T, autocast, bound):
    q, k, v = draw(T, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = form(q, k, v)
    expected = by_weights(q.double(), k.double(), v.double())
    assert y.dtype == v.dtype
    assert (y - expected).abs().max() < 4 * bound * max(1, expected.abs().max())


@pytest.mark.parametrize(
    "options",
    [{"window": 3}, {"doc_ids": torch.zeros(1, 5)}, {"dropout_p": 0.1}, {"softcap": 1.0}],
    ids=lambda options: next(iter(options)),
)
def test_masks_and_dropout_are_refused(options):
    with pytest.raises(ValueError, match="linear attention does not support"):
        linear_attention(*draw(5), **options)


# Models


def resolve(variant, backend="sdpa", **options):
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "grad": True} | options
    _, resolved = resolve_model(choose(backend), GPTConfig(**variant), B=2, **options)
    return resolved.resolved


@pytest.mark.parametrize(
    ("variant", "backend", "resolved"),
    [
        (LINEAR, "sdpa", "linear"),
        (MIXED, "flash", "linear+flash"),
        (MIXED | dict(window=[None, 5]), "sdpa", "linear+flash"),
        (MIXED | dict(attention_softcap=5.0), "naive", "linear+naive"),
    ],
    ids=["linear", "mixed", "window of the other layer", "softcap of the other layer"],
)
def test_attention_type_is_resolved_for_each_layer(variant, backend, resolved):
    assert resolve(variant, backend) == resolved


@pytest.mark.parametrize(
    ("variant", "options", "advice"),
    [
        (MIXED | dict(window=5), {}, "model.window=null"),
        (MIXED | dict(dropout=0.1), {}, "model.dropout=0"),
        (LINEAR, {"document_mask": True}, "data.document_mask=false"),
    ],
    ids=["window", "dropout", "documents"],
)
def test_refusal_of_linear_layers_names_the_setting_to_change(variant, options, advice):
    with pytest.raises(UserError, match=f"set {advice}, or model.attention_type=softmax"):
        resolve(variant, **options)


def test_linear_attention_is_not_a_backend():
    message = "attention.backend=linear changes the model; set model.attention_type=linear"
    with pytest.raises(UserError, match=message):
        resolve(MIXED, "linear")
