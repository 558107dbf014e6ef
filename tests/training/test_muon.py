"""Muon: orthogonalization, and agreement with torch.optim.Muon."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from training.muon import Muon, orthogonalize


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    rows=st.integers(2, 24),
    columns=st.integers(2, 24),
    count=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_orthogonalized_matrices_have_singular_values_near_one(dtype, rows, columns, count, seed):
    matrices = torch.randn(count, rows, columns, generator=torch.Generator().manual_seed(seed))
    result = orthogonalize(matrices, 12, dtype)
    assert result.dtype == torch.float32
    values = torch.linalg.svdvals(result)
    assert ((values > 0.6) & (values < 1.3)).all()


@pytest.mark.parametrize("shape", [(1, 5, 3), (2, 3, 5), (1, 4, 4)], ids=["tall", "wide", "square"])
def test_singular_vectors_do_not_change(shape):
    """The result is U V^T, up to the singular values that the iteration leaves."""
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    U, _, Vt = torch.linalg.svd(matrices, full_matrices=False)
    inner = U.mT @ orthogonalize(matrices, 12) @ Vt.mT
    off_diagonal = inner - torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))
    assert off_diagonal.abs().max() < 1e-3


def test_bfloat16_rounds_the_result_of_float32():
    matrices = torch.randn(2, 16, 40, generator=torch.Generator().manual_seed(0))
    exact = orthogonalize(matrices, 5)
    rounded = orthogonalize(matrices, 5, torch.bfloat16)
    assert torch.equal(rounded, rounded.bfloat16().float())
    assert not torch.equal(exact, rounded)
    torch.testing.assert_close(exact, rounded, atol=0.1, rtol=0)


@pytest.mark.parametrize("count", [1, 3])
def test_matrices_of_one_shape_are_orthogonalized_independently(count):
    matrices = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
    together = orthogonalize(matrices, 5)[:count]
    torch.testing.assert_close(together, orthogonalize(matrices[:count], 5))


def test_parameter_without_a_gradient_does_not_change():
    p = torch.nn.Parameter(torch.ones(2, 3))
    Muon([p], lr=0.02, momentum=0.95, weight_decay=0.5).step()
    assert torch.equal(p, torch.ones(2, 3))


def test_muon_matches_torch_optim_muon_up_to_bfloat16_rounding():
    """Three steps on matrices of two shapes."""
    torch.manual_seed(0)
    ours = [torch.nn.Parameter(torch.randn(64, 8)), torch.nn.Parameter(torch.randn(6, 10))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in ours]
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "ns_steps": 5}
    a = Muon(ours, **settings)
    b = torch.optim.Muon(theirs, **settings, adjust_lr_fn="original")
    for seed in range(3):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, atol=0.02, rtol=0.02)
