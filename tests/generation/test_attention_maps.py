"""Attention weights and their entropies, compared with other ways to compute them."""

import math

import numpy as np
import pytest
import torch
from generation_helpers import make_peaked_model
from hypothesis import given
from hypothesis import strategies as st
from model_helpers import GPT2, VARIANTS, random_tokens

from common.errors import UserError
from generation.attention_maps import attention_maps
from generation.head_statistics import entropy, uniform_entropy
from model.attention import BACKENDS
from model.attention.positions import apply_rotary


@VARIANTS
def test_weights_equal_the_formula(variant):
    """The expected weights are computed from each layer's input, head by head and query by query, in float64."""
    model, T, D = make_peaked_model(variant).double().eval(), 17, 8
    inputs, tokens = [], random_tokens(1, T)
    for block in model.blocks:
        block.attn.register_forward_pre_hook(lambda _, given: inputs.append(given))
    model(tokens)
    expected = torch.zeros(2, 4, T, T, dtype=torch.float64)
    for layer, (x, rotary, *_) in enumerate(inputs):
        attn = model.blocks[layer].attn
        for head in range(4):
            key_head = 4 + head // (4 // attn.n_kv_head)  # after the 4 query heads
            q, k = (project(attn, x[0], i, D) for i in (head, key_head))
            if variant["qk_norm"]:
                q, k = (
                    y / (y.square().mean(-1, keepdim=True) + 2.220446049250313e-16).sqrt()
                    for y in (q, k)
                )
            if rotary is not None:
                q, k = (apply_rotary(y[None, :, None], *rotary)[0, :, 0] for y in (q, k))
            for i in range(T):
                expected[layer, head, i, : i + 1] = (k[: i + 1] @ q[i] / math.sqrt(D)).softmax(0)
    torch.testing.assert_close(attention_maps(model, tokens).double(), expected, atol=1e-7, rtol=0)


def project(attn, x, head, D):
    """Rows of the qkv projection that belong to one head: (T, C) -> (T, D)."""
    rows = slice(head * D, (head + 1) * D)
    return x @ attn.qkv.weight[rows].T + (0 if attn.qkv.bias is None else attn.qkv.bias[rows])


def test_windows_and_documents_are_masked():
    model, doc_ids = (
        make_peaked_model(GPT2 | dict(window=[None, 3])),
        torch.tensor([[0] * 5 + [1] * 4]),
    )
    full, windowed = attention_maps(model, random_tokens(1, 9))
    assert (windowed.tril(-3) == 0).all() and (full.tril(-3) > 0).any()
    masked = attention_maps(model, random_tokens(1, 9), doc_ids)
    assert (masked[:, :, 5:, :5] == 0).all()
    torch.testing.assert_close(masked[:, :, :5], torch.stack((full, windowed))[:, :, :5])


@VARIANTS
def test_attention_maps_and_their_errors_do_not_change_the_model(variant):
    model = make_peaked_model(variant | dict(dropout=0.3), attend=BACKENDS["sdpa"].attend)
    tokens = random_tokens(1, 12)
    model.eval()
    before, functions = model(tokens), [block.attn.attend for block in model.blocks]
    state = torch.get_rng_state()
    for training in (True, False):
        model.train(training)
        weights = attention_maps(model, tokens)
        assert all(module.training is training for module in model.modules())
    assert not weights.requires_grad and all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert [block.attn.attend for block in model.blocks] == functions
    assert torch.equal(model(tokens), before)
    with pytest.raises(UserError, match="25 tokens do not fit"):
        attention_maps(model.train(), random_tokens(1, 25))
    assert model.training and [block.attn.attend for block in model.blocks] == functions


@given(st.integers(1, 300))
def test_entropy_is_largest_for_uniform_weights_and_0_for_single_keys(T):
    uniform = torch.ones(T, T, dtype=torch.float64).tril() / torch.arange(1, T + 1)[:, None]
    assert entropy(uniform).item() == pytest.approx(uniform_entropy(T), abs=1e-12)
    assert uniform_entropy(T) == pytest.approx(np.log(np.arange(1, T + 1)).mean(), abs=1e-12)
    assert entropy(torch.full((2, 3, T, T), 1 / T, dtype=torch.float64)).numpy() == pytest.approx(
        math.log(T)
    )
    assert f"{entropy(torch.eye(T)).item():.2f}" == "0.00"
