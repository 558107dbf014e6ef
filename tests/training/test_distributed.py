"""Several processes with torchrun and gloo: they train like one, share a run, and end together."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from distributed_helpers import (
    SINGLE,
    assert_same_curve,
    find_free_port,
    finish,
    make_folder,
    torchrun,
    torchrun_on_machines,
    write_train_script,
)
from helpers import ROOT, TEXT, TINY, load, metrics, summary, train_here, wait_for_step
from run_helpers import train_in

from common.process import cpu_count
from training.runtime import Dist

RANKS = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_process_of_torchrun_knows_its_ranks(monkeypatch):
    for name, value in RANKS.items():
        monkeypatch.setenv(name, value)
    assert Dist.from_environment() == Dist(3, 4, 1, 2)
    assert not Dist.from_environment().is_main
    for name in RANKS:
        monkeypatch.delenv(name)
    assert Dist.from_environment() == Dist(0, 1, 0, 1)
    assert Dist.from_environment().is_main


def test_single_process_keeps_its_values():
    dist = Dist()
    dist.barrier()
    dist.require_equal("a", "")
    assert dist.all_reduce(1.5, True) == [1.5, True]
    assert dist.broadcast({"a": 1}) == {"a": 1}
    assert dist.all_reduce_mean(torch.tensor(2.0)).item() == 2.0


# Two machines without a shared disk, whose micro batches have different numbers of targets


@pytest.fixture(scope="module")
def machines(tmp_path_factory) -> tuple[list[Path], Path, str]:
    """Each machine prepares its own data, and gets the pretrained weights of rank 0.

    Returns the folders of both machines, the one of rank 0, with the runs "two" (of both machines)
    and "one", and what they print.
    """
    lines = []
    for n in range(99):
        row = {"prompt": "Ask " * (n % 7) + f"{n}? ", "text": f"It is {n * n}." * (n % 3)}
        lines.append(json.dumps(row))
    settings = ["train.steps=12", "data.path=rows.jsonl", "data.prompt_column=prompt"]
    folders = []
    for seed in range(2):
        folder = tmp_path_factory.mktemp(f"machine-{seed}")
        (folder / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
        train_in(folder, "name=pretrained", f"seed={seed}", *settings)
        folders.append(folder)
    settings += ["tokenizer=run", "tokenizer.run=pretrained", "train.init_from=run:pretrained"]
    processes = torchrun_on_machines(folders, "name=two", "train.micro_batch_size=2", *settings)
    printed = "".join([finish(process) for process in processes])
    (main,) = [folder for folder in folders if (folder / "runs/two").exists()]
    train_in(main, "name=one", *SINGLE, *settings)
    return folders, main, printed


@pytest.mark.slow
def test_two_processes_train_like_one(machines, monkeypatch):
    monkeypatch.chdir(machines[1])
    assert_same_curve(metrics("one"), metrics("two"))
    one, two = load("one"), load("two")
    for key in ("model", "optimizer"):
        assert list(two[key]) == list(one[key])
    assert two["identity"] == one["identity"]
    assert (summary("two")["world_size"], summary("two")["accumulation"]) == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("line", ["preparing text", "step 12: validation loss", "best validation"])
def test_only_rank_0_prints(machines, line):
    assert machines[2].count(line) == 1


@pytest.mark.slow
def test_machines_prepare_the_same_data(machines):
    a, b = machines[0]
    names = [{path.name for path in folder.glob("data/prepared/*-*")} for folder in (a, b)]
    assert names[0] == names[1]


@pytest.mark.slow
def test_machines_with_different_data_are_refused_with_one_message(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for repeats, folder in enumerate(folders, 1):
        folder.mkdir()
        (folder / "text.txt").write_text(TEXT * repeats, encoding="utf-8")
    processes = torchrun_on_machines(folders, "name=a")
    errors = [process.communicate(timeout=600)[1] for process in processes]
    data = r"data/prepared/text-\w+"
    refusal = f"rank 1 has {data}, but rank 0 has {data}; copy the text"
    assert max(len(re.findall(refusal, error)) for error in errors) == 1, errors
    assert not list(tmp_path.glob("*/runs"))


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
    tolerance = 1e-5 if dtype == "float32" else 1e-2
    for one, two in zip(metrics("one"), metrics("two"), strict=True):
        assert one.get("train/loss") == pytest.approx(two.get("train/loss"), abs=tolerance)


# A process that fails

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
def test_failing_rank_ends_the_others_and_its_error_is_the_first_one(tmp_path_factory, monkeypatch):
    folder = make_folder(tmp_path_factory, "crashed")
    script = write_train_script(folder, CRASH_ON_RANK_1)
    process = torchrun(2, "name=a", "train.steps=100000", script=script, cwd=folder)
    _, err = process.communicate(timeout=600)
    assert process.returncode == 1
    errors = re.findall(r"\w+Error: .*", err)
    assert errors[0] == "ZeroDivisionError: what went wrong on this rank"
    monkeypatch.chdir(folder)
    assert summary("a")["status"] == "failed"


# Processes that are interrupted

SLOW_SAVE = """
import atexit
from training import checkpoint
atexit.register(lambda: Path(f"rank{os.environ['RANK']}_left").touch())
save = checkpoint.save_checkpoint
def slow_save(path, content):
    time.sleep(1.5)
    save(path, content)
checkpoint.save_checkpoint = slow_save
"""


@pytest.mark.slow
def test_interrupted_processes_stop_at_the_same_step_and_end_after_rank_0_has_saved(
    tmp_path_factory, monkeypatch
):
    """Saving takes longer than a second.

    Otherwise, torchrun would kill rank 0 half a minute later, while it might still be saving.
    """
    folder = make_folder(tmp_path_factory, "interrupted")
    monkeypatch.chdir(folder)
    script = write_train_script(folder, SLOW_SAVE)
    settings = ["train.steps=100000", "eval.every=100000", "checkpoint.every=100000"]
    process = torchrun(2, "name=a", *settings, script=script)
    wait_for_step("a", 20, process)
    process.send_signal(signal.SIGTERM)  # torchrun forwards it to its workers
    err = process.communicate(timeout=600)[1]
    assert summary("a")["status"] == "interrupted", err
    assert load("a")["step"] == metrics("a")[-1]["step"] == summary("a")["step"] > 20
    assert err.count("saved at step") == 1
    left = (folder / "rank1_left").stat().st_mtime
    assert left >= (folder / "runs/a/checkpoints/last.pt").stat().st_mtime
    assert summary("a")["threads"] == max(1, cpu_count() // 2)


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_rank_that_waits_for_the_start_of_the_others_ends_after_a_signal(workdir, signum):
    port = find_free_port()
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    command = [sys.executable, ROOT / "train.py", *TINY, "name=a"]
    process = subprocess.Popen(command, env=os.environ | variables, stderr=subprocess.PIPE)
    while process.poll() is None and not is_open(port):
        time.sleep(0.05)
    process.send_signal(signum)
    _, err = process.communicate()
    assert (process.returncode, err) == (75, b"train.py: interrupted\n")


def is_open(port: str) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("localhost", int(port))) == 0


# A job of SLURM

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
JOB_WORDS = [*SINGLE, "train.steps=18", "eval.every=100", "checkpoint.every=100"]


def send_to_job(folder: Path, signum: int) -> None:
    """Send a signal to the processes of srun, as SLURM does."""
    for variables in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):  # a process of another user, or one that has ended
            if f"SLURM_STEP_ID={folder}\0".encode() in variables.read_bytes():
                os.kill(int(variables.parent.name), signum)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_slurm_job_saves_after_its_warning_signal_and_is_requeued_once(
    tmp_path_factory, monkeypatch
):
    """It gets the signal at step 10, and ends with the losses of an uninterrupted run."""
    folder = make_folder(tmp_path_factory, "job")
    monkeypatch.chdir(folder)
    write_train_script(folder, PAUSE_AT_STEP_10).rename(folder / "train.py")
    for name, content in (("srun", SRUN), ("scontrol", SCONTROL)):
        (folder / name).write_text(content, encoding="utf-8")
        (folder / name).chmod(0o755)
    programs = [str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]
    slurm = {
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "1",
        "SLURM_JOB_ID": "123456",
        "PATH": os.pathsep.join(programs),
    }
    options = {
        "env": os.environ | slurm,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    command = ["bash", str(ROOT / "docs/train.sbatch"), *TINY, *JOB_WORDS, "name=a"]
    process = subprocess.Popen(command, **options)
    waiting = [folder / f"rank{rank}_waits" for rank in (0, 1)]
    while process.poll() is None and not all(path.exists() for path in waiting):
        time.sleep(0.05)
    send_to_job(folder, signal.SIGUSR1)
    (folder / "signaled").touch()
    _, err = process.communicate(timeout=600)
    assert (folder / "runs/a/summary.json").exists(), err
    assert (summary("a")["status"], summary("a")["step"]) == ("interrupted", 10)
    printed = finish(subprocess.Popen(command, **options))
    assert "resumed from step 10" in printed
    assert (folder / "requeued").read_text(encoding="utf-8") == "requeue 123456\n"
    assert train_here(*JOB_WORDS, "name=b") == 0
    assert_same_curve(metrics("a"), metrics("b"))
