"""Activation checkpointing: the same gradients with less memory."""

import pytest
import torch
from helpers import tiny_model, train_step

from model.activation_checkpointing import checkpoint_activations


def gradients(part: str, dropout: float) -> dict[str, torch.Tensor]:
    model = tiny_model(dropout=dropout)
    checkpoint_activations(model, part)
    torch.manual_seed(1)
    train_step(model, [])
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("part", ["block", "attention"])
def test_gradients_do_not_change(part, dropout):
    expected = gradients("none", dropout)
    for name, gradient in gradients(part, dropout).items():
        assert torch.equal(gradient, expected[name]), name


def test_fewer_activations_are_saved():
    def saved_numbers(part: str) -> int:
        sizes = []
        model = tiny_model()
        checkpoint_activations(model, part)
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x: sizes.append(x.numel()) or x, lambda x: x
        ):
            model(torch.zeros(4, 8, dtype=torch.int64))
        return sum(sizes)

    assert saved_numbers("block") < saved_numbers("attention") < saved_numbers("none")
