"""FSDP2 with gloo: the losses, checkpoints and memory of sharded models."""

import os
import signal
import subprocess
import time

import pytest
import torch
from distributed_helpers import SINGLE, assert_same_curve, finish, torchrun, write_train_script
from helpers import TINY, load, metrics, summary

from common.errors import UserError
from configs.cli import parse_config
from training.device import resolve_runtime

WARMUP = "schedule.warmup_steps=1000000"  # the learning rate does not depend on the number of steps


def assert_same_tensors(a: dict, b: dict, **tolerance):
    for name, tensor in a["model"].items():
        assert torch.allclose(tensor, b["model"][name], **tolerance), name
    for name, state in a["optimizer"].items():
        for key, value in state.items():
            assert torch.allclose(value, b["optimizer"][name][key], **tolerance), (name, key)


@pytest.mark.slow
def test_two_sharded_processes_train_like_one(train, workdir):
    """With Muon, accumulation, activation checkpointing, tied embeddings, and everything that an evaluation does."""
    settings = ["model=gpt2", "optimizer=muon", "eval.attention_stats=true"]
    sharded = ["parallel=fsdp", "train.micro_batch_size=2", "train.activation_checkpointing=block"]
    script = write_train_script(
        "from training import run_logger\nrun_logger.peak_flops = lambda *args: 1e9"
    )
    finish(torchrun(2, "name=two", *sharded, *settings, script=script))
    assert train("name=one", *SINGLE, *settings) == 0
    assert_same_curve(metrics("one"), metrics("two"))
    flops_per_second = summary("two")["flops_per_token"] * metrics("two")[-1]["tokens_per_second"]
    assert metrics("two")[-1]["mfu"] == pytest.approx(flops_per_second / 2e9)
    assert [row.get("sample") for row in metrics("one")] == [
        row.get("sample") for row in metrics("two")
    ]
    for key in ("attention/entropy", "attention/score_variance"):
        assert metrics("one")[-1][key] == pytest.approx(metrics("two")[-1][key], abs=1e-5)
    one, two = (load(name) for name in ("one", "two"))
    assert_same_tensors(one, two, atol=1e-4)


@pytest.mark.slow
def test_killed_sharded_run_resumes_on_other_numbers_of_processes_and_with_ddp(train, workdir):
    process = torchrun(
        4, "name=a", "train.steps=1000000", "eval.every=1000000", WARMUP, "parallel=fsdp"
    )
    last = workdir / "runs/a/checkpoints/last.pt"
    while process.poll() is None and not last.exists():
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()[1]
    workers = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True
    ).stdout.split()
    os.kill(int(workers[2]), signal.SIGKILL)
    process.communicate(timeout=600)
    assert process.returncode == 1

    step = load("a")["step"]
    settings = ["eval.every=1000000", WARMUP]
    finish(torchrun(2, "name=a", f"train.steps={step + 6}", *settings, "parallel=fsdp"))
    finish(torchrun(2, "name=a", f"train.steps={step + 12}", *settings, "parallel=ddp"))
    finish(torchrun(4, "name=a", f"train.steps={step + 18}", *settings, "parallel=fsdp"))
    assert train("name=a", *SINGLE, f"train.steps={step + 24}", *settings) == 0
    assert train("name=b", *SINGLE, f"train.steps={step + 24}", *settings) == 0
    for a, b in zip(metrics("a"), metrics("b"), strict=True):
        assert a.get("train/loss") == pytest.approx(b.get("train/loss"), abs=1e-5), a["step"]
    resumed, uninterrupted = (load(name) for name in "ab")
    assert_same_tensors(resumed, uninterrupted, atol=1e-4)


@pytest.mark.slow
def test_more_processes_than_rows_save_and_resume(train):
    """Each of four processes has one or two rows of most tensors, and none of some."""
    tiny = ["model.n_head=1", "model.n_embd=2", "eval.sample.max_new_tokens=0"]
    finish(torchrun(4, "name=a", "parallel=fsdp", "train.steps=3", WARMUP, *tiny))
    finish(torchrun(4, "name=a", "parallel=fsdp", WARMUP, *tiny))
    assert "runs/a is finished at step" in finish(
        torchrun(4, "name=a", "parallel=fsdp", WARMUP, *tiny)
    )
    assert train("name=b", *SINGLE, WARMUP, *tiny) == 0
    losses_a, losses_b = ([row.get("train/loss") for row in metrics(name)] for name in "ab")
    assert losses_a == pytest.approx(losses_b, abs=1e-5)


@pytest.mark.slow
def test_gradients_in_bfloat16_are_summed_in_float32(workdir):
    settings = ["optimizer=adamw", "train.grad_clip=null", "train.steps=1", "dtype=bfloat16"]
    finish(torchrun(2, "name=a", "parallel=fsdp", *settings))
    gradient = 10 * load("a")["optimizer"]["blocks.0.mlp.fc.weight"]["exp_avg"]  # beta1 is 0.9
    assert ((gradient - gradient.bfloat16()).abs() > 1e-5 * gradient.abs()).float().mean() > 0.1


def test_one_process_is_refused(workdir):
    with pytest.raises(
        UserError, match="parallel=fsdp needs several processes; start them with torchrun"
    ):
        resolve_runtime(parse_config("train", "", [*TINY, "parallel=fsdp"]))
