"""wandb: starting, resuming, failing, stalling and finishing a run."""

import json
import os
import pty
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb
from helpers import ROOT, TINY, metrics, summary
from matplotlib.figure import Figure

from training import wandb_logger
from training.config import WandbConfig
from training.wandb_logger import WandbRun

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
    monkeypatch.setattr(
        wandb, "init", lambda **given: calls.append({k: given[k] for k in ("id", "resume")}) or run
    )
    return calls


@pytest.fixture
def start(calls, monkeypatch):
    """An event that wandb.init waits for."""
    event, init = threading.Event(), wandb.init
    monkeypatch.setattr(wandb, "init", lambda **given: event.wait() and init(**given))
    return event


@pytest.mark.parametrize(("run_id", "resume"), [(None, None), ("before", "allow")])
def test_wandb_gets_the_id_all_rows_and_the_summary(tmp_path, calls, run_id, resume):
    run = WandbRun(CONFIG, tmp_path, {}, run_id)
    assert run.id and run_id in (None, run.id) and not calls
    run.log([{"step": 0}, {"step": 1}])
    run.set_summary({"status": "running", "best_val_loss": 2.0})
    run.finish(1)
    start = {"id": run.id, "resume": resume}
    assert calls == [start, {"step": 0}, {"step": 1}, {"best_val_loss": 2.0}, {"exit_code": 1}]


def test_training_does_not_wait_for_the_start_of_wandb_or_a_call_that_hangs(tmp_path, calls, start):
    service = threading.Event()
    run = WandbRun(CONFIG, tmp_path, {})
    run.call(lambda _: service.wait())
    run.log([{"step": 0}])
    assert not calls
    start.set()
    run.log([{"step": 1}])
    assert len(calls) <= 1
    service.set()
    run.finish(0)
    assert calls[1:] == [{"step": 0}, {"step": 1}, {"exit_code": 0}]


def test_end_of_a_run_waits_for_wandb_only_for_a_limited_time(tmp_path, start, monkeypatch, capsys):
    run, waits, join = WandbRun(CONFIG, tmp_path, {}), [], threading.Thread.join
    monkeypatch.setattr(
        run._thread, "join", lambda timeout: waits.append(timeout) or join(run._thread, 0.01)
    )
    run.log([{"step": 0}])
    run.finish(0)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("waiting up to 15 s for wandb")
    assert waits == [1, 15] and "wandb did not finish within 15 s" in lines[1]
    start.set()  # ends the thread, which would call the wandb.init of the next test
    join(run._thread)


def test_wandb_that_fails_after_the_end_of_the_run_prints_nothing(
    tmp_path, start, monkeypatch, capsys
):
    run, join = WandbRun(CONFIG, tmp_path, {}), threading.Thread.join
    monkeypatch.setattr(run._thread, "join", lambda timeout: join(run._thread, 0.01))
    run.call(lambda _: 1 / 0)
    run.finish(0)
    capsys.readouterr()
    start.set()
    join(run._thread)
    assert capsys.readouterr().out == ""


def test_error_of_wandb_without_a_message_is_named(tmp_path, calls, capsys):
    def fail(_):
        raise TimeoutError

    run = WandbRun(CONFIG, tmp_path, {})
    run.call(fail)
    run.finish(0)
    assert capsys.readouterr().out.startswith("wandb: TimeoutError; continuing without wandb")


def read_steps(folder) -> list[int]:
    """The steps in the wandb file of a run of group g, in order."""
    (file,) = folder.glob("run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    rows = [
        *map(
            json.loads,
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines(),
        )
    ]
    assert [row["run"]["run_group"] for row in rows if row["type"] == "run"] == ["g"]
    return [row["history"]["item"]["step"] for row in rows if row["type"] == "history"]


def test_folders_of_a_resumed_offline_run_have_the_same_id_and_all_steps_together(train):
    settings = ["name=a", "wandb.mode=offline", "wandb.group=g"]
    assert train(*settings, "train.steps=3") == 0
    (first,) = Path("runs/a/wandb").glob("offline-run-*")
    assert train(*settings, "eval.attention_maps=true") == 0
    (second,) = {*Path("runs/a/wandb").glob("offline-run-*")} - {first}
    assert first.name.split("-")[3] == second.name.split("-")[3]
    assert (read_steps(first), read_steps(second)) == ([0, 1, 2, 3], [4, 5, 6])
    shutil.rmtree(
        "runs/a/wandb"
    )  # as if the run was killed after its last checkpoint, before wandb has started
    Path("runs/a/summary.json").unlink()
    assert train(*settings) == 0
    (third,) = Path("runs/a/wandb").glob("offline-run-*")
    assert third.name.split("-")[3] == first.name.split("-")[3] and read_steps(third) == [*range(7)]


def test_run_does_not_need_the_service_process(train, monkeypatch, capfd):
    services, popen, to_media = [], subprocess.Popen, wandb_logger._to_media
    monkeypatch.setattr(
        subprocess,
        "Popen",
        lambda *args, **options: services.append(popen(*args, **options)) or services[-1],
    )

    def kill_service_and_convert(value):
        for process in services:
            if "wandb-core" in process.args[0]:
                process.kill()
                process.wait()
        return to_media(value)

    monkeypatch.setattr(wandb_logger, "_to_media", kill_service_and_convert)
    assert train("name=a", "wandb.mode=offline") == 0
    printed = capfd.readouterr()
    assert printed.out.count("continuing without wandb, runs/a has all results") == 1
    assert "Traceback" not in printed.out + printed.err
    assert [row["step"] for row in metrics("a")] == list(range(7))
    assert summary("a")["status"] == "finished"


def test_table_a_picture_and_a_page_are_logged(tmp_path, calls):
    picture, report = tmp_path / "a.png", tmp_path / "report.html"
    Figure().savefig(picture)
    report.write_text("<p>a report</p>", encoding="utf-8")
    run = WandbRun(CONFIG, tmp_path, {})
    run.log([{"table": [CONFIG, CONFIG], "picture": picture, "report": report}])
    run.finish(0)
    _, row, _ = calls
    assert row["table"].columns[:2] == ["mode", "project"] and len(row["table"].data) == 2
    assert isinstance(row["picture"], wandb.Image)
    assert row["report"].html == "<p>a report</p>"


def test_wandb_that_cannot_start_does_not_stop_the_run(train, monkeypatch, capsys):
    given = {}
    monkeypatch.setattr(wandb, "init", lambda **arguments: given.update(arguments) or 1 / 0)
    assert train("name=a", "wandb.mode=offline", "train.steps=2") == 0
    assert "continuing without wandb, runs/a has all results" in capsys.readouterr().out
    assert summary("a")["status"] == "finished"
    assert given["dir"].is_absolute()  # wandb's service may run in another folder
    flat = {
        "attention.requested": "sdpa",
        "attention.resolved": "flash",
        "seed": 1337,
        "model.n_layer": 2,
    }
    assert flat.items() <= given["config"].items()
    monkeypatch.setitem(sys.modules, "wandb", None)  # the package is damaged or missing
    assert train("name=b", "wandb.mode=offline", "train.steps=2") == 0
    assert "continuing without wandb, runs/b has all results" in capsys.readouterr().out


def test_missing_api_key_is_refused_without_a_question(workdir):
    """With a terminal, wandb would ask for a key."""
    terminal, of_process = pty.openpty()
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("WANDB_")
    } | {"NETRC": "none"}
    command = [sys.executable, ROOT / "train.py", *TINY, "wandb.mode=online"]
    done = subprocess.run(
        command,
        env=environment,
        stdin=of_process,
        stdout=of_process,
        stderr=of_process,
        timeout=600,
    )
    printed = os.read(terminal, 10_000).decode()
    os.close(terminal)
    os.close(of_process)
    assert done.returncode == 2
    assert printed.startswith(
        "train.py: wandb.mode=online needs an API key; run `wandb login`, or set WANDB_API_KEY"
    )
    assert not Path("runs").exists()
