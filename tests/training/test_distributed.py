"""Several processes with torchrun and gloo: they train like one, share a run, and end together."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import chdir, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from distributed_helpers import (
    SINGLE,
    assert_same_curve,
    finish,
    make_folder,
    torchrun,
    torchrun_on_machines,
    write_train_script,
)
from helpers import ROOT, TEXT, TINY, load, metrics, summary, train_here, wait_for_step
from run_helpers import train_in

from training.run_folder import RunFolder
from training.runtime import Dist

RANKS = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def test_process_without_torchrun_is_alone(monkeypatch):
    for name in RANKS:
        monkeypatch.delenv(name, raising=False)
    assert Dist.from_environment() == Dist(0, 1, 0, 1)


def test_process_of_torchrun_knows_its_ranks(monkeypatch):
    for name, value in RANKS.items():
        monkeypatch.setenv(name, value)
    assert Dist.from_environment() == Dist(3, 4, 1, 2)


@pytest.mark.parametrize(("rank", "expected"), [(0, True), (1, False)])
def test_rank_0_is_the_main_process(rank, expected):
    assert Dist(rank=rank, world_size=2).is_main is expected


def test_single_process_keeps_its_values():
    dist = Dist()
    dist.barrier()
    dist.require_equal("a", "")
    assert dist.all_reduce(1.5, True) == [1.5, True]
    assert dist.broadcast({"a": 1}) == {"a": 1}
    assert dist.all_reduce_mean(torch.tensor(2.0)).item() == 2.0


# Two machines without a shared disk, whose micro batches have different numbers of targets


@dataclass
class Machines:
    folders: list[Path]
    main: Path  # folder of rank 0, with the runs "two" (of both machines) and "one"
    printed: str


@pytest.fixture(scope="module")
def machines(tmp_path_factory) -> Machines:
    """Each machine prepares its own data, and gets the pretrained weights of rank 0."""
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
    return Machines(folders, main, printed)


@pytest.mark.slow
def test_two_processes_train_like_one(machines):
    with chdir(machines.main):
        assert_same_curve(metrics("one"), metrics("two"))


@pytest.mark.slow
@pytest.mark.parametrize("key", ["model", "optimizer"])
def test_checkpoint_of_two_processes_has_the_names_of_one(machines, key):
    with chdir(machines.main):
        assert list(load("two")[key]) == list(load("one")[key])


@pytest.mark.slow
def test_identity_of_a_run_does_not_depend_on_the_number_of_processes(machines):
    with chdir(machines.main):
        assert load("two")["identity"] == load("one")["identity"]


@pytest.mark.slow
def test_summary_has_the_number_of_processes_and_their_micro_batches(machines):
    with chdir(machines.main):
        recorded = summary("two")
    assert (recorded["world_size"], recorded["accumulation"]) == (2, 2)


@pytest.mark.slow
@pytest.mark.parametrize("line", ["preparing text", "step 12: validation loss", "best validation"])
def test_only_rank_0_prints(machines, line):
    assert machines.printed.count(line) == 1


@pytest.mark.slow
def test_machines_prepare_the_same_data(machines):
    names = [
        {path.name for path in folder.glob("data/prepared/*-*")} for folder in machines.folders
    ]
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


@pytest.mark.slow
def test_run_in_use_by_another_process_is_refused_with_one_message(workdir):
    with RunFolder("a", "", True, Dist()):
        _, err = torchrun(2, "name=a").communicate(timeout=600)
    refusal = "runs/a is being trained by another process; wait, or set another name"
    assert err.count(refusal) == 1
    assert err.count("Traceback") == 1  # of torchrun


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


@pytest.fixture(scope="module")
def crashed(tmp_path_factory) -> tuple[Path, int, str]:
    """Folder, exit code and stderr of a run of which rank 1 has failed."""
    folder = make_folder(tmp_path_factory, "crashed")
    script = write_train_script(folder, CRASH_ON_RANK_1)
    process = torchrun(2, "name=a", "train.steps=100000", script=script, cwd=folder)
    _, err = process.communicate(timeout=600)
    return folder, process.returncode, err


@pytest.mark.slow
def test_failing_rank_ends_the_others(crashed):
    folder, code, _ = crashed
    assert code == 1
    with chdir(folder):
        assert summary("a")["status"] == "failed"


@pytest.mark.slow
def test_error_of_the_failing_rank_is_the_first_one(crashed):
    errors = re.findall(r"\w+Error: .*", crashed[2])
    assert errors[0] == "ZeroDivisionError: what went wrong on this rank"


# Processes that are interrupted

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


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> tuple[Path, str]:
    """Folder and stderr of two processes that got SIGTERM. Saving takes longer than a second."""
    folder = make_folder(tmp_path_factory, "interrupted")
    script = write_train_script(folder, SLOW_SAVE)
    settings = ["train.steps=100000", "eval.every=100000", "checkpoint.every=100000"]
    with chdir(folder):
        process = torchrun(2, "name=a", *settings, script=script)
        wait_for_step("a", 20, process)
    process.send_signal(signal.SIGTERM)  # torchrun forwards it to its workers
    return folder, process.communicate(timeout=600)[1]


@pytest.mark.slow
def test_interrupted_processes_stop_at_the_same_step_which_is_saved(interrupted):
    folder, err = interrupted
    with chdir(folder):
        assert summary("a")["status"] == "interrupted", err
        assert load("a")["step"] == metrics("a")[-1]["step"] == summary("a")["step"] > 20


@pytest.mark.slow
def test_rank_0_says_where_it_has_saved(interrupted):
    assert interrupted[1].count("saved at step") == 1


@pytest.mark.slow
def test_later_ranks_end_after_rank_0_has_saved(interrupted):
    """Otherwise, torchrun would kill rank 0 half a minute later, while it might still be saving."""
    folder, _ = interrupted
    left = (folder / "rank1_left").stat().st_mtime
    assert left >= (folder / "runs/a/checkpoints/last.pt").stat().st_mtime


@pytest.mark.slow
def test_processes_of_a_machine_share_its_cores(interrupted):
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count()
    with chdir(interrupted[0]):
        assert summary("a")["threads"] == max(1, cores // 2)


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


@dataclass
class Job:
    """A job that got the warning signal at step 10, and the job that continued."""

    folder: Path
    first: dict  # summary.json after the first job
    requeued: str  # what the first job told SLURM
    printed: str  # by the second job


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Job:
    folder = make_folder(tmp_path_factory, "job")
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
        "cwd": folder,
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
    with chdir(folder):
        assert (folder / "runs/a/summary.json").exists(), err
        first = summary("a")
    requeued = (folder / "requeued").read_text(encoding="utf-8")
    printed = finish(subprocess.Popen(command, **options))
    return Job(folder, first, requeued, printed)


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.slow
@on_linux
def test_slurm_job_saves_after_its_warning_signal(job):
    assert (job.first["status"], job.first["step"]) == ("interrupted", 10)


@pytest.mark.slow
@on_linux
def test_slurm_job_is_requeued_once_after_its_warning_signal(job):
    assert job.requeued == "requeue 123456\n"


@pytest.mark.slow
@on_linux
def test_requeued_slurm_job_continues_and_is_not_requeued_again(job):
    assert "resumed from step 10" in job.printed
    assert (job.folder / "requeued").read_text(encoding="utf-8") == job.requeued


@pytest.mark.slow
@on_linux
def test_requeued_slurm_job_has_the_losses_of_an_uninterrupted_run(job):
    with chdir(job.folder):
        assert train_here(*JOB_WORDS, "name=b") == 0
        assert_same_curve(metrics("a"), metrics("b"))
