"""Linear layers for decoding compute the same products as nn.Linear."""

import pytest
import torch
from generation_helpers import greedy, make_random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import GROUPED

from generation.cpu_linear import InferenceLinear, SingleRowLinear, replace_linears
from model.attention.torch_internals import has_bf16_kernels
from model.layers import Linear

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="NOT RUN: torch has no oneDNN"
)
needs_bf16_kernels = pytest.mark.skipif(
    not has_bf16_kernels(), reason="NOT RUN: this CPU has no bfloat16 kernels"
)
needs_mkl = pytest.mark.skipif(
    not torch.backends.mkl.is_available(), reason="NOT RUN: torch has no MKL"
)
LAYERS = [
    pytest.param(torch.float32, 1, 1e-5, marks=needs_onednn, id="packed-1"),
    pytest.param(torch.float32, 32, 1e-5, marks=needs_onednn, id="packed-32"),
    pytest.param(torch.bfloat16, 1, 3e-2, marks=needs_bf16_kernels, id="packed-bfloat16"),
    pytest.param(torch.bfloat16, None, 3e-2, id="bfloat16"),
    pytest.param(torch.float16, None, 4e-3, id="float16"),
]


@pytest.fixture
def pack_small_weights(monkeypatch):
    monkeypatch.setattr("generation.cpu_linear.MIN_PACKED_SIZE", 1)


def layer_types(model) -> set[type]:
    return {
        type(layer)
        for block in model.blocks
        for layer in (block.attn.qkv, block.attn.proj, block.mlp.fc, block.mlp.proj)
    } | {type(model.lm_head)}


@pytest.mark.parametrize(("dtype", "packed_rows", "tolerance"), LAYERS)
@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 70), K=st.integers(1, 40), N=st.integers(1, 50), bias=st.booleans())
def test_layer_computes_the_product_of_nn_linear(dtype, packed_rows, tolerance, rows, K, N, bias):
    torch.manual_seed(rows)
    linear = torch.nn.Linear(K, N, bias=bias).requires_grad_(False)
    x = torch.randn(2, rows, K)
    y = InferenceLinear(linear, dtype, packed_rows)(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, linear(x), atol=tolerance, rtol=tolerance)


@needs_onednn
@needs_mkl
@settings(max_examples=60, deadline=None)
@given(rows=st.integers(1, 2), K=st.integers(1, 200), N=st.integers(1, 300), bias=st.booleans())
def test_layer_for_a_single_row_computes_the_product_of_nn_linear(rows, K, N, bias):
    torch.manual_seed(rows)
    linear = torch.nn.Linear(K, N, bias=bias).requires_grad_(False)
    x = torch.randn(1, rows, K)
    torch.testing.assert_close(SingleRowLinear(linear)(x), linear(x), atol=1e-5, rtol=1e-5)


def test_layer_for_a_single_row_has_no_copy_of_the_weight():
    linear = torch.nn.Linear(8, 37).requires_grad_(False)
    assert SingleRowLinear(linear).weight.data_ptr() == linear.weight.data_ptr()


@needs_onednn
@needs_mkl
@pytest.mark.parametrize(("rows", "layer"), [(1, SingleRowLinear), (2, InferenceLinear)])
def test_layers_of_large_float32_weights(pack_small_weights, rows, layer):
    model = replace_linears(make_random_model(GROUPED), torch.float32, rows)
    assert layer_types(model) == {layer}


@needs_onednn
def test_float32_weights_are_packed_for_one_row_without_mkl(pack_small_weights, monkeypatch):
    monkeypatch.setattr(torch.backends.mkl, "is_available", lambda: False)
    model = replace_linears(make_random_model(GROUPED), torch.float32, rows=1)
    assert layer_types(model) == {InferenceLinear}


def test_layers_stay_the_same_without_onednn(pack_small_weights, monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = replace_linears(make_random_model(GROUPED), torch.float32, rows=1)
    assert layer_types(model) == {Linear}


def test_small_float32_layers_stay_the_same():
    model = replace_linears(make_random_model(GROUPED), torch.float32, rows=1)
    assert layer_types(model) == {Linear}


def test_small_layers_are_replaced_for_low_precision():
    model = replace_linears(make_random_model(GROUPED), torch.bfloat16, rows=1)
    assert layer_types(model) == {InferenceLinear}


@pytest.mark.parametrize("rows", [1, 4, 32])
def test_model_with_packed_layers_computes_the_same_logits(pack_small_weights, rows):
    packed = replace_linears(make_random_model(GROUPED), torch.float32, rows)
    tokens = torch.arange(20).unsqueeze(0)
    expected = make_random_model(GROUPED)(tokens)
    torch.testing.assert_close(packed(tokens), expected, atol=1e-4, rtol=1e-4)


def test_model_with_packed_layers_generates_the_same_tokens(pack_small_weights):
    packed = replace_linears(make_random_model(GROUPED), torch.float32, rows=1)
    assert greedy(packed, [1, 2], 40) == greedy(make_random_model(GROUPED), [1, 2], 40)
