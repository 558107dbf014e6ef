"""plan=true: its counts against torch's own counter, its memory against a run that was measured, and no traces left."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import ROOT, TINY
from torch.utils.flop_counter import FlopCounterMode

from common import system
from common.errors import UserError
from configs.cli import parse_config, run_main
from model.attention import BACKENDS, naive
from model.config import GPTConfig
from model.flops import (
    attention_flops_per_token,
    crossover,
    flops_per_token,
    linear_flops_per_token,
    n_params,
    params_by_part,
)
from model.gpt import GPT
from training.distributed import Dist
from training.planning.memory import Memory
from training.planning.plan import make_plan
from training.planning.table import si

GIVEN = ["plan=true", "flops_per_second=1e9"]
VARIANTS = {
    "gpt2": ["model=gpt2"],
    "untied": ["model=gpt2", "model.tie_embeddings=false"],
    "modern": ["model=modern"],
    "grouped": ["model=modern", "model.n_kv_head=1", "model.tie_embeddings=true"],
}


@pytest.fixture
def plan(workdir):
    """plan("model.n_layer=4", ...) -> the Plan of a tiny model, reckoned at 1 GFLOP/s."""
    alone = Dist()
    return lambda *overrides, dist=alone: make_plan(
        parse_config("train", "", [*TINY, "model.n_layer=1", "optimizer=adamw", *GIVEN, *overrides]), dist
    )


def model_config(*overrides: str) -> GPTConfig:
    small = ["model.n_layer=2", "model.n_head=4", "model.n_embd=64", "model.block_size=257", "data=python_stdlib"]
    return parse_config("train", "", [*small, *overrides]).model


@pytest.mark.parametrize("T", [64, 257])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_flops_are_those_that_torch_counts_on_naive(variant, T):
    config = model_config(*variant)
    tokens = torch.zeros(2, T, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        GPT(config, 300, naive)(tokens, tokens).backward()
    assert flops_per_token(config, 300, T) * 2 * T == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_the_parts_add_up_to_all_parameters(variant):
    model = GPT(model_config(*variant), 300, naive)
    parts = params_by_part(model)
    assert sum(parts.values()) == n_params(model)
    assert (parts["head"] == 0) == model.config.tie_embeddings
    assert (parts["position embedding"] == 0) == (model.config.position == "rotary")


def test_attention_overtakes_the_rest_at_the_crossover_and_not_before():
    config = model_config()
    T, linear = crossover(config, 300), linear_flops_per_token(config, 300)
    assert attention_flops_per_token(config, T) >= linear > attention_flops_per_token(config, T - 1)


def test_windows_bound_the_keys_and_may_put_the_crossover_off_for_ever():
    config = model_config()
    full = crossover(config, 300)
    config = replace(config, window=[16, None])
    assert attention_flops_per_token(config, 100) == 12 * 64 * 116
    T, linear = crossover(config, 300), linear_flops_per_token(config, 300)
    assert full < T
    assert attention_flops_per_token(config, T) >= linear > attention_flops_per_token(config, T - 1)
    assert crossover(replace(config, window=16), 300) is None


# Memory


SEVERAL_HUNDRED_MIB = [
    "model.n_layer=2", "model.n_head=4", "model.n_embd=128", "model.block_size=1024", "train.batch_size=4",
    "train.steps=2", "eval.every=2", "eval.batches=1",
]  # fmt: skip
ASK = """
import json, sys
from configs.cli import parse_config
config = parse_config("train", "", sys.argv[1:])
import train
from training.planning.plan import Dist, make_plan
plan = make_plan(config, Dist())
can = {name: memory for name, memory in plan.memory.items() if not isinstance(memory, str)}
print(json.dumps({name: (plan.total_bytes(name), memory.activations) for name, memory in can.items()}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="NOT RUN: a process's memory is Linux's to tell")
def test_memory_is_within_a_fifth_of_measured_runs(workdir):
    """Runs and plan in processes of their own, as a user starts them."""

    def python(*words: object) -> str:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, *words[:2], *TINY, *SEVERAL_HUNDRED_MIB, *words[2:]]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    planned = json.loads(python("-c", ASK, *GIVEN).splitlines()[-1])
    for attention in ("naive", "flash"):
        python(ROOT / "train.py", f"attention={attention}", f"name={attention}")
        measured = json.loads(Path(f"runs/{attention}/summary.json").read_text())["peak_memory_bytes"]
        total, activations = planned[attention]
        assert activations > 80 * 2**20, "the model is too small for the test to say anything"
        assert total == pytest.approx(measured, rel=0.2), attention


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="NOT RUN: a process's memory is Linux's to tell")
def test_a_model_is_planned_without_being_made(plan):
    plan()  # what libraries take at first
    device = torch.device("cpu")
    system.reset_peak_memory(device)
    before = system.peak_memory_bytes(device)
    assert plan("model.n_embd=8192").memory["naive"].weights > 3 * 2**30
    assert system.peak_memory_bytes(device) - before < 2**30


def test_weights_gradients_and_states_are_counted_exactly(plan):
    for optimizer, per_parameter in (("adamw", 8), ("muon", 4)):
        planned = plan(f"optimizer={optimizer}")
        n = sum(planned.parameters.values())
        memory = planned.memory["naive"]
        rotary = 2 * 16 * 4 * 4  # cos and sin of 16 places and 4 frequencies
        assert memory.weights == 4 * n + rotary
        assert memory.gradients == 4 * n
        assert memory.optimizer >= per_parameter * n
        assert memory.peak > memory.weights + memory.optimizer + memory.activations
        assert memory.reserved >= memory.peak


def test_scores_are_of_the_backends_that_keep_them_and_grow_with_the_square(plan):
    short, long = (plan("model.n_embd=32", f"model.block_size={T}").memory for T in (64, 256))
    assert short["flash"].scores == short["sdpa"].scores == 0
    B, H, layers = 4, 2, 1
    assert short["naive"].scores >= layers * B * H * 64 * 64 * 4
    assert long["naive"].scores == 16 * short["naive"].scores
    assert 3 < long["flash"].activations / short["flash"].activations < 5


def test_micro_batches_take_less_memory_and_a_shorter_number_too(plan):
    whole, parts = plan().memory["naive"], plan("train.micro_batch_size=1").memory["naive"]
    assert parts.activations < whole.activations
    assert plan("dtype=bfloat16").memory["naive"].scores < whole.scores


def test_auto_is_what_would_fit_into_the_memory_that_is_free(plan, monkeypatch):
    given = plan("train.micro_batch_size=2")
    monkeypatch.setattr(system, "free_memory", lambda device: given.memory["flash"].reserved / 0.8 + 1)
    planned = plan("train.micro_batch_size=auto")
    assert (planned.micro_batch_size, planned.accumulation) == (2, 2)
    assert planned.memory == given.memory
    monkeypatch.setattr(system, "free_memory", lambda device: None)
    with pytest.raises(UserError, match=r"does not tell for device=cpu; set a number, or null"):
        plan("train.micro_batch_size=auto")


def test_a_backend_that_cannot_run_is_a_row_with_its_reason(plan, workdir, capsys):
    memory = plan("attention=naive", "model.dropout=0.1").memory
    assert list(memory) == list(BACKENDS)
    assert memory["flash"].startswith("attention=flash on cpu has no dropout; set model.dropout=0")
    assert isinstance(memory["naive"], Memory)
    with pytest.raises(UserError, match="has no dropout"):
        plan("attention=flash", "model.dropout=0.1")


# Schedule and time


def test_the_schedule_is_reckoned_from_the_config(plan):
    planned = plan("train.batch_size=8", "train.micro_batch_size=2", "train.steps=7", dist=Dist(0, 2, 0, 2))
    assert (planned.world_size, planned.accumulation, planned.micro_batch_size) == (2, 2, 2)
    assert planned.tokens_per_step == 128
    assert planned.tokens == 7 * 128
    assert planned.evaluations == 4  # before the first step, at 3 and 6, and at the last
    flops = planned.linear_flops + planned.attention_flops
    assert planned.training_flops == 7 * 128 * flops
    assert planned.evaluation_flops == pytest.approx(4 * 2 * 8 * 16 * flops / 3, abs=4)
    assert planned.seconds == pytest.approx((planned.training_flops + planned.evaluation_flops) / 1e9)
    (prepared,) = Path("data/prepared").glob("text-*")
    assert planned.epochs == 7 * 128 / json.loads((prepared / "meta.json").read_text())["tokens"]["train"]


def test_minutes_become_the_steps_that_fit_into_them(plan):
    planned = plan("train.steps=null", "train.minutes=1")
    assert planned.seconds == pytest.approx(60, rel=0.01)
    assert plan("train.steps=3", "train.minutes=1").steps == 3


# What it does not do


def test_a_plan_is_a_page_of_80_columns_and_leaves_no_run(workdir, capsys):
    from train import main

    assert run_main(main, parse_config("train", "", [*TINY, "plan=true", "wandb.mode=offline"])) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for word in ("parameters", "attention overtakes the rest at", "naive", "flash", "measured", "epochs", "time"):
        assert word in out
    assert sorted(path.name for path in workdir.iterdir()) == ["data", "text.txt"]


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    def refuse(*arguments, **options):
        raise AssertionError("a plan went to the network")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_gpt2_124m_is_planned_without_network(workdir, no_network):
    small = ["model.n_layer=1", "model.n_embd=24", "model.block_size=32", "train.micro_batch_size=1"]
    planned = make_plan(
        parse_config("train", "", ["experiment=gpt2_124m", *small, *GIVEN, "train.batch_size=2"]), Dist()
    )
    assert planned.vocab_size == 50_257
    assert planned.epochs is None
    assert not Path("data").exists()


def test_text_of_ones_own_needs_no_vocabulary_from_the_network(plan, no_network):
    assert plan("tokenizer=gpt2").vocab_size == 50_257


@pytest.mark.parametrize(
    "tokenizer, size, at_most",
    [("byte", 257, False), ("bpe", 1024, True)],
)
def test_a_vocabulary_is_known_ahead_of_a_text_where_it_can_be(plan, no_network, tokenizer, size, at_most):
    planned = plan("data=openwebtext", "data.path=null", f"tokenizer={tokenizer}")
    assert (planned.vocab_size, planned.at_most) == (size, at_most)


def test_what_cannot_be_planned_is_one_sentence(plan, no_network, capsys):
    with pytest.raises(UserError, match=r"vocabulary of tokenizer=char .* run python prepare.py data=openwebtext"):
        plan("data=openwebtext", "data.path=null", "tokenizer=char")


@pytest.mark.parametrize(
    "words, sentence",
    [
        (["plan=true", "flops_per_second=0"], "must be a number greater than 0"),
        (["plan=true", "flops_per_second=-1e9"], "must be a number greater than 0"),
        (["flops_per_second=1e12"], "is for a plan alone; set plan=true"),
        (["-m", "plan=true", "seed=1,2"], "plan=true tells of one run; leave out -m"),
    ],
)
def test_wrong_words_are_answered_in_one_sentence(workdir, capsys, words, sentence):
    with pytest.raises(SystemExit) as end:
        parse_config("train", "", [*TINY, *words])
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err
    assert not Path("runs").exists()


def test_of_several_processes_one_speaks(workdir, capsys, monkeypatch):
    from train import main

    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert run_main(main, parse_config("train", "", [*TINY, *GIVEN])) == 0
    assert capsys.readouterr().out == ""


def test_large_numbers_are_written_short():
    assert [si(n) for n in (7, 999, 1_234_567, 999_600, 2.5e21)] == ["7", "999", "1.23 M", "1 M", "2.5 Z"]
