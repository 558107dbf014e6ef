"""Linear layers for decoding compute the same products as nn.Linear."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from generation_helpers import greedy, make_random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import GPT2, GROUPED

from common.errors import UserError
from model.attention.torch_internals import has_bf16_kernels
from model.generation import decode_linear
from model.generation.decode_linear import (
    Bf16CpuLinear,
    Fp16Linear,
    Int8Linear,
    PackedLinear,
    SplitLinear,
    convert_linears,
)

ROOT = Path(__file__).resolve().parents[3]
HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines
needs_bf16_kernels = pytest.mark.skipif(not has_bf16_kernels(), reason="NOT RUN: this CPU has no bfloat16 kernels")
needs_fbgemm = pytest.mark.skipif(not HAS_FBGEMM, reason="NOT RUN: float16 and int8 need an x86 CPU")


@pytest.mark.parametrize(
    ("build", "tolerance"),
    [
        (SplitLinear, 1e-5),
        (partial(PackedLinear, rows=1), 1e-5),
        (partial(PackedLinear, rows=32), 1e-5),
        pytest.param(partial(PackedLinear, rows=1, dtype=torch.bfloat16), 3e-2, marks=needs_bf16_kernels),
        (partial(Bf16CpuLinear, dtype=torch.bfloat16), 3e-2),
        pytest.param(Fp16Linear, 4e-3, marks=needs_fbgemm),
        pytest.param(Int8Linear, 8e-2, marks=needs_fbgemm),
    ],
    ids=["split", "packed-1", "packed-32", "packed-bfloat16", "bfloat16", "float16", "int8"],
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


@settings(max_examples=30, deadline=None)
@given(num_parts=st.integers(1, 16), rows=st.integers(0, 70), N=st.integers(1, 50))
def test_split_layer_has_any_number_of_parts(num_parts, rows, N):
    layer = torch.nn.Linear(7, N).requires_grad_(False)
    x = torch.randn(rows, 7)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decode_linear.torch, "get_num_threads", lambda: num_parts)
        torch.testing.assert_close(SplitLinear(layer)(x), layer(x), atol=1e-5, rtol=1e-5)


def test_cpu_without_onednn_uses_other_layers(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    model = convert_linears(make_random_model(GPT2), torch.float32, rows=1)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


SATURATION = """
import torch
from model.generation.decode_linear import Int8Linear
for sign in (1, -1):
    layer = torch.nn.Linear(769, 5, bias=False).requires_grad_(False)
    torch.nn.init.constant_(layer.weight, sign)
    torch.testing.assert_close(Int8Linear(layer)(torch.ones(3, 769)), torch.full((3, 5), sign * 769.0))
"""


@needs_fbgemm
def test_int8_does_not_saturate_without_vnni():
    environment = os.environ | {"FBGEMM_ENABLE_INSTRUCTIONS": "AVX2"}  # FBGEMM reads it once per process
    subprocess.run([sys.executable, "-c", SATURATION], cwd=ROOT, env=environment, check=True)


@needs_fbgemm
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 70_000.0])
def test_float16_refuses_weights_out_of_range(value):
    layer = torch.nn.Linear(8, 5).requires_grad_(False)
    layer.weight[1, 2] = value
    with pytest.raises(UserError, match="dtype=float16 needs weights within ±65,504"):
        Fp16Linear(layer)


@pytest.mark.parametrize(
    "build", [partial(PackedLinear, rows=1), SplitLinear, pytest.param(Int8Linear, marks=needs_fbgemm)]
)
def test_nan_in_a_weight_or_input_reaches_the_output(build):
    layer = torch.nn.Linear(8, 5).requires_grad_(False)
    x = torch.randn(2, 8)
    layer.weight[1, 2], x[1, 4] = float("nan"), float("nan")
    torch.testing.assert_close(build(layer)(x).isnan(), layer(x).isnan())


@needs_fbgemm
def test_int8_result_of_a_row_does_not_depend_on_other_rows():
    torch.manual_seed(0)
    converted = Int8Linear(torch.nn.Linear(40, 30).requires_grad_(False))
    x = torch.randn(3, 40) * torch.tensor([[1.0], [1000.0], [0.0]])
    torch.testing.assert_close(torch.cat([converted(row[None]) for row in x]), converted(x), rtol=0, atol=0)


@pytest.mark.parametrize("rows", [1, 4, 32])
def test_converted_model_generates_the_same_tokens(rows):
    plain, converted = make_random_model(GROUPED), convert_linears(make_random_model(GROUPED), torch.float32, rows)
    tokens = torch.arange(20).unsqueeze(0)
    torch.testing.assert_close(converted(tokens), plain(tokens), atol=1e-4, rtol=1e-4)
    assert greedy(converted, [1, 2], 40) == greedy(plain, [1, 2], 40)


def test_fastest_implementation_of_each_shape_is_selected(monkeypatch):
    """The layers advance the clock, so that the result does not depend on the machine."""
    clock = 0.0

    class Slow(SplitLinear):
        def forward(self, x):
            nonlocal clock
            clock += 1.15 if len(self.weight) == 128 else 1.05
            return super().forward(x)

    class Fast(SplitLinear):
        def forward(self, x):
            nonlocal clock
            clock += 1.0
            return super().forward(x)

    monkeypatch.setattr(decode_linear, "_candidates", lambda *_: [Slow, Fast])
    monkeypatch.setattr(decode_linear.time, "perf_counter", lambda: clock)
    model = make_random_model(GPT2)
    wide = [module for module in model.modules() if isinstance(module, torch.nn.Linear) and len(module.weight) == 128]
    assert wide
    convert_linears(model, torch.float32, rows=1)
    converted = [module for module in model.modules() if isinstance(module, SplitLinear)]
    assert {type(module) for module in converted if len(module.weight) == 128} == {Fast}
    assert {type(module) for module in converted if len(module.weight) != 128} == {Slow}  # a gain of 5% is too small
