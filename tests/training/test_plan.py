"""plan=true: memory, steps and time, output, and no files left."""

import json
import socket
from pathlib import Path

import pytest
import torch
from helpers import TINY

from common.device import peak_memory_bytes, reset_peak_memory
from common.errors import UserError
from configs.cli import parse_config
from training.device import resolve_runtime
from training.plan import Plan, make_plan

GIVEN_SPEED = ["plan=true", "flops_per_second=1e9"]


@pytest.fixture
def plan(workdir):
    """plan("model.n_layer=4", ...) -> the Plan of a tiny model, for a speed of 1 GFLOP/s."""

    def plan_tiny_model(*overrides):
        return plan_config(*TINY, "model.n_layer=1", "optimizer=adamw", *GIVEN_SPEED, *overrides)

    return plan_tiny_model


def plan_config(*words) -> Plan:
    config = parse_config("train", "", list(words))
    return make_plan(config, resolve_runtime(config))


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="NOT RUN: only Linux reports a process's memory",
)
def test_planning_does_not_allocate_the_model(plan):
    plan()  # loads libraries
    device = torch.device("cpu")
    reset_peak_memory(device)
    before = peak_memory_bytes(device)
    assert plan("model.n_embd=8192").memory["weights"] > 3 * 2**30
    assert peak_memory_bytes(device) - before < 2**30


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("optimizer", "bytes_per_parameter"), [("adamw", 8), ("muon", 4)])
def test_weights_gradients_and_optimizer_state_are_exact(
    plan, optimizer, bytes_per_parameter, device
):
    planned = plan(f"optimizer={optimizer}", f"device={device}", "compile=false")
    n = sum(planned.parameters.values())
    assert planned.memory["weights"] == planned.memory["gradients"] == 4 * n
    assert bytes_per_parameter * n <= planned.memory["optimizer state"] <= 8 * n + 1000


def test_activations_grow_with_the_attention_scores_that_a_backend_saves(plan):
    def activations(attention, T, *words):
        return plan(
            f"attention={attention}", "model.n_embd=32", f"model.block_size={T}", *words
        ).memory["activations"]

    B, H, layers = 4, 2, 1
    assert activations("naive", 256) - activations("flash", 256) > layers * B * H * 256 * 256 * 4
    assert 3 < activations("flash", 256) / activations("flash", 64) < 5
    assert activations("naive", 256, "train.micro_batch_size=1") < activations("naive", 256) / 2
    deep = "model.n_layer=8"
    assert (
        activations("flash", 64, deep, "train.activation_checkpointing=block")
        < activations("flash", 64, deep) / 2
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fsdp_divides_the_bytes_among_processes(plan, device):
    settings = ["train.batch_size=8", f"device={device}", "compile=false"]
    alone, split = plan(*settings).memory, plan(*settings, "parallel=fsdp", "world_size=4").memory
    for key in ("weights", "gradients", "optimizer state"):
        assert split[key] == alone[key] // 4
    accumulating = plan(
        *settings, "train.micro_batch_size=1", "parallel=fsdp", "world_size=4"
    ).memory
    assert accumulating["gradients"] == alone["gradients"] // 4 + alone["gradients"]


def test_steps_and_flops_follow_from_the_config(plan, monkeypatch):
    monkeypatch.setattr(
        "training.plan.measure_flops_per_second", lambda *args: 2e9
    )  # of one process
    assert plan("flops_per_second=null", "world_size=2").flops_per_second == 4e9
    planned = plan(
        "train.batch_size=8", "train.micro_batch_size=2", "train.steps=7", "world_size=2"
    )
    assert planned.tokens == 7 * 128
    assert planned.flops == 7 * 128 * sum(planned.flops_per_token.values())
    assert planned.seconds == pytest.approx(planned.flops / 1e9)
    (prepared,) = Path("data/prepared").glob("text-*")
    assert (
        planned.epochs
        == 7
        * 128
        / json.loads((prepared / "meta.json").read_text(encoding="utf-8"))["tokens"]["train"]
    )


def test_minutes_become_the_steps_that_fit(plan):
    planned = plan("train.steps=null", "train.minutes=1")
    assert planned.seconds == pytest.approx(60, rel=0.01)
    assert plan("train.steps=3", "train.minutes=1").steps == 3


def test_printed_plan_is_80_columns_wide_and_leaves_no_run(train, workdir, capsys):
    assert train("plan=true", "wandb.mode=offline", "compile=true") == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for word in ("parameters", "optimizer state", "activations", "measured", "epochs", "time"):
        assert word in out
    assert sorted(path.name for path in workdir.iterdir()) == ["data", "text.txt"]


def test_gpt2_124m_is_planned_without_network(workdir, monkeypatch, tmp_path):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(socket, "getaddrinfo", None)
    small = [
        "model.n_layer=1",
        "model.n_embd=24",
        "model.block_size=32",
        "train.micro_batch_size=1",
    ]
    words = ["experiment=gpt2_124m", *small, *GIVEN_SPEED, "train.batch_size=2"]
    planned = plan_config(*words)
    assert (planned.vocab_size, planned.epochs, Path("data").exists()) == (50_257, None, False)
    with pytest.raises(UserError, match=r"vocabulary of tokenizer=char .* run python prepare.py"):
        plan_config(*words, "data=openwebtext", "tokenizer=char")
