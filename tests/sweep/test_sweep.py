"""Sweeps with real processes: killed, refused and interrupted jobs, and a failing launcher."""

import csv
import os
import re
import subprocess
import sys
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT, TEXT, TINY, metrics, summary, train_here, untimed
from wandb_helpers import read_offline_runs

LONG = ["name=s", "train.steps=60", "eval.every=60", "checkpoint.every=20", "train.batch_size=2"]
TIMEOUT_S = 600
# Python imports this module at start-up. In the job that $SIGNAL_JOB names, it signals a process
# when the checkpoint of step 40 is about to be saved: the job itself with SIGKILL, the sweep with
# SIGINT, as Ctrl-C on a terminal does, or the process of submitit with SIGUSR2, as SLURM does
# before a time limit.
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


def start_sweep(*words: str, **environment: str) -> SimpleNamespace:
    """Run a sweep in the current folder. Returns its exit code, out and err."""
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", "-m", *TINY, *words],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
        start_new_session=True,
        timeout=TIMEOUT_S,
        capture_output=True,
        text=True,
    )
    return SimpleNamespace(code=done.returncode, out=done.stdout, err=done.stderr)


def make_folder(tmp_path_factory) -> Path:
    """A folder with text.txt, and a folder of modules with SITECUSTOMIZE."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    (folder / "site").mkdir()
    (folder / "site/sitecustomize.py").write_text(SITECUSTOMIZE, encoding="utf-8")
    return folder


def read_comparison() -> list[dict]:
    with open("runs/sweeps/s/comparison.csv", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_log(job: str) -> str:
    return Path(f"runs/sweeps/s/{job}/train.log").read_text(encoding="utf-8")


def list_times(folder: str) -> dict[Path, float]:
    """When each file of a folder was written."""
    return {path: path.stat().st_mtime for path in Path(folder).rglob("*")}


# A sweep that is killed, interrupted, extended and finished


@pytest.fixture(scope="module")
def stopped_sweep_once(tmp_path_factory) -> SimpleNamespace:
    """Three commands of a sweep: seed=1 is killed, then seed=3 is interrupted, then all finish."""
    folder = make_folder(tmp_path_factory)
    site = {"PYTHONPATH": str(folder / "site")}
    with chdir(folder):
        killed = start_sweep(*LONG, "seed=1,2", SIGNAL_JOB="seed=1", SIGNAL="SIGKILL", **site)
        killed.statuses = [summary(f"sweeps/s/seed={n}")["status"] for n in (1, 2)]
        times = list_times("runs/sweeps/s/seed=2")
        stop = {"SIGNAL_JOB": "seed=3", "SIGNAL": "SIGINT"}
        interrupted = start_sweep(*LONG, "seed=1,2,3", **stop, **site)
        interrupted.statuses = [summary(f"sweeps/s/seed={n}")["status"] for n in (1, 2, 3)]
        interrupted.step = summary("sweeps/s/seed=3")["step"]
        finished = start_sweep(*LONG, "seed=1,2,3")
    return SimpleNamespace(
        folder=folder,
        killed=killed,
        interrupted=interrupted,
        finished=finished,
        times_of_seed_2=times,
    )


@pytest.fixture
def stopped_sweep(stopped_sweep_once, monkeypatch) -> SimpleNamespace:
    monkeypatch.chdir(stopped_sweep_once.folder)
    return stopped_sweep_once


@pytest.mark.slow
def test_sweep_continues_after_a_job_is_killed(stopped_sweep):
    killed = stopped_sweep.killed
    assert killed.code == 1, killed.err
    assert "seed=1  failed: killed by SIGKILL (1 to go, " in killed.out
    assert re.search(r"seed=2 +finished: val loss \d", killed.out)
    assert killed.statuses == ["failed", "finished"]


@pytest.mark.slow
def test_interrupted_sweep_saves_its_job_and_names_itself(stopped_sweep):
    interrupted = stopped_sweep.interrupted
    assert interrupted.code == 75, interrupted.err
    assert "seed=3: stopping after this step, and saving" in interrupted.out
    assert "resume with the same command and name=s" in interrupted.err
    assert interrupted.statuses == ["finished", "finished", "interrupted"]


@pytest.mark.slow
def test_sweep_that_is_started_again_resumes_its_job(stopped_sweep):
    assert stopped_sweep.finished.code == 0, stopped_sweep.finished.err
    assert 40 <= stopped_sweep.interrupted.step < 60
    assert f"resumed from step {stopped_sweep.interrupted.step}" in read_log("seed=3")


@pytest.mark.slow
def test_sweep_that_is_started_again_does_not_touch_finished_jobs(stopped_sweep):
    assert "1 of them finished" in stopped_sweep.interrupted.out
    assert list_times("runs/sweeps/s/seed=2") == stopped_sweep.times_of_seed_2


@pytest.mark.slow
def test_sweep_writes_only_runs_and_prepared_data(stopped_sweep):
    assert {path.name for path in Path().iterdir()} == {"text.txt", "data", "runs", "site"}


@pytest.mark.slow
def test_runs_that_differ_in_the_seed_are_one_row_of_the_comparison(stopped_sweep):
    (row,) = read_comparison()
    losses = [summary(f"sweeps/s/seed={n}")["last_val_loss"] for n in (1, 2, 3)]
    assert float(row["val_loss"]) == pytest.approx(sum(losses) / 3)


@pytest.mark.slow
def test_killed_job_has_the_losses_of_a_separate_run(stopped_sweep):
    assert train_here(*LONG, "name=alone", "seed=1") == 0
    expected = untimed(metrics("alone"))[-1]
    assert untimed(metrics("sweeps/s/seed=1"))[-1] == pytest.approx(expected, abs=1e-4)


# A sweep with a backend that cannot run


REFUSING = ["name=s", "model.dropout=0.1", "wandb.mode=offline", "attention=sdpa,flash"]
REFUSAL = "attention=flash on cpu does not support dropout; set model.dropout=0"


@pytest.fixture(scope="module")
def refusing_sweep_once(tmp_path_factory) -> SimpleNamespace:
    folder = make_folder(tmp_path_factory)
    with chdir(folder):
        done = start_sweep(*REFUSING, "train.steps=3")
    done.folder = folder
    return done


@pytest.fixture
def refusing_sweep(refusing_sweep_once, monkeypatch) -> SimpleNamespace:
    monkeypatch.chdir(refusing_sweep_once.folder)
    return refusing_sweep_once


@pytest.mark.slow
def test_refused_backend_does_not_fail_the_sweep(refusing_sweep):
    assert refusing_sweep.code == 0, refusing_sweep.err
    assert f"attention=flash  refused: {REFUSAL}" in refusing_sweep.out


@pytest.mark.slow
def test_refused_backend_is_a_row_without_a_loss(refusing_sweep):
    sdpa, flash = read_comparison()
    loss = summary("sweeps/s/attention=sdpa")["last_val_loss"]
    assert sdpa["variant"] == "attention=sdpa"
    assert float(sdpa["val_loss"]) == pytest.approx(loss)
    assert flash["variant"] == "attention=flash"
    assert flash["val_loss"] == ""
    assert REFUSAL in flash["error"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["comparison.png", "sweep.json"])
def test_sweep_writes_the_comparison_into_its_folder(name, refusing_sweep):
    assert Path(f"runs/sweeps/s/{name}").exists()


@pytest.mark.slow
def test_wandb_runs_of_a_sweep_are_in_one_folder_and_in_one_group(refusing_sweep):
    """The refused run has none."""
    runs = read_offline_runs(Path("runs/sweeps/s"))
    job_types = {name: run.run["job_type"] for name, run in runs.items()}
    assert job_types == {"attention=sdpa": "train", "s comparison": "compare"}
    assert {run.run["run_group"] for run in runs.values()} == {"s"}  # also of the jobs
    assert "\nupload   wandb sync runs/sweeps/s/wandb\n" in refusing_sweep.out


@pytest.mark.slow
def test_sweep_with_the_same_name_and_other_settings_is_refused(refusing_sweep):
    times = list_times("runs")
    done = start_sweep(*REFUSING, "optimizer.lr=0.03", "train.steps=5")
    assert (done.code, done.out) == (2, "")
    assert "attention=sdpa was trained with optimizer.lr=0.01 (now 0.03)" in done.err
    assert list_times("runs") == times


# submitit


@pytest.mark.slow
def test_job_saves_a_checkpoint_before_submitit_requeues_it(train, tmp_path_factory, monkeypatch):
    submitit = pytest.importorskip("submitit")
    from sweep.jobs import Job
    from sweep.submit import RequeuedJob

    folder = make_folder(tmp_path_factory)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder / "site"), str(ROOT)]))
    monkeypatch.setenv("SIGNAL_JOB", "seed=1")
    monkeypatch.setenv("SIGNAL", "SIGUSR2")
    executor = submitit.LocalExecutor(folder / "submitit")
    executor.update_parameters(timeout_min=60)
    name = "sweeps/s/seed=1"
    words = [*TINY, *LONG[1:], f"name={name}"]
    job = Job("seed=1", folder / "runs" / name, words, {"name": name})
    task = executor.submit(RequeuedJob(), job)
    assert task.result().status == "finished", (task.stderr(), read_log("seed=1"))
    log = task.stdout()
    assert log.index("stopping after this step, and saving") < log.index("Requeued job"), log
    assert re.search(r"resumed from step (4\d|5\d)", read_log("seed=1"))
    assert train(*LONG[1:], "name=alone") == 0
    assert untimed(metrics("alone")) == untimed(metrics(name))


@pytest.mark.slow
def test_submitit_trains_jobs(workdir):
    pytest.importorskip("submitit")
    words = ["name=s", "seed=1,2", "model.dropout=0.1", "attention=sdpa,flash"]
    done = start_sweep(*words, "hydra/launcher=submitit_local")
    assert done.code == 0, done.err
    assert re.search(r"^attention=sdpa,seed=2 +finished: val loss", done.out, re.MULTILINE)
    assert [row["status"] for row in read_comparison()] == ["2 finished", "refused"]
