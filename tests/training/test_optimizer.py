"""Optimizers: which parameters they update, clipping, and state that is saved by parameter name."""

import math
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from helpers import ADAMW, MUON, tiny_model, train_step
from torch import nn

from training.optimizer import (
    OPTIMIZERS,
    build_optimizers,
    load_state_by_name,
    optimizer_step,
    set_lr,
    state_by_name,
)


def test_adamw_decays_only_matrices_and_updates_each_parameter_once():
    model = tiny_model()
    (adamw,) = build_optimizers(model, ADAMW)
    decay = {p: group["weight_decay"] for group in adamw.param_groups for p in group["params"]}
    assert (
        len(decay)
        == len(list(model.parameters()))
        == sum(len(g["params"]) for g in adamw.param_groups)
    )
    assert all(decay[p] == (0.1 if p.ndim >= 2 else 0.0) for p in model.parameters())


def test_adamw_is_bit_identical_to_torch_optim_adamw():
    ours, theirs = tiny_model(), tiny_model()
    theirs.load_state_dict(ours.state_dict())
    (a,) = build_optimizers(ours, ADAMW)
    groups = [group | {"params": []} for group in a.state_dict()["param_groups"]]
    for group, params in zip(groups, (2, 1), strict=True):
        group["params"] = [p for p in theirs.parameters() if min(p.ndim, 2) == params]
    b = torch.optim.AdamW(groups)
    for seed in range(3):
        train_step(ours, [a], seed)
        train_step(theirs, [b], seed)
    assert all(map(torch.equal, ours.parameters(), theirs.parameters()))
    assert all(group["fused"] for group in a.param_groups)


@pytest.mark.parametrize("tied", [True, False])
def test_muon_updates_the_matrices_of_blocks_and_adamw_the_rest(tied):
    model = tiny_model(tie_embeddings=tied)
    muon, adamw = build_optimizers(model, MUON)
    rates = {
        p: group["peak_lr"]
        for o in (muon, adamw)
        for group in o.param_groups
        for p in group["params"]
    }
    assert set(rates) == set(model.parameters())
    in_muon = {p for group in muon.param_groups for p in group["params"]}
    assert in_muon == {
        p for name, p in model.named_parameters() if name.startswith("blocks") and p.ndim == 2
    }
    assert rates[model.wte.weight] == MUON.embedding_lr
    assert rates[model.lm_head.weight] == (MUON.embedding_lr if tied else MUON.head_lr)
    assert [group["weight_decay"] for group in adamw.param_groups] == [0.0] * len(
        adamw.param_groups
    )


def test_any_torch_optimizer_can_be_added_with_one_function(monkeypatch):
    monkeypatch.setitem(
        OPTIMIZERS, "sgd", lambda model, config, _: [torch.optim.SGD(model.parameters(), config.lr)]
    )
    (sgd,) = build_optimizers(tiny_model(), replace(ADAMW, name="sgd"))
    set_lr([sgd], 0.5)
    assert [group["lr"] for group in sgd.param_groups] == [0.5 * ADAMW.lr]


@pytest.mark.parametrize("config", [ADAMW, MUON], ids=["adamw", "muon"])
def test_optimizer_state_is_restored_by_name_with_the_learning_rates_of_the_config(config):
    model = tiny_model()
    optimizers = build_optimizers(model, config)
    train_step(model, optimizers)
    state = deepcopy(state_by_name(model, optimizers))
    assert set(state) == {name for name, _ in model.named_parameters()}

    other = tiny_model()
    others = build_optimizers(other, config)
    for optimizer in others:
        for group in optimizer.param_groups:
            group["lr"] *= 0.5
    other.load_state_dict(model.state_dict())
    load_state_by_name(other, others, state)
    rates, other_rates = (
        [g["lr"] for o in group for g in o.param_groups] for group in (optimizers, others)
    )
    assert other_rates == [0.5 * lr for lr in rates]
    set_lr(others, 1.0)
    assert train_step(model, optimizers, 1) == train_step(other, others, 1)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


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
    grad_norm = optimizer_step(
        model, optimizers, torch.amp.GradScaler("cpu", enabled=False), max_grad_norm
    )
    assert grad_norm.item() == 5.0
    assert [p.item() for p in model] == pytest.approx(expected)
    assert all(p.grad is None for p in model)


def test_optimizer_step_unscales_gradients_before_clipping_and_skips_all_optimizers_at_an_overflow():
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.zeros(()))  # the first call creates the scale
    model, optimizers = model_with_gradients(24.0, 32.0)
    assert optimizer_step(model, optimizers, scaler, 1.0).item() == 5.0
    assert [p.item() for p in model] == pytest.approx([-0.6, -0.8])
    model, optimizers = model_with_gradients(24.0, math.inf)
    assert optimizer_step(model, optimizers, scaler, None).item() == math.inf
    assert [p.item() for p in model] == [0.0, 0.0]
    assert scaler.get_scale() == 4.0


def test_muon_decays_the_ngram_table_by_its_weight_decay_and_no_other_embedding():
    model = tiny_model(max_ngram=3, tie_embeddings=False)
    with torch.no_grad():
        model.ngrams.table.weight.fill_(2.0)
    before = model.wte.weight.clone()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for optimizer in build_optimizers(
        model, replace(MUON, embedding_lr=0.01, ngram_weight_decay=5.0)
    ):
        optimizer.step()
    assert torch.allclose(model.ngrams.table.weight, torch.tensor(2.0 * (1 - 0.01 * 5.0)))
    assert torch.equal(model.wte.weight, before)
