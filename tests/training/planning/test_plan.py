"""plan=true: memory compared with measured runs, steps and time, output, and no files left."""

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import ROOT, TINY

from common import system
from common.errors import UserError
from configs.cli import parse_config, run_main
from model.attention import BACKENDS
from training.device import resolve_runtime
from training.distributed import Dist
from training.planning import memory
from training.planning.memory import MAX_SMALL_BLOCK_BYTES, MemoryEstimate
from training.planning.micro_batch import USABLE_MEMORY_FRACTION
from training.planning.plan import Plan

GIVEN_SPEED = ["plan=true", "flops_per_second=1e9"]


@pytest.fixture
def plan(workdir):
    """plan("model.n_layer=4", ...) -> the Plan of a tiny model, for a speed of 1 GFLOP/s."""

    def make_plan(*overrides, dist=None):
        return plan_config(*TINY, "model.n_layer=1", "optimizer=adamw", *GIVEN_SPEED, *overrides, dist=dist)

    return make_plan


def plan_config(*words, dist=None) -> Plan:
    config = parse_config("train", "", list(words))
    runtime = resolve_runtime(config.device, config.dtype, config.compile, config.parallel, config.world_size)
    return Plan(config, replace(runtime, dist=dist or runtime.dist))


# Memory


SEVERAL_HUNDRED_MIB = [
    "model.n_layer=2",
    "model.n_head=4",
    "model.n_embd=128",
    "model.block_size=1024",
    "train.batch_size=4",
    "train.steps=2",
    "eval.every=2",
    "eval.batches=1",
]
MAKE_PLAN = """
import json, sys
from configs.cli import parse_config
config = parse_config("train", "", sys.argv[1:])
import train
from training.planning.plan import Plan
runtime = train.resolve_runtime(config.device, config.dtype, config.compile, config.parallel, config.world_size)
train.configure_backends(runtime.device, config.deterministic, config.tf32)
plan = Plan(config, runtime)
estimates = {name: memory for name, memory in plan.memory.items() if not isinstance(memory, str)}
print(json.dumps({name: (plan.total_bytes(name), memory.activations) for name, memory in estimates.items()}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="NOT RUN: only Linux reports a process's memory")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory_is_within_20_percent_of_measured_runs(workdir, dtype):
    """The plan and the runs are separate processes, as a user starts them."""

    def python(*arguments: object) -> str:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        settings = [*TINY, *SEVERAL_HUNDRED_MIB, f"dtype={dtype}"]
        command = [sys.executable, *arguments[:2], *settings, *arguments[2:]]
        return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout

    planned = json.loads(python("-c", MAKE_PLAN, *GIVEN_SPEED).splitlines()[-1])
    for attention in ("naive", "flash"):
        python(ROOT / "train.py", f"attention={attention}", f"name={attention}")
        measured = json.loads(Path(f"runs/{attention}/summary.json").read_text())["peak_memory_bytes"]
        total, activations = planned[attention]
        assert activations > 60 * 2**20, "the model is too small for a meaningful test"
        assert total == pytest.approx(measured, rel=0.2), attention


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="NOT RUN: only Linux reports a process's memory")
def test_planning_does_not_allocate_the_model(plan):
    plan()  # loads libraries
    device = torch.device("cpu")
    system.reset_peak_memory(device)
    before = system.peak_memory_bytes(device)
    assert plan("model.n_embd=8192").memory["naive"].weights > 3 * 2**30
    assert system.peak_memory_bytes(device) - before < 2**30


def test_signal_in_a_finalizer_stops_the_plan(plan, monkeypatch):
    class Freed:
        pass

    def run_steps(*_):
        weakref.finalize(Freed(), signal.raise_signal, signal.SIGINT)  # called at once

    monkeypatch.setattr(memory, "run_steps", run_steps)
    with pytest.raises(KeyboardInterrupt):
        plan()


def test_weights_gradients_and_optimizer_state_are_exact(plan):
    for optimizer, bytes_per_parameter in (("adamw", 8), ("muon", 4)):
        planned = plan(f"optimizer={optimizer}")
        n = sum(planned.parameters.values())
        memory = planned.memory["naive"]
        rotary = 2 * 16 * 4 * 4  # cos and sin of 16 positions and 4 frequencies
        assert memory.weights == 4 * n + rotary
        assert memory.gradients == 4 * n
        assert memory.optimizer >= bytes_per_parameter * n
        assert memory.peak > memory.weights + memory.optimizer + memory.activations


def test_glibc_reserves_small_activations_in_addition_to_the_peak(plan, monkeypatch):
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    memory = plan().memory["naive"]
    assert memory.reserved == memory.peak + memory.activations  # each tensor is small
    large = plan("model.block_size=2048").memory["naive"]
    weights = 4 * 2 * 2048**2 * 4  # of attention, in float32, for 4 sequences and 2 heads
    assert weights > MAX_SMALL_BLOCK_BYTES
    assert large.reserved == large.peak + large.activations - weights
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    memory = plan().memory["naive"]
    assert memory.reserved == memory.peak


def test_scores_exist_only_where_attention_saves_them_and_grow_quadratically(plan):
    short, long = (plan("model.n_embd=32", f"model.block_size={T}").memory for T in (64, 256))
    assert short["flash"].scores == short["sdpa"].scores == 0
    B, H, layers = 4, 2, 1
    assert short["naive"].scores >= layers * B * H * 64 * 64 * 4
    assert long["naive"].scores == 16 * short["naive"].scores
    assert 3 < long["flash"].activations / short["flash"].activations < 5


def test_micro_batches_and_bfloat16_need_less_memory(plan):
    full, micro = plan().memory["naive"], plan("train.micro_batch_size=1").memory["naive"]
    assert micro.activations < full.activations
    assert plan("dtype=bfloat16").memory["naive"].scores < full.scores


def test_auto_micro_batch_fits_into_the_free_memory(plan, monkeypatch):
    given = plan("train.micro_batch_size=2")
    monkeypatch.setattr(system, "free_memory", lambda device: given.memory["flash"].reserved / 0.8 + 1)
    planned = plan("train.micro_batch_size=auto")
    assert (planned.micro_batch_size, planned.accumulation) == (2, 2)
    assert planned.memory == given.memory
    monkeypatch.setattr(system, "free_memory", lambda device: None)
    with pytest.raises(UserError, match=r"cannot read the free memory for device=cpu on this system; set a number"):
        plan("train.micro_batch_size=auto")


@pytest.mark.parametrize("attention, available", [("naive", 2**25), ("naive", 2**28), ("flash", 2**25)])
def test_longest_context_fits_and_a_longer_one_does_not(plan, monkeypatch, attention, available):
    monkeypatch.setattr(system, "free_memory", lambda device: available / USABLE_MEMORY_FRACTION)
    T = plan().longest_context(attention)

    def memory(T):
        return plan(f"model.block_size={T}").memory[attention].reserved

    assert memory(int(0.95 * T)) <= available < memory(int(1.05 * T))


def test_backend_that_cannot_run_is_listed_with_its_reason(plan):
    memory = plan("attention=naive", "model.dropout=0.1").memory
    assert set(memory) == set(BACKENDS)
    assert "does not support dropout" in memory["flash"]
    assert isinstance(memory["naive"], MemoryEstimate)


def test_chosen_backend_that_cannot_run_is_refused(workdir, capsys):
    from train import main

    settings = [*TINY, *GIVEN_SPEED, "attention=flash", "model.dropout=0.1"]
    assert run_main(main, parse_config("train", "", settings)) == 2
    assert "does not support dropout" in capsys.readouterr().err


# Steps and time


def test_steps_evaluations_and_flops_follow_from_the_config(plan):
    planned = plan("train.batch_size=8", "train.micro_batch_size=2", "train.steps=7", dist=Dist(0, 2, 0, 2))
    assert (planned.accumulation, planned.micro_batch_size) == (2, 2)
    assert planned.tokens_per_step == 128
    assert planned.tokens == 7 * 128
    assert planned.evaluations == 4  # before the first step, at 3 and 6, and at the last
    flops = planned.weight_flops + planned.attention_flops
    assert planned.training_flops == 7 * 128 * flops
    assert planned.evaluation_flops == pytest.approx(4 * 2 * 8 * 16 * flops / 3, abs=4)
    assert planned.seconds == pytest.approx((planned.training_flops + planned.evaluation_flops) / 1e9)
    (prepared,) = Path("data/prepared").glob("text-*")
    assert planned.epochs == 7 * 128 / json.loads((prepared / "meta.json").read_text())["tokens"]["train"]


def test_minutes_become_the_steps_that_fit(plan):
    planned = plan("train.steps=null", "train.minutes=1")
    assert planned.seconds == pytest.approx(60, rel=0.01)
    assert plan("train.steps=3", "train.minutes=1").steps == 3


def write_bench(**speeds):
    """Write the attention.csv of a bench at T = 16 and 256. speeds: FLOP/s of a backend at these contexts."""
    with open("attention.csv", "w") as file:
        print("backend,phase,mask,status,device,dtype,D,Dv,T,flops_per_second", file=file)
        for name, values in speeds.items():
            for T, value in zip((16, 256), values, strict=True):
                print(f"{name},forward+backward,causal,finished,cpu,float32,8,8,{T},{value}", file=file)
                print(f"{name},forward+backward,causal,finished,cpu,float32,16,16,{T},1", file=file)
                print(f"{name},forward,causal,finished,cpu,float32,8,8,{T},1", file=file)


def test_bench_gives_the_time_with_each_backend(plan):
    write_bench(naive=(1e10, 4e10), flash=(1e10, 16e10))
    words = "attention=naive", "model.block_size=64", "eval.batches=1", "attention_csv=attention.csv"
    planned = plan(*words)
    seconds = planned.seconds_by_backend
    assert seconds["naive"] == planned.seconds
    pairs = 64 * 65 / 2
    flops = 3 * 4 * pairs * planned.config.model.n_embd  # per sequence and layer, forward and backward
    tokens = planned.tokens + planned.evaluations * 1 * planned.config.train.batch_size * 64 / 3
    # halfway between the contexts on a logarithmic scale
    expected = tokens / 64 * flops * (1 / 8.5e10 - 1 / 2.5e10)
    assert seconds["flash"] - seconds["naive"] == pytest.approx(expected, rel=1e-3)


def test_bench_that_does_not_fit_the_run_is_refused(plan):
    with pytest.raises(UserError, match=r"attention_csv=missing.csv cannot be read; set the attention.csv of a run"):
        plan("attention_csv=missing.csv")
    write_bench(naive=(1e6, 4e6))
    for words in (
        ["attention=flash"],
        ["attention=naive", "model.block_size=512"],
        ["attention=naive", "model.n_embd=64"],
    ):
        with pytest.raises(UserError, match=r"no finished rows of (flash|naive) for phase forward\+backward on cpu in"):
            plan(*words, "attention_csv=attention.csv")
    with pytest.raises(UserError, match=r"no times for windows; set model.window=null"):
        plan("attention=naive", "model.window=8", "attention_csv=attention.csv")
    with pytest.raises(UserError, match=r"attention_csv=attention.csv is of a slower machine"):
        plan("attention=naive", "attention_csv=attention.csv")
    text = Path("attention.csv").read_text()
    Path("attention.csv").write_text(text.replace("4000000.0", "x"))
    with pytest.raises(UserError, match=r"cannot be read"):
        plan("attention=naive", "attention_csv=attention.csv")


# Output and side effects


def test_printed_plan_is_80_columns_wide_and_leaves_no_run(workdir, capsys):
    from train import main

    settings = [*TINY, "plan=true", "wandb.mode=offline", "compile=true"]
    assert run_main(main, parse_config("train", "", settings)) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for word in ("parameters", "FLOPs as the weights at", "naive", "flash", "scores", "measured", "epochs", "time"):
        assert word in out
    assert sorted(path.name for path in workdir.iterdir()) == ["data", "text.txt"]


def test_plan_shows_from_which_context_linear_attention_needs_fewer_flops(workdir, capsys, monkeypatch):
    from train import main

    monkeypatch.setattr(system, "free_memory", lambda device: None)  # the longest context is unknown, and not searched
    settings = [*TINY, *GIVEN_SPEED, "model.mixer=[linear,softmax]", "model.n_embd=64"]  # 32 channels per head
    assert run_main(main, parse_config("train", "", settings)) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "linear attention needs fewer FLOPs above a context of 96 than naive" in out and "above 192 than" in out
    assert "longest context that fits - - -" in out


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    def refuse(*arguments, **options):
        raise AssertionError("plan=true used the network")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


def test_gpt2_124m_is_planned_without_network(workdir, no_network):
    small = ["model.n_layer=1", "model.n_embd=24", "model.block_size=32", "train.micro_batch_size=1"]
    planned = plan_config("experiment=gpt2_124m", *small, *GIVEN_SPEED, "train.batch_size=2")
    assert planned.vocab_size == 50_257
    assert planned.epochs is None
    assert not Path("data").exists()


def test_local_file_with_gpt2_tokenizer_is_planned_without_network(plan, no_network):
    assert plan("tokenizer=gpt2").vocab_size == 50_257


@pytest.mark.parametrize(("tokenizer", "size", "is_upper_bound"), [("byte", 257, False), ("bpe", 300, True)])
def test_vocab_size_is_known_before_the_download_where_possible(plan, no_network, tokenizer, size, is_upper_bound):
    planned = plan(
        "data=openwebtext",
        "data.path=null",
        f"tokenizer={tokenizer}",
        *["tokenizer.vocab_size=300"] * (tokenizer == "bpe"),
    )
    assert (planned.vocab_size, planned.vocab_is_upper_bound) == (size, is_upper_bound)


def test_vocabulary_that_needs_a_download_is_refused(plan, no_network):
    with pytest.raises(UserError, match=r"vocabulary of tokenizer=char .* run python prepare.py data=openwebtext"):
        plan("data=openwebtext", "data.path=null", "tokenizer=char")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["plan=true", "flops_per_second=0"], "flops_per_second=0"),
        (["plan=true", "flops_per_second=-1e9"], "flops_per_second=-1000000000.0 must be greater than 0"),
        (["flops_per_second=1e12"], "plan=true"),
        (["attention_csv=x"], "plan=true"),
        (["-m", "plan=true", "seed=1,2"], "-m"),
    ],
)
def test_invalid_settings_are_refused(workdir, capsys, overrides, expected):
    with pytest.raises(SystemExit) as exit_info:
        parse_config("train", "", [*TINY, *overrides])
    assert exit_info.value.code == 2
    assert expected in capsys.readouterr().err
    assert not Path("runs").exists()


def test_only_rank_0_prints_the_plan(workdir, capsys, monkeypatch):
    from train import main

    ranks = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    for name, value in (ranks | {"MASTER_ADDR": "localhost", "MASTER_PORT": 29500}).items():
        monkeypatch.setenv(name, str(value))
    assert run_main(main, parse_config("train", "", [*TINY, *GIVEN_SPEED])) == 0
    assert capsys.readouterr().out == ""
