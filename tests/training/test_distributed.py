"""Several processes with torchrun and gloo: they get the losses of one process, share a run folder and end together."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import chdir, suppress
from pathlib import Path

import pytest
import torch
from distributed_helpers import (
    SINGLE,
    assert_same_curve,
    finish,
    torchrun,
    torchrun_on_machines,
    write_train_script,
)
from helpers import ROOT, TEXT, TINY, load, metrics, summary, wait_for_step

from training.distributed import Dist
from training.run_folder import RunFolder


@pytest.mark.slow
def test_two_processes_train_like_one(train, workdir):
    """Also without a shared disk, and if their micro batches have different numbers of targets.

    Each machine prepares its own data, and gets the pretrained weights of rank 0.
    """
    rows = [
        {"prompt": "Ask " * (n % 7) + f"{n}? ", "text": f"It is {n * n}." * (n % 3)}
        for n in range(99)
    ]
    settings = ["train.steps=12", "data.path=rows.jsonl", "data.prompt_column=prompt"]
    machines = [workdir / "a", workdir / "b"]
    for seed, machine in enumerate(machines):
        machine.mkdir()
        (machine / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
        with chdir(machine):
            assert train("name=pretrained", f"seed={seed}", *settings) == 0
    settings += ["tokenizer=run", "tokenizer.run=pretrained", "train.init_from=run:pretrained"]
    processes = torchrun_on_machines(machines, "name=two", "train.micro_batch_size=2", *settings)
    out = "".join(map(finish, processes))
    assert out.count("preparing text") == 1
    assert out.count("step 12: validation loss") == 1
    a, b = ({path.name for path in machine.glob("data/prepared/*-*")} for machine in machines)
    assert a == b
    (main,) = [machine for machine in machines if (machine / "runs/two").exists()]
    with chdir(main):
        assert train("name=one", *SINGLE, *settings) == 0
        assert_same_curve(metrics("one"), metrics("two"))
        one, two = load("one"), load("two")
        assert list(one["model"]) == list(two["model"])
        assert list(one["optimizer"]) == list(two["optimizer"])
        assert one["identity"] == two["identity"]
        assert (summary("two")["world_size"], summary("two")["accumulation"]) == (2, 2)


@pytest.mark.slow
def test_machines_with_different_data_are_refused_with_one_message(workdir):
    machines = [workdir / "a", workdir / "b"]
    for repeats, machine in enumerate(machines, 1):
        machine.mkdir()
        (machine / "text.txt").write_text(TEXT * repeats, encoding="utf-8")
    errors = [
        process.communicate(timeout=600)[1] for process in torchrun_on_machines(machines, "name=a")
    ]
    refusal = (
        r"rank 1 has data/prepared/text-\w+, but rank 0 has data/prepared/text-\w+; copy the text"
    )
    assert max(len(re.findall(refusal, error)) for error in errors) == 1 and not list(
        workdir.glob("*/runs")
    ), errors


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "parallel"), [("float32", "ddp"), ("float16", "ddp"), ("float32", "fsdp")]
)
def test_two_gpus_train_like_one(train, workdir, dtype, parallel):
    if torch.cuda.device_count() < 2:
        pytest.skip("NOT RUN: needs two CUDA devices")
    settings = ["device=cuda", f"dtype={dtype}", "train.steps=12"]
    finish(torchrun(2, "name=two", f"parallel={parallel}", *settings))
    assert train("name=one", *SINGLE, *settings) == 0
    for one, two in zip(metrics("one"), metrics("two"), strict=True):
        assert one.get("train/loss") == pytest.approx(
            two.get("train/loss"), abs=1e-5 if dtype == "float32" else 1e-2
        )


@pytest.mark.slow
def test_run_in_use_by_another_process_is_refused_with_one_message(workdir):
    with RunFolder("a", "", True, Dist()):
        _, err = torchrun(2, "name=a").communicate(timeout=600)
    refusal = "runs/a is being trained by another process; wait, or set another name"
    assert err.count(refusal) == 1
    assert err.count("Traceback") == 1  # of torchrun


CRASH_ON_RANK_1 = """
from training import speed
start, steps = speed.Speed.start_step, []
def crash(self):
    steps.append(1)
    if os.environ["RANK"] == "1" and len(steps) == 20:
        raise ZeroDivisionError("what went wrong on this rank")
    start(self)
speed.Speed.start_step = crash
"""


@pytest.mark.slow
def test_failing_rank_ends_the_others_and_its_error_is_shown(workdir):
    process = torchrun(
        2, "name=a", "train.steps=100000", script=write_train_script(CRASH_ON_RANK_1)
    )
    _, err = process.communicate(timeout=600)
    assert process.returncode == 1
    assert re.findall(r"\w+Error: .*", err)[0] == "ZeroDivisionError: what went wrong on this rank"
    assert summary("a")["status"] == "failed"


SLOW_SAVE = """
from training import checkpoint
leave = os._exit
def record_and_leave(code):
    Path(f"rank{os.environ['RANK']}_left").touch()
    leave(code)
os._exit = record_and_leave
save = checkpoint.save_checkpoint
def slow_save(path, content):
    time.sleep(1.5)
    save(path, content)
checkpoint.save_checkpoint = slow_save
"""


@pytest.mark.slow
def test_interrupted_processes_stop_at_the_same_step_and_rank_0_saves(train, workdir):
    """Also if saving is slow."""
    settings = ["train.steps=100000", "eval.every=100000", "checkpoint.every=100000"]
    process = torchrun(2, "name=a", *settings, script=write_train_script(SLOW_SAVE))
    wait_for_step("a", 20, process)
    process.send_signal(signal.SIGTERM)  # torchrun forwards it to its workers
    _, err = process.communicate(timeout=600)
    recorded = summary("a")
    assert recorded["status"] == "interrupted", err
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    assert recorded["threads"] == max(1, cores // 2)
    assert err.count("saved at step") == 1
    # If rank 1 ended first, torchrun would kill rank 0 half a minute later, while it might still be saving.
    assert (workdir / "rank1_left").stat().st_mtime >= (
        workdir / "runs/a/checkpoints/last.pt"
    ).stat().st_mtime
    assert load("a")["step"] == recorded["step"] == metrics("a")[-1]["step"] > 20


PAUSE_AT_STEP_10 = """
from training import speed
cores = sorted(os.sched_getaffinity(0))  # each "node" has one
os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
start, steps = speed.Speed.start_step, []
def pause(self):
    steps.append(1)
    if len(steps) == 10:
        Path(f"rank{os.environ['RANK']}_waits").touch()
        while not Path("signaled").exists():
            time.sleep(0.01)
    start(self)
speed.Speed.start_step = pause
"""
# Stand-ins for the commands of SLURM. Both "nodes" are this machine.
SRUN = """#!/bin/bash
export SLURM_STEP_ID=$PWD
"$@" & first=$!
"$@" & wait $!; wait $first  # as srun does, also if one has failed
"""
SCONTROL = """#!/bin/bash
if [ $1 = show ]; then echo localhost; echo localhost; else echo "$*" >> requeued; fi
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_slurm_job_is_requeued_after_its_warning_signal_and_continues(train, workdir):
    write_train_script(PAUSE_AT_STEP_10).rename(workdir / "train.py")
    for name, content in (("srun", SRUN), ("scontrol", SCONTROL)):
        (workdir / name).write_text(content, encoding="utf-8")
        (workdir / name).chmod(0o755)
    words = [*TINY, *SINGLE, "train.steps=18", "eval.every=100", "checkpoint.every=100"]
    command = ["bash", str(ROOT / "docs/train.sbatch"), *words, "name=a"]
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1"}
    slurm |= {"SLURM_JOB_ID": str(os.getpid())}
    path = os.pathsep.join([str(workdir), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | slurm | {"PATH": path}
    job = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    while job.poll() is None and not all(
        (workdir / f"rank{rank}_waits").exists() for rank in (0, 1)
    ):
        time.sleep(0.05)
    for variables in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # a process of another user, or one that has ended
            if f"SLURM_STEP_ID={workdir}\0".encode() in variables.read_bytes():
                os.kill(int(variables.parent.name), signal.SIGUSR1)
    (workdir / "signaled").touch()
    _, err = job.communicate(timeout=600)
    assert (summary("a")["status"], summary("a")["step"]) == ("interrupted", 10), err
    assert (workdir / "requeued").read_text(encoding="utf-8") == f"requeue {os.getpid()}\n"

    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert again.returncode == 0, again.stderr
    assert "resumed from step 10" in again.stdout
    assert (workdir / "requeued").read_text(encoding="utf-8").count("requeue") == 1
    assert train(*words[len(TINY) :], "name=b") == 0
    assert_same_curve(metrics("a"), metrics("b"))
