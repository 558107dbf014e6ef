"""Linear layers for decoding compute the same products as nn.Linear."""

import pytest
import torch
from generation_helpers import greedy, make_random_model
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import GPT2, GROUPED

from model.generation.decode_linear import NUM_CHUNKS, convert_linears

HAS_FBGEMM = "fbgemm" in torch.backends.quantized.supported_engines
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        pytest.param(
            torch.float16, marks=pytest.mark.skipif(not HAS_FBGEMM, reason="NOT RUN: float16 needs an x86 CPU")
        ),
    ],
    ids=str,
)
@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 70), K=st.integers(1, 40), N=st.integers(1, 3 * NUM_CHUNKS + 2), bias=st.booleans())
def test_converted_layers_compute_the_same_product(dtype, rows, K, N, bias):
    torch.manual_seed(rows)
    layer = torch.nn.Linear(K, N, bias=bias)
    model = make_random_model(GPT2)
    model.lm_head = layer
    x = torch.randn(2, rows, K)
    expected = layer(x).detach()
    with torch.no_grad():
        y = convert_linears(model, dtype).lm_head(x)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_converted_model_generates_the_same_tokens():
    plain, converted = make_random_model(GROUPED), convert_linears(make_random_model(GROUPED), torch.float32)
    tokens = torch.arange(20).unsqueeze(0)
    torch.testing.assert_close(converted(tokens), plain(tokens), atol=1e-4, rtol=1e-4)
    assert greedy(converted, [1, 2], 40) == greedy(plain, [1, 2], 40)
