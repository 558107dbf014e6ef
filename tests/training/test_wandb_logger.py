"""wandb: starting, resuming, failing, stalling and finishing a run."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb
from helpers import ROOT, TINY, metrics, summary
from matplotlib.figure import Figure

from common.run_dir import EXIT_CODES
from training import wandb_logger
from training.config import WandbConfig
from training.wandb_logger import WandbRun, log_table_to_wandb

CONFIG = WandbConfig(mode="online", project="p", entity=None, group=None, tags=[])


@pytest.fixture
def calls(monkeypatch):
    """The calls that wandb receives."""
    calls = []
    run = SimpleNamespace(
        define_metric=lambda *_, **__: None,
        summary=SimpleNamespace(update=calls.append),
        log=calls.append,
        finish=lambda code: calls.append({"exit_code": code}),
    )
    monkeypatch.setattr(wandb, "init", lambda **given: calls.append({k: given[k] for k in ("id", "resume")}) or run)
    return calls


def wandb_run(folder, run_id=None, is_main=True):
    run = SimpleNamespace(is_main=is_main, name="a", folder=folder, summary={"attention": {}})
    return WandbRun(CONFIG, run, {"attention": {}}, run_id)


def test_new_run_gets_an_id_and_all_rows(tmp_path, calls):
    run = wandb_run(tmp_path)
    assert run.id and not calls
    run.log([{"step": 0}, {"step": 1}])
    run.finish(1)
    assert calls == [{"id": run.id, "resume": None}, {"step": 0}, {"step": 1}, {"exit_code": 1}]


def test_resumed_run_keeps_its_id(tmp_path, calls):
    run = wandb_run(tmp_path, run_id="before")
    run.finish(0)
    assert calls == [{"id": "before", "resume": "allow"}, {"exit_code": 0}]


def test_training_does_not_wait_for_the_start_of_wandb(tmp_path, calls, monkeypatch):
    start, init = threading.Event(), wandb.init
    monkeypatch.setattr(wandb, "init", lambda **given: start.wait() and init(**given))
    run = wandb_run(tmp_path)
    run.log([{"step": 0}])
    run.log([{"step": 1}])
    assert not calls
    start.set()
    run.finish(0)
    assert calls[1:] == [{"step": 0}, {"step": 1}, {"exit_code": 0}]


def test_interrupted_run_does_not_wait_for_wandb(tmp_path, calls, monkeypatch):
    start, init = threading.Event(), wandb.init
    monkeypatch.setattr(wandb, "init", lambda **given: start.wait() and init(**given))
    wandb_run(tmp_path).finish(EXIT_CODES["interrupted"])  # before the first row
    run = wandb_run(tmp_path)
    run.log([{"step": 0}])
    run.finish(EXIT_CODES["interrupted"])  # while wandb starts
    assert not calls
    start.set()
    run.finish(0)  # ends the thread, which would call the wandb.init of the next test


def test_summary_is_sent_when_it_changes(tmp_path, calls):
    run = wandb_run(tmp_path)
    run.set_summary({"status": "running", "best_val_loss": 2.0})
    run.finish(0)
    assert calls[1:] == [{"best_val_loss": 2.0}, {"exit_code": 0}]


def read_steps(folder) -> list[int]:
    """The steps in the wandb file of a run's folder, in order."""
    (file,) = folder.glob("run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [row["history"]["item"]["step"] for row in map(json.loads, lines) if row["type"] == "history"]


def test_resumed_offline_run_is_one_folder_with_all_steps(train):
    assert train("name=a", "wandb.mode=offline", "train.steps=3") == 0
    (first,) = Path("runs/a/wandb").glob("offline-run-*")
    shutil.copytree(first, first.with_name(f"offline-run-20260101_000000-{first.name[-8:]}"))  # a killed process
    assert read_steps(first) == [0, 1, 2, 3]
    assert train("name=a", "wandb.mode=offline", "wandb.attention_maps=true") == 0
    (second,) = Path("runs/a/wandb").glob("offline-run-*")
    assert second != first and second.name[-8:] == first.name[-8:]
    assert read_steps(second) == [0, 1, 2, 3, 4, 5, 6]


def test_earlier_folders_remain_until_the_new_one_is_complete(tmp_path, calls, monkeypatch):
    earlier = tmp_path / "wandb/offline-run-1-before"
    earlier.mkdir(parents=True)
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\n{"step": 1}\n')
    monkeypatch.setattr(CONFIG, "mode", "offline")
    run = wandb_run(tmp_path, run_id="before")
    run.log_again(path)
    path.write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n')  # the row that is logged next
    run.log([{"step": 2}])
    run._calls.put(lambda _: calls.append(earlier.exists()))
    run.finish(0)
    assert calls[1:] == [{"step": 0}, {"step": 1}, {"step": 2}, True, {"exit_code": 0}]
    assert not earlier.exists()


def test_uploaded_folder_remains_and_its_rows_are_not_logged_again(tmp_path, calls, monkeypatch, capsys):
    (tmp_path / "wandb/offline-run-1-before").mkdir(parents=True)
    (tmp_path / "wandb/offline-run-1-before/run-before.wandb.synced").touch()
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    monkeypatch.setattr(CONFIG, "mode", "offline")
    run = wandb_run(tmp_path, run_id="before")
    run.log_again(tmp_path / "metrics.jsonl")
    run.log([{"step": 1}])
    run.finish(0)
    assert calls[1:] == [{"step": 1}, {"exit_code": 0}]
    assert (tmp_path / "wandb/offline-run-1-before").exists()
    assert "was uploaded; `wandb sync" in capsys.readouterr().out


def test_other_ranks_do_not_use_wandb(tmp_path, calls):
    run = wandb_run(tmp_path, is_main=False)
    run.log([{"step": 0}])
    run.finish(0)
    assert not calls


def test_queue_of_rows_has_a_limit(tmp_path, calls, monkeypatch, capsys):
    monkeypatch.setattr(wandb_logger, "MAX_QUEUED_CALLS", 2)
    start, init = threading.Event(), wandb.init
    monkeypatch.setattr(wandb, "init", lambda **given: start.wait() and init(**given))
    run = wandb_run(tmp_path)
    run.log([{"step": 0}, {"step": 1}, {"step": 2}])
    run.log([{"step": 3}])
    assert capsys.readouterr().out.count("metrics.jsonl contains all") == 1
    start.set()
    run.finish(0)
    assert calls[1:] == [{"step": 0}, {"step": 1}, {"exit_code": 0}]


@pytest.mark.parametrize(
    ("is_stalled", "message"), [(True, "wandb did not finish within 0.01 s"), (False, "wandb: ValueError: no disk;")]
)
def test_wandb_cannot_stop_a_table(tmp_path, monkeypatch, capsys, is_stalled, message):
    end = threading.Event()

    def init(**given):
        if is_stalled:
            end.wait()
        raise ValueError("no disk\nanother line")

    monkeypatch.setattr(wandb, "init", init)
    if is_stalled:
        monkeypatch.setattr(wandb_logger, "FINISH_TIMEOUT_S", 0.01)
    log_table_to_wandb(CONFIG, "table", "a", None, [CONFIG], tmp_path / "a.png", {})
    printed = capsys.readouterr().out
    end.set()
    for thread in threading.enumerate():
        if "log_table" in thread.name:
            thread.join()  # it prints an error
    assert message in printed
    assert printed.count("\n") == 1


# Trains, and sends a signal to wandb's service process when wandb has started; or SIGTERM to the run in addition.
SIGNAL_SERVICE = """
import os, signal, subprocess, sys, threading
from pathlib import Path

class Popen(subprocess.Popen):
    def __init__(self, command, **arguments):
        super().__init__(command, **arguments)
        if "wandb-core" in command[0]:
            Path("service").write_text(str(self.pid))

subprocess.Popen = Popen
import train
from configs import cli
from training import wandb_logger

if os.environ["SIGNAL"] == "SIGSTOP":
    wandb_logger.FINISH_TIMEOUT_S = wandb_logger.INTERRUPTED_FINISH_TIMEOUT_S = cli.EXIT_HANDLERS_TIMEOUT_S = 1
signaled, log, finish = threading.Event(), wandb_logger._with_pictures, wandb_logger.WandbRun.finish

def signal_service(row):
    if not signaled.is_set():
        os.kill(int(Path("service").read_text()), getattr(signal, os.environ["SIGNAL"]))
        signaled.set()
        if "SIGTERM" in os.environ:
            os.kill(os.getpid(), signal.SIGTERM)
    return log(row)

wandb_logger._with_pictures = signal_service
wandb_logger.WandbRun.finish = lambda run, code: signaled.wait() and finish(run, code)
cli.run_process(train.main, cli.parse_config("train", ""))
"""


@pytest.mark.parametrize(
    ("settings", "changes", "code", "message"),
    [
        ({"SIGNAL": "SIGSTOP"}, [], 0, "wandb did not finish within 1 s; runs/a has all results"),
        ({"SIGNAL": "SIGKILL"}, [], 0, "continuing without wandb, runs/a has all results"),
        pytest.param(
            {"SIGNAL": "SIGSTOP", "SIGTERM": "1"},
            ["train.steps=100000"],
            75,
            "wandb did not finish within 1 s",
            marks=pytest.mark.slow,
        ),
    ],
    ids=["stalled", "killed", "stalled and interrupted"],
)
def test_run_does_not_need_the_service_process(workdir, settings, changes, code, message):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | settings
    words = [*TINY, "name=a", "wandb.mode=offline", "eval.every=100", *changes]
    try:
        with open("log", "w") as log:  # the stalled process keeps a pipe open
            command = [sys.executable, "-c", SIGNAL_SERVICE, *words]
            done = subprocess.run(command, env=environment, stdout=log, stderr=log, timeout=600)
    finally:
        with suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int(Path("service").read_text()), signal.SIGKILL)
    printed = Path("log").read_text()
    assert done.returncode == code, printed
    assert "Traceback" not in printed
    assert printed.count(message) == 1, printed
    last = summary("a")["step"]
    assert [row["step"] for row in metrics("a")] == list(range(last + 1))
    assert (last == 6) == (code == 0)
    assert Path("runs/a/checkpoints/last.pt").exists()


def test_missing_api_key_is_refused_without_a_question(workdir):
    """With a terminal, wandb would ask for a key."""
    terminal, of_process = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")} | {"NETRC": "none"}
    command = [sys.executable, ROOT / "train.py", *TINY, "wandb.mode=online"]
    done = subprocess.run(command, env=environment, stdin=of_process, stdout=of_process, stderr=of_process, timeout=600)
    printed = os.read(terminal, 10_000).decode()
    os.close(terminal)
    os.close(of_process)
    assert done.returncode == 2
    assert printed.startswith("train.py: wandb.mode=online needs an API key; run `wandb login`, or set WANDB_API_KEY")
    assert not Path("runs").exists()


def test_table_is_logged_with_a_picture_and_a_report(tmp_path, monkeypatch):
    logged = []
    run = nullcontext(SimpleNamespace(log=logged.append))
    monkeypatch.setattr(wandb, "init", lambda **_: run)
    picture, report = tmp_path / "a.png", tmp_path / "report.html"
    Figure().savefig(picture)
    report.write_text("<p>a report</p>")
    for page in (None, report):
        log_table_to_wandb(CONFIG, "table", "a", None, [CONFIG], picture, {}, page)
    assert [sorted(row) for row in logged] == [["table", "table_picture"], ["table", "table_picture", "table_report"]]
    assert logged[1]["table_report"].html == "<p>a report</p>"
