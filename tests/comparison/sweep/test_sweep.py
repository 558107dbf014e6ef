"""Sweeps with real processes: killed, refused and interrupted jobs, a failing launcher, and the files that remain."""

import csv
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT, TINY, metrics, summary, untimed

from common.errors import UserError
from common.files import parse_yaml, read_json, write_json
from comparison.sweep import jobs
from comparison.sweep.jobs import Job, Outcome, train_job
from comparison.sweep.launch import estimate_checkpoint_bytes, find_missing_jobs, train_jobs
from training.config import CheckpointConfig, RunConfig
from training.distributed import Dist
from training.run_folder import RunFolder

LONG = ["name=s", "train.steps=60", "eval.every=60", "checkpoint.every=20", "train.batch_size=2"]
TIMEOUT_S = 600
# Python imports this module at start-up. In the job that $SIGNAL_JOB names, it signals a process when the checkpoint of
# step 40 is about to be saved: the job itself with SIGKILL, the sweep with SIGINT, as Ctrl-C on a terminal does, or the
# process of submitit with SIGUSR2, as SLURM does before a time limit.
SITECUSTOMIZE = """
import os, signal, sys, time

def signal_at_second_checkpoint(event, arguments):
    global saved
    if event == "os.rename" and str(arguments[1]).endswith("checkpoints/last.pt"):
        saved += 1
        if saved == 2 and os.environ["SIGNAL"] == "SIGKILL":
            os.kill(os.getpid(), signal.SIGKILL)
        if saved == 2:
            received = []
            handler = signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
            if os.environ["SIGNAL"] == "SIGUSR2":
                os.kill(os.getppid(), signal.SIGUSR2)
            else:
                os.killpg(os.getppid(), signal.SIGINT)
            while not received:  # until the sweep asks the job to stop
                time.sleep(0.01)
            signal.signal(signal.SIGTERM, handler)
            os.kill(os.getpid(), signal.SIGTERM)

saved = 0
if f"name=sweeps/s/{os.environ.get('SIGNAL_JOB')}" in sys.orig_argv:
    sys.addaudithook(signal_at_second_checkpoint)
"""


def sweep(*overrides: str, code: int = 0, **environment: str) -> tuple[str, str]:
    """Run a sweep that ends with this exit code -> stdout, stderr."""
    command, environment = (
        [sys.executable, ROOT / "train.py", "-m", *TINY, *overrides],
        os.environ | environment,
    )
    options = {
        "env": environment | {"OMP_NUM_THREADS": "1"},
        "start_new_session": True,
        "timeout": TIMEOUT_S,
    }
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == code, done.stderr
    return done.stdout, done.stderr


def comparison() -> list[dict]:
    with open("runs/sweeps/s/comparison.csv", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def test_size_of_checkpoints_is_estimated():
    config = asdict(RunConfig(checkpoint=CheckpointConfig(keep=2)))
    assert estimate_checkpoint_bytes(Job("", Path(), [], config)) == 5_112_448 * 4 * (1 + 3 * 3)


@pytest.mark.slow
def test_killed_interrupted_and_extended_sweep_runs_only_missing_jobs(train, workdir):
    (workdir / "site").mkdir()
    (workdir / "site/sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
    site = str(workdir / "site")
    out, _ = sweep(
        *LONG, "seed=1,2", code=1, PYTHONPATH=site, SIGNAL_JOB="seed=1", SIGNAL="SIGKILL"
    )
    assert "seed=1  failed: killed by SIGKILL (runs/sweeps/s/seed=1/train.log)  (1 to go" in out
    assert re.search(r"seed=2 +val loss", out)
    assert (summary("sweeps/s/seed=1")["status"], summary("sweeps/s/seed=2")["status"]) == (
        "running",
        "finished",
    )
    untouched = {path: path.stat().st_mtime for path in Path("runs/sweeps/s/seed=2").rglob("*")}

    out, err = sweep(
        *LONG, "seed=1,2,3", code=75, PYTHONPATH=site, SIGNAL_JOB="seed=3", SIGNAL="SIGINT"
    )
    assert (
        "1 of them finished before" in out and "seed=3: stopping after this step, and saving" in out
    )
    assert "resume with the same command and name=s" in err
    assert (summary("sweeps/s/seed=1")["status"], summary("sweeps/s/seed=3")["status"]) == (
        "finished",
        "interrupted",
    )
    stopped = summary("sweeps/s/seed=3")["step"]
    assert 40 <= stopped < 60

    sweep(*LONG, "seed=1,2,3")
    assert f"resumed from step {stopped}" in Path("runs/sweeps/s/seed=3/train.log").read_text(
        encoding="utf-8"
    )
    assert untouched == {
        path: path.stat().st_mtime for path in Path("runs/sweeps/s/seed=2").rglob("*")
    }
    assert {path.name for path in workdir.iterdir()} == {"text.txt", "data", "runs", "site"}
    (row,) = comparison()
    losses = [summary(f"sweeps/s/seed={n}")["last_val_loss"] for n in (1, 2, 3)]
    assert float(row["val_loss"]) == pytest.approx(sum(losses) / 3)

    assert (
        train(*LONG, "name=alone", "seed=1") == 0
    )  # the killed and resumed job has the losses of this separate run
    assert untimed(metrics("alone"))[-1] == pytest.approx(
        untimed(metrics("sweeps/s/seed=1"))[-1], abs=1e-4
    )


@pytest.mark.slow
def test_job_saves_a_checkpoint_before_submitit_requeues_it(train, workdir, monkeypatch):
    submitit = pytest.importorskip("submitit")
    from comparison.sweep.submit import RequeuedJob

    (workdir / "site").mkdir()
    (workdir / "site/sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(workdir / "site"), str(ROOT)]))
    monkeypatch.setenv("SIGNAL_JOB", "seed=1")
    monkeypatch.setenv("SIGNAL", "SIGUSR2")
    executor = submitit.LocalExecutor(workdir / "submitit")
    executor.update_parameters(timeout_min=60)
    name, folder = "sweeps/s/seed=1", workdir / "runs/sweeps/s/seed=1"
    words = [*TINY, *LONG[1:], f"name={name}"]
    job = executor.submit(RequeuedJob(), Job("seed=1", folder, words, {"name": name}))
    assert job.result() == Outcome("finished"), (
        job.stderr(),
        (folder / "train.log").read_text(encoding="utf-8"),
    )
    log = job.stdout()
    assert log.index("stopping after this step, and saving") < log.index("Requeued job"), log
    assert re.search(
        r"resumed from step (4\d|5\d)", (folder / "train.log").read_text(encoding="utf-8")
    )
    assert train(*LONG[1:], "name=alone") == 0
    assert untimed(metrics("alone")) == untimed(metrics(name))


@pytest.mark.slow
def test_refused_backend_is_a_row_and_wandb_gets_the_group_and_the_comparison(workdir):
    settings = ["name=s", "model.dropout=0.1", "wandb.mode=offline", "train.steps=3"]
    out, _ = sweep(*settings, "attention=sdpa,flash")
    refusal = "attention=flash on cpu does not support dropout; set model.dropout=0, or attention=naive or sdpa"
    assert f"refused: {refusal}" in out
    rows = {row["setting"]: row for row in comparison()}
    assert list(rows) == ["attention=sdpa", "attention=flash"]
    assert refusal in rows["attention=flash"]["reason"]
    assert rows["attention=flash"]["val_loss"] == ""
    loss = summary("sweeps/s/attention=sdpa")["last_val_loss"]
    assert float(rows["attention=sdpa"]["val_loss"]) == pytest.approx(loss)
    for name in ("comparison.png", "report.html", "sweep.json"):
        assert Path(f"runs/sweeps/s/{name}").exists()
    assert "group: s\n" in Path("runs/sweeps/s/attention=sdpa/config.yaml").read_text(
        encoding="utf-8"
    )
    (file,) = Path("runs/sweeps/s").glob("wandb/offline-run-*/*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", str(file)]
    logged = subprocess.run(command, capture_output=True, text=True).stdout
    assert all(
        key in logged for key in ("comparison", "comparison_picture", "comparison_report")
    ), logged

    # A sweep with the same name and other settings is refused.
    out, err = sweep(
        *settings, "attention=sdpa,flash", "optimizer.lr=0.03", "train.steps=5", code=2
    )
    assert out == ""
    assert (
        "attention=sdpa was trained with optimizer.lr=0.01 (now 0.03); restore the old values, or set another"
        in err
    )
    assert summary("sweeps/s/attention=sdpa")["status"] == "finished"


@pytest.mark.slow
def test_submitit_trains_jobs(workdir):
    pytest.importorskip("submitit")
    out, _ = sweep(
        "name=s",
        "seed=1,2",
        "model.dropout=0.1",
        "attention=sdpa,flash",
        "hydra/launcher=submitit_local",
    )
    assert re.search(r"^attention=sdpa,seed=2 +val loss", out, re.MULTILINE), out
    assert [row["status"] for row in comparison()] == ["2 finished", "refused"]


def test_job_is_done_after_it_has_finished_with_its_config_and_a_damaged_one_is_refused(trained):
    config = parse_yaml(Path("runs/a/config.yaml").read_bytes())
    assert Job("a", Path("runs/a"), [], config).is_done()
    assert not Job(
        "a", Path("runs/a"), [], config | {"train": config["train"] | {"steps": 9}}
    ).is_done()
    Path("runs/a/config.yaml").write_text("a: [1", encoding="utf-8")
    with pytest.raises(
        UserError, match=r"runs/a/config.yaml cannot be read .*; restore it, or set another name"
    ):
        Job("a", Path("runs/a"), [], {}).check_folder()


def test_job_that_another_process_trains_fails(workdir):
    folder = workdir / "runs/sweeps/s/seed=1"
    words = [*TINY, "seed=1", "name=sweeps/s/seed=1"]
    with RunFolder("sweeps/s/seed=1", "", True, Dist()) as run:
        run.start({"name": "sweeps/s/seed=1"}, {})
        outcome = train_job(Job("seed=1", folder, words, {"name": "sweeps/s/seed=1"}))
        assert outcome.status == "failed" and "is being trained by" in outcome.reason
        assert summary("sweeps/s/seed=1")["status"] == "running"


def test_second_ctrl_c_kills_a_job_that_hangs(workdir, monkeypatch):
    hanging = "import os, signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint(os.getpid(), flush=True)\n"
    (workdir / "hanging.py").write_text(f"{hanging}time.sleep({TIMEOUT_S})\n", encoding="utf-8")
    monkeypatch.setattr(jobs, "SCRIPT", workdir / "hanging.py")
    wait = subprocess.Popen.wait

    def wait_until_interrupted(child, timeout=None):  # Ctrl-C arrives in each wait
        while not log.read_text(encoding="utf-8").endswith("\n"):
            time.sleep(0.01)
        raise KeyboardInterrupt

    job = Job("seed=1", workdir / "runs/sweeps/s/seed=1", [], {"name": "sweeps/s/seed=1"})
    log = job.folder / "train.log"
    children = []
    monkeypatch.setattr(
        subprocess.Popen,
        "wait",
        lambda child: children.append(child) or wait_until_interrupted(child),
    )
    with pytest.raises(KeyboardInterrupt):
        train_job(job)
    assert wait(children[-1]) == -signal.SIGKILL and len(children) == 2


def test_sweeps_that_are_started_together_list_all_jobs(workdir):
    sweep = Path("runs/sweeps/s")
    jobs = [[Job(f"seed={n}", sweep / f"seed={n}", [], {})] for n in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(find_missing_jobs, [sweep] * 40, jobs))
        list(pool.map(write_json, [sweep / "summary.json"] * 40, [{}] * 40))
    assert len(read_json(sweep / "sweep.json")["jobs"]) == 40


def test_ctrl_c_that_also_stops_the_reader_of_the_output_stops_the_job(workdir, monkeypatch):
    """As in `train.py -m ... | tee log`."""
    events = []

    def wait():
        events.append("wait")
        if len(events) == 1:
            raise KeyboardInterrupt

    def fail_to_print(*_, **__):
        raise BrokenPipeError

    child = SimpleNamespace(
        wait=wait, terminate=lambda: events.append("terminate"), kill=lambda: None
    )
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: child)
    monkeypatch.setattr("builtins.print", fail_to_print)
    with pytest.raises(KeyboardInterrupt):
        train_job(Job("seed=1", Path("runs/sweeps/s/seed=1"), [], {}))
    assert events == ["wait", "terminate", "wait"]


def test_sweep_names_each_run_and_its_log_when_it_starts(workdir, monkeypatch, capsys):
    printed = []

    def start(*_, **__):
        printed.append(capsys.readouterr().out)
        raise ZeroDivisionError

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(ZeroDivisionError):
        train_jobs([Job("seed=1", Path("runs/sweeps/s/seed=1"), [], {})])
    assert printed == ["seed=1  started, with its output in runs/sweeps/s/seed=1/train.log\n"]


def test_sweep_under_torchrun_is_refused(workdir):
    _, err = sweep("seed=1,2", code=2, RANK="0", WORLD_SIZE="2")
    assert "-m starts one process per run and does not work under torchrun" in err
    assert not Path("runs").exists()
