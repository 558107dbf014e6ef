"""The process that logs to wandb: when it starts, what it gets, and how it fails."""

import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE

import pytest
from helpers import ROOT, TEXT, TINY, metrics, summary
from run_helpers import run_in

from training import wandb_logger
from training.config import WandbConfig
from training.wandb_logger import (
    WandbLogger,
    WandbRun,
    resolve_mode,
    to_metric_name,
)


@pytest.mark.parametrize(
    ("config", "environment", "mode"),
    [
        (None, {}, "offline"),
        (None, {"WANDB_MODE": "online"}, "online"),
        ("offline", {"WANDB_MODE": "online"}, "offline"),
        (None, {"WANDB_DISABLED": "true"}, "disabled"),
        (None, {"WANDB_DISABLED": "true", "WANDB_MODE": "online"}, "disabled"),
        ("online", {"WANDB_DISABLED": "true"}, "online"),
        (None, {"WANDB_DISABLED": "false"}, "offline"),
    ],
)
def test_config_decides_before_the_environment(config, environment, mode, monkeypatch):
    for name in ("WANDB_MODE", "WANDB_DISABLED"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert resolve_mode(WandbConfig(mode=config)) == mode


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("forward+backward, window:256", "forward_backward_window_256"),
        ("attention=naive", "attention_naive"),
    ],
)
def test_name_of_a_metric_is_a_word(text, name):
    assert to_metric_name(text) == name


# A process that fails or hangs. A package of the same name replaces wandb.

INIT = "def init(**arguments):"
FAILURES = {
    "missing": "raise ModuleNotFoundError(\"No module named 'wandb'\")",
    "refusing": f"class Error(Exception): pass\n{INIT} raise RuntimeError('no service\\nmore')",
    "silent": f"class Error(Exception): pass\n{INIT} raise TimeoutError",
    "ending": "import os; os._exit(3)",
    "hanging": "import threading; threading.Event().wait()",
}


@pytest.fixture
def broken_wandb(request, tmp_path_factory, monkeypatch) -> None:
    """Replaces wandb in new processes by one of FAILURES."""
    site = tmp_path_factory.mktemp("site")
    (site / "wandb.py").write_text(FAILURES[request.param], encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setattr(wandb_logger, "NOTICE_S", 0 if request.param == "hanging" else 60)
    monkeypatch.setattr(wandb_logger, "FINISH_TIMEOUT_S", 1)


@pytest.mark.parametrize("broken_wandb", FAILURES, indirect=True)
def test_wandb_that_fails_changes_nothing_about_training(broken_wandb, train):
    assert train("name=a", "wandb.mode=offline") == 0
    assert [row["step"] for row in metrics("a")] == list(range(7))
    assert summary("a")["status"] == "finished"


@pytest.mark.parametrize(
    ("broken_wandb", "message"),
    [
        (
            "missing",
            "wandb: ModuleNotFoundError: No module named 'wandb'; continuing without wandb",
        ),
        ("refusing", "wandb: RuntimeError: no service more; continuing without wandb"),
        ("silent", "wandb: TimeoutError; continuing without wandb"),
        ("ending", "wandb has failed with exit code 3"),
        ("hanging", "wandb did not finish;"),
    ],
    indirect=["broken_wandb"],
)
def test_failure_of_wandb_is_one_line_that_names_the_folder(broken_wandb, train, capsys, message):
    train("name=a", "wandb.mode=offline")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if message in line)
    assert line.startswith(message)
    assert line.endswith("runs/a has all results")


@pytest.mark.parametrize("broken_wandb", ["hanging"], indirect=True)
def test_process_that_hangs_is_killed(broken_wandb, tmp_path):
    run = WandbRun(
        folder=str(tmp_path), wandb_dir=".", name="a", job_type="t", group=None, config={}
    )
    logger = WandbLogger(WandbConfig(mode="offline"), [run])
    logger.finish()
    assert logger.process.wait() == -9


@pytest.mark.slow
@pytest.mark.parametrize("broken_wandb", ["hanging"], indirect=True)
def test_ctrl_c_while_a_finished_run_waits_for_wandb_only_ends_the_logging(broken_wandb, workdir):
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    command = [sys.executable, ROOT / "train.py", *TINY, "name=a", "wandb.mode=offline"]
    with subprocess.Popen(command, stdout=PIPE, stderr=PIPE, text=True) as process:
        while process.stdout.readline() != "waiting for wandb\n":
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, error = process.communicate()
    assert process.returncode == 0
    assert error == ""
    assert summary("a")["status"] == "finished"


KILL_SERVICE = """
import subprocess
from training import wandb_process

class Popen(subprocess.Popen):
    def __init__(self, command, **options):
        super().__init__(command, **options)
        services.append(self)

def kill_service_and_convert(row, folder):
    for service in services:
        if "wandb-core" in service.args[0]:
            service.kill()
            service.wait()
    return to_media(row, folder)

services = []
to_media = wandb_process.to_media
subprocess.Popen = Popen
wandb_process.to_media = kill_service_and_convert
wandb_process.main()
"""


@pytest.mark.slow
def test_wandb_service_that_was_killed_is_reported_once(tmp_path, monkeypatch):
    start = subprocess.Popen

    def start_snippet(command, **options):
        return start([sys.executable, "-c", KILL_SERVICE], **options)

    monkeypatch.setattr(wandb_logger.subprocess, "Popen", start_snippet)
    code, printed = run_in(tmp_path, "name=a", "wandb.mode=offline")
    assert code == 0
    assert printed.count("continuing without wandb, runs/a has all results") == 1
    assert "Traceback" not in printed


@pytest.mark.slow
def test_run_without_an_api_key_is_logged_offline(train, monkeypatch, capsys):
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", "none")
    assert train("name=a", "wandb.mode=online") == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "wandb" in line]
    assert lines[0].endswith("; logging offline")
    assert "upload   wandb sync runs/a/wandb" in lines
