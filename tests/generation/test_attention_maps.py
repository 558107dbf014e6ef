"""Attention weights, compared with a computation from each layer's input."""

import math

import pytest
import torch
from generation_helpers import make_peaked_model
from model_helpers import GPT2, VARIANTS, random_tokens

from common.errors import UserError
from generation.attention_maps import attention_maps
from model.attention import BACKENDS
from model.attention.positions import apply_rotary

EPS = torch.finfo(torch.float64).eps
WINDOW = GPT2 | dict(window=[None, 3])


def project_head(attn, x, head, D):
    """Rows of the qkv projection that belong to one head: (T, C) -> (T, D)."""
    rows = slice(head * D, (head + 1) * D)
    y = x @ attn.qkv.weight[rows].T
    return y if attn.qkv.bias is None else y + attn.qkv.bias[rows]


def head_input(attn, x, rotary, head, D):
    """Queries or keys (T, D) of one head, after QK-norm and rotary positions."""
    y = project_head(attn, x, head, D)
    if attn.qk_norm:
        y = y / (y.square().mean(-1, keepdim=True) + EPS).sqrt()
    if rotary is not None:
        y = apply_rotary(y[None, :, None], *rotary)[0, :, 0]
    return y


@VARIANTS
def test_weights_equal_the_formula(variant):
    """The expected weights are computed head by head and query by query, in float64."""
    model = make_peaked_model(variant).double().eval()
    T, D = 17, 8
    tokens = random_tokens(1, T)
    inputs = []
    for block in model.blocks:
        block.attn.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments))
    model(tokens)
    expected = torch.zeros(2, 4, T, T, dtype=torch.float64)
    for layer, (x, shared) in enumerate(inputs):
        attn = model.blocks[layer].attn
        for head in range(4):
            key_head = 4 + head // (4 // attn.n_kv_head)  # after the 4 query heads
            q = head_input(attn, x[0], shared.rotary, head, D)
            k = head_input(attn, x[0], shared.rotary, key_head, D)
            if attn.key_offset:
                k[1:, D // 2 :] = k[:-1, D // 2 :].clone()
                k[0, D // 2 :] = 0
            for i in range(T):
                scores = k[: i + 1] @ q[i] / math.sqrt(D)
                expected[layer, head, i, : i + 1] = scores.softmax(0)
    torch.testing.assert_close(attention_maps(model, tokens).double(), expected, atol=1e-7, rtol=0)


def test_keys_outside_the_window_have_no_weight():
    full, windowed = attention_maps(make_peaked_model(WINDOW), random_tokens(1, 9))
    assert (full.tril(-3) > 0).any()
    assert (windowed.tril(-3) == 0).all()


def test_keys_of_another_document_have_no_weight():
    doc_ids = torch.tensor([[0] * 5 + [1] * 4])
    weights = attention_maps(make_peaked_model(WINDOW), random_tokens(1, 9), doc_ids)
    assert (weights[:, :, 5:, :5] == 0).all()


def test_later_documents_do_not_change_the_weights_of_the_first():
    model = make_peaked_model(WINDOW)
    tokens = random_tokens(1, 9)
    masked = attention_maps(model, tokens, torch.tensor([[0] * 5 + [1] * 4]))
    torch.testing.assert_close(masked[:, :, :5], attention_maps(model, tokens)[:, :, :5])


@pytest.fixture
def model():
    """With dropout, and another attention function than the recorded one."""
    return make_peaked_model(GPT2 | dict(dropout=0.3), attend=BACKENDS["sdpa"].attend)


def attention_functions(model):
    return [block.attn.attend for block in model.blocks]


@VARIANTS
def test_logits_are_the_same_after_recording(variant):
    model = make_peaked_model(variant, attend=BACKENDS["sdpa"].attend).eval()
    tokens = random_tokens(1, 12)
    before = model(tokens)
    attention_maps(model, tokens)
    assert torch.equal(model(tokens), before)


@pytest.mark.parametrize("training", [True, False])
def test_mode_of_the_model_is_restored(model, training):
    model.train(training)
    attention_maps(model, random_tokens(1, 12))
    assert all(module.training is training for module in model.modules())


def test_recording_has_no_dropout(model):
    tokens = random_tokens(1, 12)
    assert torch.equal(attention_maps(model.train(), tokens), attention_maps(model.eval(), tokens))


def test_recording_computes_no_gradients(model):
    weights = attention_maps(model, random_tokens(1, 12))
    assert not weights.requires_grad
    assert all(p.grad is None for p in model.parameters())


def test_recording_does_not_use_the_global_random_numbers(model):
    state = torch.get_rng_state()
    attention_maps(model.train(), random_tokens(1, 12))
    assert torch.equal(torch.get_rng_state(), state)


def test_model_is_restored_after_an_error(model):
    functions = attention_functions(model)
    with pytest.raises(UserError, match="25 tokens do not fit"):
        attention_maps(model.train(), random_tokens(1, 25))
    assert model.training
    assert attention_functions(model) == functions
