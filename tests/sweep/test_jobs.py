"""Jobs of a sweep: which are done, how they end, and what stops them."""

import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from helpers import TINY, summary

from common.errors import UserError
from common.files import write_json
from sweep import jobs
from sweep.jobs import Job, record_outcome, train_job
from training.run_folder import write_config

NAME = "sweeps/s/seed=1"


def make_job(**changed) -> Job:
    config = {"name": NAME, "train": {"steps": 6}, "wandb": {"group": "s"}} | changed
    return Job("seed=1", Path("runs") / NAME, [*TINY, "seed=1", f"name={NAME}"], config)


def write_run(status: str = "finished", **changed) -> None:
    """Write the folder of a run of make_job."""
    job = make_job(**changed)
    (job.folder / "checkpoints").mkdir(parents=True)
    (job.folder / "checkpoints/last.pt").touch()
    write_config(job.folder, job.config)
    write_json(job.folder / "summary.json", {"status": status})


# Which jobs are done


def test_job_is_done_after_its_run_has_finished(trained):
    config = yaml.safe_load(Path("runs/a/config.yaml").read_bytes())
    assert Job("a", Path("runs/a"), [], config).is_done()


@pytest.mark.parametrize("status", ["running", "failed", "interrupted", "refused"])
def test_job_is_not_done_after_another_status(status, workdir):
    write_run(status)
    assert not make_job().is_done()


def test_job_is_not_done_before_its_run_has_started(workdir):
    assert not make_job().is_done()


def test_job_is_not_done_if_its_run_has_another_length(workdir):
    write_run()
    job = make_job(train={"steps": 9})
    job.check_folder()  # can be continued
    assert not job.is_done()


@pytest.mark.parametrize("change", [{"wandb": {"mode": "offline"}}, {"checkpoint": {"every": 9}}])
def test_job_is_done_if_its_run_was_logged_or_saved_in_another_way(change, workdir):
    write_run(wandb={"mode": "disabled"}, checkpoint={"every": 2})
    assert make_job(**change).is_done()


@pytest.mark.parametrize(("lr", "is_done"), [(0.1, True), (0.2, False)])
def test_job_whose_checkpoints_were_deleted_is_done_unless_its_settings_differ(
    lr, is_done, workdir
):
    write_run(optimizer={"lr": 0.1})
    Path("runs", NAME, "checkpoints/last.pt").unlink()
    assert make_job(optimizer={"lr": lr}).is_done() == is_done


def test_folder_of_a_run_with_another_setting_is_refused(workdir):
    write_run(seed=1)
    with pytest.raises(
        UserError, match=r"seed=1 \(now 2\); restore the old values, or set another"
    ):
        make_job(seed=2).check_folder()


@pytest.mark.parametrize("change", [{"wandb": {"group": "t"}}, {"checkpoint": {"keep": 2}}])
def test_folder_of_a_run_with_another_way_to_save_is_accepted(change, workdir):
    write_run(checkpoint={"keep": 0})
    make_job(**change).check_folder()


def test_folder_without_a_checkpoint_is_accepted(workdir):
    write_run(seed=1)
    Path("runs", NAME, "checkpoints/last.pt").unlink()
    make_job(seed=2).check_folder()


def test_damaged_config_of_a_run_is_refused(workdir):
    write_run()
    Path("runs", NAME, "config.yaml").write_text("a: [1", encoding="utf-8")
    with pytest.raises(UserError, match=r"config.yaml cannot be read .*; restore it"):
        make_job().check_folder()


# How jobs end


@pytest.mark.parametrize(
    ("exit_code", "log", "status", "details"),
    [
        (1, "Traceback\nKeyError: 'a'\n", "failed", "KeyError: 'a'"),
        (1, "", "failed", "exit code 1"),
        (2, "train.py: set another value\n", "refused", "set another value"),
        (75, "stopped\n", "interrupted", "stopped"),
        (-9, "step 3\n", "failed", "killed by SIGKILL"),
    ],
    ids=["bug", "no output", "refused", "interrupted", "killed"],
)
def test_job_whose_run_has_not_started_gets_a_summary(exit_code, log, status, details, workdir):
    job = make_job()
    job.folder.mkdir(parents=True)
    (job.folder / "train.log").write_text(log, encoding="utf-8")
    assert record_outcome(job, exit_code) == (status, details)
    assert summary(NAME) == {"name": NAME, "status": status, "error": details}
    assert (job.folder / "config.yaml").exists()


def test_job_that_is_refused_for_another_reason_gets_a_new_summary(workdir):
    write_run("refused")
    (make_job().folder / "train.log").write_text("train.py: now this", encoding="utf-8")
    assert record_outcome(make_job(), 2) == ("refused", "now this")
    assert summary(NAME)["error"] == "now this"


def test_job_whose_run_has_started_keeps_its_summary(workdir):
    write_run("failed")
    (make_job().folder / "train.log").write_text("train.py: out of memory", encoding="utf-8")
    assert record_outcome(make_job(), 1) == ("failed", "out of memory")
    assert summary(NAME) == {"status": "failed"}


def test_job_whose_run_was_killed_has_failed(workdir):
    write_run("running")
    assert record_outcome(make_job(), -9) == ("failed", "killed by SIGKILL")
    assert summary(NAME) == {"status": "failed", "error": "killed by SIGKILL"}


def test_outcome_of_a_finished_job_has_its_loss(workdir):
    write_run()
    write_json(make_job().folder / "summary.json", {"last_val_loss": 2.34567})
    assert record_outcome(make_job(), 0) == ("finished", "val loss 2.3457")


def test_job_that_another_process_trains_fails(workdir):
    write_run("running")
    message = "the run is being trained by another process"
    (make_job().folder / "train.log").write_text(f"train.py: {message}", encoding="utf-8")
    assert record_outcome(make_job(), 2) == ("failed", message)
    assert summary(NAME) == {"status": "running"}


# What stops jobs


HANGING = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(os.getpid(), flush=True)
time.sleep(600)
"""


def test_second_ctrl_c_kills_a_job_that_hangs(workdir, monkeypatch):
    (workdir / "hanging.py").write_text(HANGING, encoding="utf-8")
    monkeypatch.setattr(jobs, "SCRIPT", workdir / "hanging.py")
    log = make_job().folder / "train.log"
    wait = subprocess.Popen.wait
    children = []

    def interrupt_wait(child, timeout=None):
        """Ctrl-C arrives in each wait, after the job has started."""
        children.append(child)
        while not log.read_text(encoding="utf-8").endswith("\n"):
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupt_wait)
    with pytest.raises(KeyboardInterrupt):
        train_job(make_job())
    assert len(children) == 2
    assert wait(children[-1]) == -signal.SIGKILL


def test_ctrl_c_that_also_stops_the_reader_of_the_output_stops_the_job(workdir, monkeypatch):
    """As in `train.py -m ... | tee log`."""
    events = []

    def wait():
        events.append("wait")
        if len(events) == 1:
            raise KeyboardInterrupt

    def terminate():
        events.append("terminate")

    def kill():
        """The job has ended."""

    def start(*_, **__):
        return SimpleNamespace(wait=wait, terminate=terminate, kill=kill)

    def fail_to_print(*_, **__):
        raise BrokenPipeError

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr("builtins.print", fail_to_print)
    with pytest.raises(KeyboardInterrupt):
        train_job(make_job())
    assert events == ["wait", "terminate", "wait"]
