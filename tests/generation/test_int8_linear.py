"""Linear layers with 8-bit integers compute nearly the same products as nn.Linear."""

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
from generation.cpu_linear import Int8Linear, replace_linears

HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines
needs_fbgemm = pytest.mark.skipif(not HAS_FBGEMM, reason="NOT RUN: int8 needs an x86 CPU")


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


@needs_fbgemm
def test_products_do_not_saturate_without_vnni():
    """In a new process, because FBGEMM reads the variable once."""
    environment = os.environ | {"FBGEMM_ENABLE_INSTRUCTIONS": "AVX2"}
    subprocess.run([sys.executable, "-c", SATURATION], cwd=ROOT, env=environment, check=True)


@needs_fbgemm
def test_all_linear_layers_of_a_model_are_replaced():
    model = replace_linears(make_random_model(GROUPED), torch.int8, rows=1)
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    assert linears == []
    assert isinstance(model.blocks[0].attn.qkv, Int8Linear)


def test_cpu_that_is_not_x86_is_refused(monkeypatch):
    other = SimpleNamespace(supported_engines=["qnnpack"])
    monkeypatch.setattr("torch.backends.quantized", other)
    with pytest.raises(UserError, match="dtype=int8 needs an x86 CPU"):
        Int8Linear(torch.nn.Linear(2, 2))
