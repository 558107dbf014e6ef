"""Activation checkpointing: the same gradients with less memory."""

import pytest
import torch
from helpers import tiny_model, train_step

from training.build import checkpoint_activations


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


def count_saved_numbers(part: str) -> int:
    """Number of elements of the tensors that the forward pass saves for the backward pass."""
    model = tiny_model()
    checkpoint_activations(model, part)
    sizes = []

    def pack(x):
        sizes.append(x.numel())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        model(torch.zeros(4, 8, dtype=torch.int64))
    return sum(sizes)


def test_fewer_activations_are_saved():
    saved = [count_saved_numbers(part) for part in ("block", "attention", "none")]
    assert saved[0] < saved[1] < saved[2]


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize("part", ["block", "attention"])
def test_checkpointed_model_compiles_without_graph_breaks(part):
    model = tiny_model()
    checkpoint_activations(model, part)
    torch.compiler.reset()  # other tests have used up the limit of recompilations
    compiled = torch.compile(model, fullgraph=True)
    tokens = torch.zeros(4, 8, dtype=torch.int64)
    with torch.no_grad():
        torch.testing.assert_close(compiled(tokens), model(tokens))
    torch.testing.assert_close(compiled(tokens, tokens), model(tokens, tokens))
