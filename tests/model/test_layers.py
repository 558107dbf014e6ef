"""RMSNorm: the values and gradients of PyTorch's own function."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from model.layers import RMSNorm, rms_norm


def random_input(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    return x.requires_grad_()


@settings(deadline=None)
@given(
    C=st.integers(1, 9),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
    eps=st.sampled_from([None, 1e-5]),
    seed=st.integers(0, 1000),
)
def test_rms_norm_and_its_gradient_are_those_of_torch(C, scale, eps, seed):
    x = random_input(2, 3, C, seed=seed, scale=scale)
    grad_y = random_input(2, 3, C, seed=seed + 1)
    y = rms_norm(x, eps)
    expected = F.rms_norm(x, (C,), eps=eps)
    torch.testing.assert_close(y, expected)
    (grad,) = torch.autograd.grad(y, x, grad_y)
    (expected_grad,) = torch.autograd.grad(expected, x, grad_y)
    # for few channels, both are differences of almost equal numbers
    torch.testing.assert_close(grad, expected_grad, rtol=1e-6, atol=1e-10 / scale)


def test_rms_norm_is_the_same_without_gradients():
    x = torch.randn(5, 16)
    with torch.no_grad():
        y = rms_norm(x)
    assert torch.equal(y, rms_norm(x))


def test_rms_norm_of_values_that_overflow_is_nan():
    assert rms_norm(torch.full((1, 4), 1e30)).isnan().all()


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
    ids=str,
)
def test_rms_norm_computes_at_least_in_float32(dtype, expected):
    assert rms_norm(torch.ones(2, 4, dtype=dtype)).dtype == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_layer_is_rms_norm_of_torch(dtype):
    layers = [RMSNorm(8, eps=1e-5), nn.RMSNorm(8, eps=1e-5)]
    x = random_input(3, 8).detach().to(dtype)
    weight = torch.linspace(-1, 2, 8)
    outputs = []
    for layer in layers:
        layer.load_state_dict({"weight": weight})
        outputs.append(layer.to(dtype)(x))
    assert outputs[0].dtype == dtype
    torch.testing.assert_close(*outputs)
