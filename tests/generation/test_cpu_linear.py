"""Linear layers for decoding compute the products of nn.Linear, or nearly those with int8."""

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from generation_helpers import make_random_model
from helpers import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import GROUPED

from common.errors import UserError
from generation.cpu_linear import InferenceLinear, Int8Linear, SingleRowLinear, replace_linears
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
HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines
needs_fbgemm = pytest.mark.skipif(not HAS_FBGEMM, reason="NOT RUN: int8 needs an x86 CPU")
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


@needs_onednn
@needs_mkl
@pytest.mark.parametrize(
    ("dtype", "rows", "min_size", "missing", "layer"),
    [
        (torch.float32, 1, 1, None, SingleRowLinear),
        (torch.float32, 2, 1, None, InferenceLinear),
        (torch.float32, 1, 1, "mkl", InferenceLinear),
        (torch.float32, 1, 1, "mkldnn", Linear),
        (torch.float32, 1, 2**19, None, Linear),
        (torch.bfloat16, 1, 2**19, None, InferenceLinear),
        pytest.param(torch.int8, 1, 1, None, Int8Linear, marks=needs_fbgemm),
    ],
    ids=["one row", "rows", "no MKL", "no oneDNN", "small", "bfloat16", "int8"],
)
def test_layers_of_a_model_are_replaced(monkeypatch, dtype, rows, min_size, missing, layer):
    monkeypatch.setattr("generation.cpu_linear.MIN_PACKED_SIZE", min_size)
    if missing is not None:
        monkeypatch.setattr(f"torch.backends.{missing}.is_available", lambda: False)
    model = replace_linears(make_random_model(GROUPED), dtype, rows)
    assert layer_types(model) == {layer}


@pytest.mark.parametrize("rows", [1, 4, 32])
def test_model_with_packed_layers_computes_the_same_logits(pack_small_weights, rows):
    packed = replace_linears(make_random_model(GROUPED), torch.float32, rows)
    tokens = torch.arange(20).unsqueeze(0)
    expected = make_random_model(GROUPED)(tokens)
    torch.testing.assert_close(packed(tokens), expected, atol=1e-4, rtol=1e-4)


# int8


@needs_fbgemm
@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 70), K=st.integers(1, 40), N=st.integers(1, 50), bias=st.booleans())
def test_product_is_close_to_that_of_nn_linear(rows, K, N, bias):
    torch.manual_seed(rows)
    linear = torch.nn.Linear(K, N, bias=bias).requires_grad_(False)
    x = torch.randn(2, rows, K)
    y = Int8Linear(linear)(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, linear(x), atol=8e-2, rtol=8e-2)


@needs_fbgemm
def test_result_of_a_row_does_not_depend_on_other_rows():
    torch.manual_seed(0)
    layer = Int8Linear(torch.nn.Linear(40, 30).requires_grad_(False))
    x = torch.randn(3, 40) * torch.tensor([[1.0], [1000.0], [0.0]])
    one_by_one = torch.cat([layer(row[None]) for row in x])
    torch.testing.assert_close(one_by_one, layer(x), rtol=0, atol=0)


SATURATION = """
import torch
from generation.cpu_linear import Int8Linear
for sign in (1, -1):
    layer = torch.nn.Linear(769, 5, bias=False).requires_grad_(False)
    torch.nn.init.constant_(layer.weight, sign)
    y = Int8Linear(layer)(torch.ones(3, 769))
    torch.testing.assert_close(y, torch.full((3, 5), sign * 769.0))
"""


@pytest.mark.slow
@needs_fbgemm
def test_products_do_not_saturate_without_vnni():
    """In a new process, because FBGEMM reads the variable once."""
    environment = os.environ | {"FBGEMM_ENABLE_INSTRUCTIONS": "AVX2"}
    subprocess.run([sys.executable, "-c", SATURATION], cwd=ROOT, env=environment, check=True)


def test_cpu_that_is_not_x86_is_refused(monkeypatch):
    other = SimpleNamespace(supported_engines=["qnnpack"])
    monkeypatch.setattr("torch.backends.quantized", other)
    with pytest.raises(UserError, match="dtype=int8 needs an x86 CPU"):
        Int8Linear(torch.nn.Linear(2, 2))
