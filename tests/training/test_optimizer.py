"""Optimizers: which parameters they update, clipping, and state that is saved by parameter name."""

import math

import pytest
import torch
from torch import nn

from training.optimizer import optimizer_step


def model_with_gradients(*gradients: float) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Scalar parameters of 0 with these gradients, each with a separate SGD of learning rate 1."""
    model = nn.ParameterList(torch.zeros(()) for _ in gradients)
    for parameter, gradient in zip(model, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    return model, [torch.optim.SGD([parameter], lr=1.0) for parameter in model]


@pytest.mark.parametrize(
    ("max_grad_norm", "expected"), [(None, [-3.0, -4.0]), (1.0, [-0.6, -0.8]), (9.0, [-3.0, -4.0])]
)
def test_optimizer_step_clips_the_norm_over_all_optimizers(max_grad_norm, expected):
    model, optimizers = model_with_gradients(3.0, 4.0)
    grad_norm = optimizer_step(model, optimizers, torch.amp.GradScaler("cpu", enabled=False), max_grad_norm)
    assert grad_norm.item() == 5.0
    assert [p.item() for p in model] == pytest.approx(expected)
    assert all(p.grad is None for p in model)


def test_optimizer_step_unscales_gradients_before_clipping():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))  # the scale exists from the first call on
    model, optimizers = model_with_gradients(24.0, 32.0)
    assert optimizer_step(model, optimizers, scaler, 1.0).item() == 5.0
    assert [p.item() for p in model] == pytest.approx([-0.6, -0.8])


def test_overflow_in_one_optimizer_skips_the_step_of_all_and_lowers_the_scale():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))
    model, optimizers = model_with_gradients(24.0, math.inf)
    assert optimizer_step(model, optimizers, scaler, None).item() == math.inf
    assert [p.item() for p in model] == [0.0, 0.0]
    assert scaler.get_scale() == 4.0
