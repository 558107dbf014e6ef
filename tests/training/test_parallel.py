"""DDP, and FSDP2 with gloo: the losses, checkpoints and gradients of sharded models."""

import os
import signal
import subprocess
import time

import pytest
import torch
from distributed_helpers import (
    SINGLE,
    assert_close_checkpoints,
    assert_same_curve,
    finish,
    make_folder,
    torchrun,
    write_train_script,
)
from helpers import load, metrics, summary, tiny_model
from run_helpers import train_in

from training.parallel import DDP

WARMUP = "schedule.warmup_steps=1000000"  # the learning rate does not depend on the number of steps
FSDP = "parallel=fsdp"
KNOWN_PEAK = "from training import log\nlog.peak_flops = lambda *args: 1e9"


@pytest.mark.parametrize("compile", [True, False])
def test_ddp_compiles_the_model_if_requested(monkeypatch, compile):
    monkeypatch.setattr(torch, "compile", lambda model, dynamic: "compiled")
    ddp = DDP(1, torch.device("cpu"), torch.float32)
    model = tiny_model()
    assert ddp.wrap(model, compile) == ("compiled" if compile else model)


@pytest.mark.slow
def test_two_sharded_processes_train_like_one(tmp_path_factory, monkeypatch):
    """With Muon, accumulation, activation checkpointing, tied embeddings, and everything that an
    evaluation does."""
    folder = make_folder(tmp_path_factory, "sharded")
    monkeypatch.chdir(folder)
    script = write_train_script(folder, KNOWN_PEAK)
    settings = ["model=gpt2", "optimizer=muon", "eval.attention_stats=true"]
    words = [FSDP, "train.micro_batch_size=2", "train.activation_checkpointing=block"]
    finish(torchrun(2, "name=two", *words, *settings, script=script))
    train_in(folder, "name=one", *SINGLE, *settings)
    assert_same_curve(metrics("one"), metrics("two"))
    assert_close_checkpoints(load("one"), load("two"))
    one, two = metrics("one"), metrics("two")
    assert [row.get("sample") for row in one] == [row.get("sample") for row in two]
    for key in ("attention/entropy", "attention/score_variance"):
        assert one[-1][key] == pytest.approx(two[-1][key], abs=1e-5)
    # the peak is of both processes
    flops_per_second = summary("two")["flops_per_token"] * two[-1]["tokens_per_second"]
    assert two[-1]["mfu"] == pytest.approx(flops_per_second / 2e9)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_train_teachers_and_a_student_like_one(
    tmp_path_factory, monkeypatch, parallel
):
    """Also a student that resumes."""
    folder = make_folder(tmp_path_factory, parallel)
    monkeypatch.chdir(folder)
    settings = ["train.n_teachers=2", "schedule.warmup_steps=1"]
    words = [f"parallel={parallel}", *settings]
    for steps in ("train.steps=3", "train.steps=5"):
        finish(torchrun(2, "name=two", *words, steps))
        train_in(folder, "name=one", *SINGLE, *settings, steps)
    assert_same_curve(metrics("one"), metrics("two"))
    assert_close_checkpoints(load("one"), load("two"))
    teachers = [load(name)["teachers"] for name in ("one", "two")]
    torch.testing.assert_close(*teachers, atol=1e-4, rtol=0)


def kill_worker(process: subprocess.Popen) -> None:
    """SIGKILL for a worker of torchrun."""
    command = ["pgrep", "-P", str(process.pid)]
    workers = subprocess.run(command, capture_output=True, text=True).stdout.split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    process.communicate(timeout=600)
    assert process.returncode == 1


@pytest.mark.slow
def test_killed_sharded_run_resumes_with_ddp_and_on_other_numbers_of_processes(
    tmp_path_factory, monkeypatch
):
    """Each of three processes has at least one row of most tensors, and none of some."""
    folder = make_folder(tmp_path_factory, "resharded")
    monkeypatch.chdir(folder)
    settings = [WARMUP, "eval.every=1000000", "train.batch_size=6"]
    settings += ["model.n_head=1", "model.n_embd=2"]
    process = torchrun(2, "name=a", "train.steps=1000000", *settings, FSDP)
    last = folder / "runs/a/checkpoints/last.pt"
    while process.poll() is None and not last.exists():
        time.sleep(0.05)
    assert process.poll() is None, process.communicate()[1]
    kill_worker(process)
    step = load("a")["step"]
    for count, parallel in ((3, FSDP), (2, "parallel=ddp")):
        step += 6
        finish(torchrun(count, "name=a", f"train.steps={step}", *settings, parallel))
    for name in "ab":
        train_in(folder, f"name={name}", *SINGLE, f"train.steps={step + 6}", *settings)
    losses = [[row.get("train/loss") for row in metrics(name)] for name in "ab"]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    assert_close_checkpoints(load("a"), load("b"))


@pytest.mark.slow
def test_gradients_in_bfloat16_are_summed_in_float32(workdir):
    settings = ["optimizer=adamw", "train.grad_clip=null", "train.steps=1", "dtype=bfloat16"]
    finish(torchrun(2, "name=a", FSDP, *settings))
    gradient = 10 * load("a")["optimizer"]["blocks.0.mlp.fc.weight"]["exp_avg"]  # beta1 is 0.9
    is_rounded = (gradient - gradient.bfloat16()).abs() <= 1e-5 * gradient.abs()
    assert is_rounded.float().mean() < 0.9
