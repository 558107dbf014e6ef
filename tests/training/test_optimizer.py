"""Optimizers: which parameters they update, clipping, and state by name."""

import math
from collections import Counter
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from helpers import ADAMW, MUON, tiny_model, train_step
from torch import nn

from training.optimizer import (
    build_optimizers,
    load_state_by_name,
    optimizer_step,
    set_lr,
    state_by_name,
)

CONFIGS = pytest.mark.parametrize("config", [ADAMW, MUON], ids=["adamw", "muon"])


def list_params(optimizers: list[torch.optim.Optimizer]) -> list[nn.Parameter]:
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return [p for group in groups for p in group["params"]]


@CONFIGS
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_each_parameter_is_updated_once(config, tied):
    model = tiny_model(tie_embeddings=tied, max_ngram=3)
    params = list_params(build_optimizers(model, config))
    assert Counter(params) == Counter(model.parameters())


def test_adamw_decays_only_matrices_and_embeddings():
    model = tiny_model()
    (adamw,) = build_optimizers(model, ADAMW)
    decay = {p: group["weight_decay"] for group in adamw.param_groups for p in group["params"]}
    expected = {p: ADAMW.weight_decay if p.ndim >= 2 else 0.0 for p in model.parameters()}
    assert decay == expected


def test_adamw_is_bit_identical_to_torch_optim_adamw():
    ours = tiny_model()
    theirs = tiny_model()
    theirs.load_state_dict(ours.state_dict())
    (a,) = build_optimizers(ours, ADAMW)
    matrices, vectors = a.state_dict()["param_groups"]
    matrices["params"] = [p for p in theirs.parameters() if p.ndim >= 2]
    vectors["params"] = [p for p in theirs.parameters() if p.ndim < 2]
    b = torch.optim.AdamW([matrices, vectors])
    for seed in range(3):
        train_step(ours, [a], seed)
        train_step(theirs, [b], seed)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), atol=0, rtol=0)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_muon_updates_the_matrices_of_blocks(tied):
    model = tiny_model(tie_embeddings=tied)
    muon, adamw = build_optimizers(model, MUON)
    matrices = {p for p in model.blocks.parameters() if p.ndim == 2}
    assert set(list_params([muon])) == matrices
    assert all(group["fused"] for group in adamw.param_groups)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.bfloat16),  # float16 lacks the range
    ],
    ids=str,
)
def test_muon_orthogonalizes_in_the_dtype_of_the_run(dtype, expected):
    muon, _ = build_optimizers(tiny_model(), MUON, dtype)
    assert muon.dtype == expected  # ty: ignore[missing-attribute]


@pytest.mark.parametrize(
    ("name", "tied", "expected"),
    [
        ("blocks.0.mlp.fc.weight", True, MUON.lr),
        ("blocks.0.mlp.fc.bias", True, MUON.norm_lr),
        ("wte.weight", True, MUON.embedding_lr),
        ("wpe.weight", True, MUON.embedding_lr),
        ("ngrams.table.weight", True, MUON.embedding_lr),
        ("lm_head.weight", False, MUON.head_lr),
    ],
)
def test_muon_has_a_learning_rate_for_each_part(name, tied, expected):
    model = tiny_model(tie_embeddings=tied, max_ngram=3)
    config = replace(MUON, norm_lr=0.07)
    expected = 0.07 if name.endswith("bias") else expected
    groups = [g for o in build_optimizers(model, config) for g in o.param_groups]
    rates = {p: group["peak_lr"] for group in groups for p in group["params"]}
    assert rates[model.get_parameter(name)] == expected


def test_muon_decays_the_ngram_table_and_no_other_embedding():
    model = tiny_model(max_ngram=3, tie_embeddings=False)
    before = deepcopy(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    _, adamw = build_optimizers(model, replace(MUON, embedding_lr=0.01, ngram_weight_decay=5.0))
    adamw.step()
    expected = before.ngrams.table.weight * (1 - 0.01 * 5.0)
    torch.testing.assert_close(model.ngrams.table.weight, expected)
    for name in ("wte.weight", "wpe.weight", "lm_head.weight"):
        assert torch.equal(model.get_parameter(name), before.get_parameter(name)), name


# State by name


@CONFIGS
def test_state_has_the_names_of_all_parameters(config):
    model = tiny_model()
    optimizers = build_optimizers(model, config)
    train_step(model, optimizers)
    names = {name for name, _ in model.named_parameters()}
    assert set(state_by_name(model, optimizers)) == names


@CONFIGS
def test_step_after_loading_the_state_is_bit_identical(config):
    model = tiny_model()
    optimizers = build_optimizers(model, config)
    train_step(model, optimizers)
    other = tiny_model()
    other.load_state_dict(model.state_dict())
    others = build_optimizers(other, config)
    load_state_by_name(other, others, deepcopy(state_by_name(model, optimizers)))
    train_step(model, optimizers, 1)
    train_step(other, others, 1)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), atol=0, rtol=0)


def test_loading_the_state_does_not_change_learning_rates():
    """Those of the config win over those in a checkpoint."""
    model = tiny_model()
    optimizers = build_optimizers(model, ADAMW)
    set_lr(optimizers, 0.5)
    load_state_by_name(model, optimizers, {})
    assert [group["lr"] for group in optimizers[0].param_groups] == [0.5 * ADAMW.lr] * 2


# A step


def model_with_gradients(*gradients: float) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """Scalar parameters of 0 with these gradients, each with a separate SGD of learning rate 1."""
    model = nn.ParameterList(torch.zeros(()) for _ in gradients)
    for parameter, gradient in zip(model, gradients, strict=True):
        parameter.grad = torch.tensor(gradient)
    return model, [torch.optim.SGD([parameter], lr=1.0) for parameter in model]


DISABLED_SCALER = torch.amp.GradScaler("cpu", enabled=False)


@pytest.mark.parametrize(
    ("max_grad_norm", "expected"),
    [(None, [-3.0, -4.0]), (1.0, [-0.6, -0.8]), (9.0, [-3.0, -4.0])],
    ids=["no clipping", "larger norm", "smaller norm"],
)
def test_optimizer_step_clips_the_norm_over_all_optimizers(max_grad_norm, expected):
    model, optimizers = model_with_gradients(3.0, 4.0)
    optimizer_step(model, optimizers, DISABLED_SCALER, max_grad_norm)
    assert [p.item() for p in model] == pytest.approx(expected)


def test_optimizer_step_returns_the_norm_before_clipping():
    model, optimizers = model_with_gradients(3.0, 4.0)
    assert optimizer_step(model, optimizers, DISABLED_SCALER, 1.0).item() == 5.0


def test_optimizer_step_clears_the_gradients():
    model, optimizers = model_with_gradients(3.0, 4.0)
    optimizer_step(model, optimizers, DISABLED_SCALER, None)
    assert all(p.grad is None for p in model)


@pytest.fixture
def scaler() -> torch.amp.GradScaler:
    """A loss scaler of float16, which multiplies the loss by 8."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))  # the first call creates the scale
    return scaler


def test_scaled_gradients_are_unscaled_before_clipping(scaler):
    model, optimizers = model_with_gradients(24.0, 32.0)
    assert optimizer_step(model, optimizers, scaler, 1.0).item() == 5.0
    assert [p.item() for p in model] == pytest.approx([-0.6, -0.8])


def test_all_optimizers_skip_a_step_with_an_overflow(scaler):
    model, optimizers = model_with_gradients(24.0, math.inf)
    assert optimizer_step(model, optimizers, scaler, None).item() == math.inf
    assert [p.item() for p in model] == [0.0, 0.0]
