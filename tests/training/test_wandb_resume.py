"""wandb gets each step of a run once, also if the run was killed, resumed, copied or uploaded.

The server is the one of wandb_server.py. `wandb sync` uploads what was logged offline.
"""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import ROOT, TEXT, TINY, metrics, summary
from wandb_helpers import read_offline_runs
from wandb_server import ServerRun, WandbServer, wandb_server

pytestmark = pytest.mark.slow

# All rows are evaluations, so all are logged.
WORDS = [*TINY, "name=a", "train.steps=40", "checkpoint.every=10", "eval.every=1"]
NO_SERVER = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": 40 * "a"}


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with wandb_server() as server:
        yield server


def start_training(mode: str, environment: dict[str, str], *words: str) -> subprocess.Popen:
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    command = [sys.executable, ROOT / "train.py", *WORDS, f"wandb.mode={mode}", *words]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=os.environ | environment, **streams)


def train(mode: str, environment: dict[str, str], *words: str) -> str:
    process = start_training(mode, environment, *words)
    printed, _ = process.communicate()
    assert process.returncode == 0, printed
    return printed


def train_and_kill(mode: str, environment: dict[str, str], *words: str, rows: int) -> None:
    """Start a run, and kill it when metrics.jsonl has the rows."""
    process = start_training(mode, environment, *words)
    file = Path("runs/a/metrics.jsonl")
    while not file.exists() or file.read_bytes().count(b"\n") < rows:
        assert process.poll() is None, process.communicate()
        time.sleep(0.005)
    process.kill()
    process.communicate()


def list_loggers() -> list[Path]:
    """The folders in /proc of the processes that log runs of the current folder to wandb."""
    loggers = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # the process has ended
            # pytest's own command has the name of this file if only this file is tested
            is_own = command.parent.name == str(os.getpid())
            is_logger = b"wandb" in command.read_bytes() and not is_own
            if is_logger and (command.parent / "cwd").resolve() == Path.cwd():
                loggers.append(command.parent)
    return loggers


def upload(server: WandbServer, folder: str = "runs/a/wandb") -> None:
    command = [sys.executable, "-m", "wandb", "sync", folder]
    environment = os.environ | server.environment
    subprocess.run(command, env=environment, check=True, capture_output=True)


def upload_as_printed(server: WandbServer, printed: str) -> None:
    """Run the command that the end of a run prints."""
    (line,) = (line for line in printed.splitlines() if line.startswith("upload "))
    command = line.removeprefix("upload").replace("compare.py", str(ROOT / "compare.py"))
    environment = os.environ | server.environment
    subprocess.run(command, shell=True, env=environment, check=True, capture_output=True)


def check_complete(run: ServerRun, name: str = "a") -> None:
    """Check that the server has each row once, with its values, and all files."""
    rows = metrics(name)
    assert len(run.sent) == len(run.lines)
    assert [row["_step"] for row in run.rows] == list(range(len(rows)))
    for row, expected in zip(run.rows, rows, strict=True):
        keys = ("step", "tokens", "train/loss", "val/loss")
        assert {key: row.get(key) for key in keys} == {key: expected.get(key) for key in keys}
    assert run.config()["attention"]["resolved"] == "flash"


@pytest.mark.parametrize("rows", [11, 15], ids=["after a checkpoint", "between checkpoints"])
@pytest.mark.parametrize("first", ["offline", "online"])
@pytest.mark.parametrize("second", ["offline", "online"])
def test_killed_and_resumed_run_has_each_step_once(workdir, server, first, second, rows):
    train_and_kill(first, server.environment, rows=rows)
    printed = train(second, server.environment)
    assert "resumed from step" in printed
    if second == "offline":
        upload_as_printed(server, printed)
    check_complete(server.runs[summary("a")["wandb_id"]])


def test_online_run_that_continues_offline_has_each_step_once(workdir, server):
    """After its printed command, also if the server had rows that wandb's file lacks."""
    # slow steps, so that there are few rows when wandb sends the first ones
    slow = ["train.batch_size=512", "eval.sample.max_new_tokens=0"]
    process = start_training("online", server.environment, "train.steps=100000", *slow)
    while not any(run.lines for run in server.runs.values()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.kill()
    process.communicate()
    num_rows = Path("runs/a/metrics.jsonl").read_bytes().count(b"\n")
    printed = train("offline", {}, f"train.steps={num_rows + 10}", *slow)
    upload_as_printed(server, printed)
    run = server.runs[summary("a")["wandb_id"]]
    assert len(run.sent) == len(run.lines)
    assert [row["_step"] for row in run.rows] == list(range(num_rows + 11))


def test_run_that_is_uploaded_after_a_kill_and_at_its_end_has_each_step_once(workdir, server):
    train_and_kill("offline", {}, "train.steps=400", rows=300)
    upload(server)
    (run,) = server.runs.values()
    assert 0 < len(run.lines) < 300  # wandb writes its file in blocks
    train("offline", {}, "train.steps=400")
    upload(server)
    check_complete(run)


def test_resumed_offline_run_has_one_folder(workdir):
    train_and_kill("offline", {}, rows=11)
    train("offline", {})
    (run,) = read_offline_runs(Path("runs/a"))
    assert run.steps == list(range(41))


@pytest.mark.parametrize("mode", ["offline", "online"])
def test_logger_of_a_killed_run_ends(workdir, server, mode):
    """Also without a server, which it would try to reach."""
    train_and_kill(mode, server.environment, rows=11)
    server.shutdown()
    while list_loggers():
        time.sleep(0.05)


def test_pictures_of_earlier_processes_are_uploaded(workdir, server):
    train("offline", {}, "train.steps=2", "eval.attention_maps=true")
    train("offline", {}, "train.steps=3")
    upload(server)
    (run,) = server.runs.values()
    pictures = [row["attention_maps"]["path"] for row in run.rows if "attention_maps" in row]
    assert len(pictures) == 3
    assert all(run.files[picture].startswith(b"\x89PNG") for picture in pictures)


def test_run_without_a_server_is_logged_offline(workdir):
    printed = train("online", NO_SERVER, "train.steps=2")
    assert "; logging offline\n" in printed
    assert "upload   wandb sync runs/a/wandb\n" in printed
    (run,) = read_offline_runs(Path("runs/a"))
    assert run.steps == [0, 1, 2]


def test_run_that_started_without_a_server_is_complete_later(workdir, server):
    train("online", NO_SERVER, "train.steps=2")
    train("online", server.environment, "train.steps=4")
    (run,) = server.runs.values()
    check_complete(run)


def test_offline_run_that_is_uploaded_twice_has_each_step_once(workdir, server):
    for steps in (2, 4):
        train("offline", {}, f"train.steps={steps}")
        upload(server)
    (run,) = server.runs.values()
    check_complete(run)


def test_copied_run_has_another_id_and_a_complete_history(workdir, server):
    train("offline", {}, "train.steps=2")
    shutil.copytree("runs/a", "runs/b")
    train("offline", {}, "name=b", "train.steps=4")
    upload(server)
    upload(server, "runs/b/wandb")
    ids = [summary(name)["wandb_id"] for name in ("a", "b")]
    assert list(server.runs) == ids
    for name, run_id in zip(("a", "b"), ids, strict=True):
        check_complete(server.runs[run_id], name)


def test_online_run_prints_its_address(workdir, server):
    printed = train("online", server.environment, "train.steps=1")
    url = f"{server.environment['WANDB_BASE_URL']}/me/trilgpt/runs/{summary('a')['wandb_id']}"
    assert printed.count(f"wandb    {url}\n") == 2  # at the start and at the end


def test_online_run_whose_loss_is_not_finite_sends_an_alert(workdir, server):
    process = start_training(
        "online",
        server.environment,
        "optimizer=adamw",
        "optimizer.lr=1e9",
        "train.grad_clip=null",
        "optimizer.weight_decay=0",
    )
    printed, _ = process.communicate()
    assert process.returncode == 1, printed
    (alert,) = server.alerts
    assert "is not a finite number" in str(alert)


def test_agent_chooses_the_id(workdir):
    train("offline", {"WANDB_RUN_ID": "agent1", "WANDB_SWEEP_ID": "s"}, "train.steps=1")
    (run,) = read_offline_runs(Path("runs/a"))
    assert run.id == "agent1"
