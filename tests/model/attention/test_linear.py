"""Linear attention: the definition, the equality of its three forms, and models that use it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from attention_helpers import REQUEST, choose, random_qkv
from generation_helpers import MIXED, make_random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import GROUPED, MODERN, random_tokens

from common.errors import UserError
from generation.attention_maps import attention_maps
from model import GPTConfig
from model.attention import linear_attention, linear_attention_scores, naive, resolve_model, sdpa
from model.attention.linear import CHUNK, linear_attention_state, linear_attention_step

LINEAR = GROUPED | dict(attention_type="linear")


def draw(B, Tq, Tk, H=4, G=2, D=8, Dv=8, dtype=torch.float64, grad=False, seed=0):
    return random_qkv(
        replace(REQUEST, B=B, Tq=Tq, Tk=Tk, H=H, G=G, D=D, Dv=Dv, dtype=dtype, grad=grad), seed
    )


def by_weights(q, k, v):
    """The quadratic form."""
    v = v.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    return (linear_attention_scores(q, k).softmax(-1) @ v.transpose(1, 2)).transpose(1, 2)


def by_steps(q, k, v):
    """The recurrent form."""
    B, T, G, D = k.shape
    state = torch.zeros(B, G, D, v.shape[3] + 1, dtype=torch.promote_types(k.dtype, torch.float32))
    return torch.cat(
        [linear_attention_step(state, q[:, [i]], k[:, [i]], v[:, [i]]) for i in range(T)], dim=1
    )


def test_weights_follow_the_definition():
    """Equation 8 of arXiv:2006.16236, one query at a time."""
    q, k, _ = draw(1, 5, 5, H=1, G=1, D=3)
    weights = linear_attention_scores(q, k).softmax(-1)[0, 0]
    phi = lambda x: F.elu(x) + 1  # noqa: E731
    for i in range(5):
        scores = torch.stack([phi(q[0, i, 0]) @ phi(k[0, j, 0]) for j in range(i + 1)])
        torch.testing.assert_close(weights[i, : i + 1], scores / scores.sum())
        assert (weights[i, i + 1 :] == 0).all()


@settings(max_examples=40, deadline=None)
@given(
    T=st.sampled_from([1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK - 5]),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]), dims=st.sampled_from([(8, 8), (4, 6)]), seed=st.integers(0, 99),
)  # fmt: skip
def test_chunked_form_equals_the_quadratic_form_with_gradients(T, heads, dims, seed):
    qkv = draw(2, T, T, *heads, *dims, grad=True, seed=seed)
    y, expected = linear_attention(*qkv), by_weights(*qkv)
    torch.testing.assert_close(y, expected, atol=1e-12, rtol=1e-12)
    dy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(seed))
    for ours, theirs in zip(
        *(torch.autograd.grad(out, qkv, dy) for out in (y, expected)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)


@settings(max_examples=20, deadline=None)
@given(
    T=st.integers(1, 40), heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]), dims=st.sampled_from([(8, 8), (4, 6)]),
    length=st.integers(0, 40), seed=st.integers(0, 99),
)  # fmt: skip
def test_recurrent_form_equals_the_quadratic_form(T, heads, dims, length, seed):
    q, k, v = draw(2, T, T, *heads, *dims, seed=seed)
    expected = by_weights(q, k, v)
    torch.testing.assert_close(by_steps(q, k, v), expected, atol=1e-12, rtol=1e-12)
    length = min(length, T - 1)  # the first tokens as a prompt, padded on the right
    state = linear_attention_state(k, v, torch.tensor([[length], [0]]))
    assert (state[1] == 0).all()
    y = linear_attention_step(state, q[:, [length]], k[:, [length]], v[:, [length]])
    torch.testing.assert_close(y[0], expected[0, [length]], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("i", [0, CHUNK - 1, CHUNK, 2 * CHUNK + 1])
def test_outputs_do_not_depend_on_later_tokens(i):
    """Not even by rounding. Later tokens of the same chunk are finite, because masked weights are zero."""
    T = 3 * CHUNK
    q, k, v = draw(1, T, T, dtype=torch.float32)
    later = k.clone(), v.clone()
    for tensor in later:
        tensor[:, i + 1 :] = 20 * tensor[:, i + 1 :] + 10
        tensor[:, (i // CHUNK + 1) * CHUNK :] = torch.inf
    expected, y = linear_attention(q, k, v), linear_attention(q, *later)
    assert torch.equal(y[:, : i + 1], expected[:, : i + 1])
    if i < T - 1:
        assert not torch.equal(y[:, i + 1 :], expected[:, i + 1 :])


def test_small_keys_before_large_ones_keep_their_precision():
    q, k, v = draw(1, 256, 256, H=1, G=1, D=16, Dv=16, dtype=torch.float32)
    k[:, :120] -= 18
    k[:, 120:128] += 5
    expected = by_weights(q.double(), k.double(), v.double())
    assert (linear_attention(q, k, v) - expected).abs().max() < 1e-5


@pytest.mark.parametrize("autocast", [False, True])
def test_sums_are_in_float32_under_bfloat16(autocast):
    q, k, v = draw(1, 2000, 2000, dtype=torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y, step = linear_attention(q, k, v), by_steps(q[:, :300], k[:, :300], v[:, :300])
    assert y.dtype == step.dtype == v.dtype
    bound = 1e-5 if autocast else 2e-3  # bfloat16 rounds only the inputs and the output
    expected = by_weights(q.double(), k.double(), v.double())
    assert (y - expected).abs().max() < bound * max(1, expected.abs().max())
    assert (step - expected[:, :300]).abs().max() < 4 * bound * max(1, expected.abs().max())


# Models


def resolve(config, backend="sdpa", **options):
    options = {"dtype": torch.float32, "device": torch.device("cpu"), "grad": True} | options
    return resolve_model(choose(backend), config, B=2, **options)


def test_attention_type_is_resolved_for_each_layer():
    assert resolve(GPTConfig(**LINEAR)).resolved == "linear"
    assert resolve(GPTConfig(**MIXED), "flash").resolved == "linear+flash"
    assert resolve(GPTConfig(**MIXED | dict(window=[None, 5]))).resolved == "linear+flash"
    assert (
        resolve(GPTConfig(**MIXED), grad=False, Tq=1, positions=True).resolved == "linear+flash"
    ), "decoding"
    with pytest.raises(
        UserError, match=r"document masks; set data.document_mask=false, or model.attention_type"
    ):
        resolve(GPTConfig(**LINEAR), document_mask=True)
    for changed, advice in (
        ({"window": 5}, "model.window=null"),
        ({"dropout": 0.1}, "model.dropout=0"),
    ):
        with pytest.raises(UserError, match=f"set {advice}, or model.attention_type=softmax"):
            resolve(GPTConfig(**MIXED | changed))
    with pytest.raises(
        UserError,
        match=r"attention.backend=linear changes the model; set model.attention_type=linear",
    ):
        resolve(GPTConfig(**MIXED), "linear")


def test_each_layer_uses_its_attention_type():
    tokens = random_tokens()
    types = ("softmax", "linear", ["linear", "softmax"])
    models = [
        make_random_model(MODERN | dict(attention_type=chosen), attend=sdpa) for chosen in types
    ]
    softmax, linear, mixed = [[block.attn.attend for block in model.blocks] for model in models]
    assert (softmax, linear, mixed) == (
        [sdpa] * 2,
        [linear_attention] * 2,
        [linear_attention, sdpa],
    )
    softmax, linear, mixed = [model(tokens) for model in models]
    assert not torch.allclose(softmax, linear) and not torch.allclose(mixed, linear)


def test_attention_maps_contain_the_weights_of_linear_attention():
    model, tokens = (
        make_random_model(MIXED | dict(attention_softcap=0.5), attend=naive),
        random_tokens(B=1),
    )
    attended = []
    for block in model.blocks:
        block.attn.proj.register_forward_pre_hook(lambda _, inputs: attended.append(inputs[0]))
    model(tokens)
    maps = attention_maps(model, tokens)
    torch.testing.assert_close(attended[2:], attended[:2])  # the recorded model computes the same
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 4, 24))
    assert (maps.triu(1) == 0).all() and maps[0].isfinite().all()
