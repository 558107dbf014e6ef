"""Linear layers for decoding compute the same products as nn.Linear."""

import os
import subprocess
import sys
from functools import partial

import pytest
import torch
from generation_helpers import greedy, make_random_model
from helpers import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import GROUPED

from generation.cpu_linear import InferenceLinear, Int8Linear, replace_linears
from model.attention.torch_internals import has_bf16_kernels
from model.layers import Linear

HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines
needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="NOT RUN: torch has no oneDNN"
)
needs_bf16_kernels = pytest.mark.skipif(
    not has_bf16_kernels(), reason="NOT RUN: this CPU has no bfloat16 kernels"
)
needs_fbgemm = pytest.mark.skipif(not HAS_FBGEMM, reason="NOT RUN: int8 needs an x86 CPU")


@pytest.mark.parametrize(
    ("build", "tolerance"),
    [
        pytest.param(
            partial(InferenceLinear, dtype=torch.float32, rows=1), 1e-5, marks=needs_onednn
        ),
        pytest.param(
            partial(InferenceLinear, dtype=torch.float32, rows=32), 1e-5, marks=needs_onednn
        ),
        pytest.param(
            partial(InferenceLinear, dtype=torch.bfloat16, rows=1), 3e-2, marks=needs_bf16_kernels
        ),
        (partial(InferenceLinear, dtype=torch.bfloat16), 3e-2),
        (partial(InferenceLinear, dtype=torch.float16), 4e-3),
        pytest.param(Int8Linear, 8e-2, marks=needs_fbgemm),
    ],
    ids=["packed-1", "packed-32", "packed-bfloat16", "bfloat16", "float16", "int8"],
)
@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 70), K=st.integers(1, 40), N=st.integers(1, 50), bias=st.booleans())
def test_layers_compute_the_same_product(build, tolerance, rows, K, N, bias):
    torch.manual_seed(rows)
    layer = torch.nn.Linear(K, N, bias=bias).requires_grad_(False)
    x = torch.randn(2, rows, K)
    y = build(layer)(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, layer(x), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("has_onednn", "layer"), [(True, InferenceLinear), (False, Linear)])
def test_packed_layers_are_used_where_onednn_is_available(monkeypatch, has_onednn, layer):
    if has_onednn and not torch.backends.mkldnn.is_available():
        pytest.skip("NOT RUN: torch has no oneDNN")
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: has_onednn)
    assert type(replace_linears(make_random_model(GROUPED), torch.float32, 1).lm_head) is Linear, (
        "small"
    )
    monkeypatch.setattr("generation.cpu_linear.MIN_PACKED_SIZE", 1)
    for rows in (1, 32):
        model = replace_linears(make_random_model(GROUPED), torch.float32, rows)
        assert {
            type(part) for block in model.blocks for part in (block.attn.qkv, block.mlp.fc)
        } == {layer}
        assert type(model.lm_head) is layer


@pytest.mark.parametrize("rows", [1, 4, 32])
def test_model_with_replaced_layers_generates_the_same_tokens(monkeypatch, rows):
    monkeypatch.setattr("generation.cpu_linear.MIN_PACKED_SIZE", 1)
    plain, replaced = (
        make_random_model(GROUPED),
        replace_linears(make_random_model(GROUPED), torch.float32, rows),
    )
    tokens = torch.arange(20).unsqueeze(0)
    torch.testing.assert_close(replaced(tokens), plain(tokens), atol=1e-4, rtol=1e-4)
    assert greedy(replaced, [1, 2], 40) == greedy(plain, [1, 2], 40)


SATURATION = """
import torch
from generation.cpu_linear import Int8Linear
for sign in (1, -1):
    layer = torch.nn.Linear(769, 5, bias=False).requires_grad_(False)
    torch.nn.init.constant_(layer.weight, sign)
    torch.testing.assert_close(Int8Linear(layer)(torch.ones(3, 769)), torch.full((3, 5), sign * 769.0))
"""


@needs_fbgemm
def test_int8_does_not_saturate_without_vnni():
    environment = os.environ | {
        "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2"
    }  # FBGEMM reads it once per process
    subprocess.run([sys.executable, "-c", SATURATION], cwd=ROOT, env=environment, check=True)


@needs_fbgemm
def test_int8_result_of_a_row_does_not_depend_on_other_rows():
    torch.manual_seed(0)
    replaced = Int8Linear(torch.nn.Linear(40, 30).requires_grad_(False))
    x = torch.randn(3, 40) * torch.tensor([[1.0], [1000.0], [0.0]])
    torch.testing.assert_close(
        torch.cat([replaced(row[None]) for row in x]), replaced(x), rtol=0, atol=0
    )
