"""wandb: starting, resuming, failing, stalling and finishing a run."""

import json
import os
import pty
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import chdir
from pathlib import Path

import pytest
import wandb
from helpers import ROOT, TINY, metrics, summary
from matplotlib.figure import Figure
from run_helpers import copy_here, run_in, train_in

from common.errors import UserError
from training import wandb_logger
from training.config import WandbConfig
from training.wandb_logger import WandbRun, check_login

CONFIG = WandbConfig(mode="online", project="p", entity=None, group=None, tags=[])


class FakeRun:
    """Stands for the run that wandb.init returns. Records the calls."""

    def __init__(self, arguments: dict):
        self.arguments = arguments  # of wandb.init
        self.calls: list[dict] = []
        self.summary = self  # run.summary.update

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        pass

    def log(self, row: dict) -> None:
        self.calls.append(row)

    def update(self, values: dict) -> None:
        self.calls.append({"summary": values})

    def finish(self, exit_code: int) -> None:
        self.calls.append({"exit_code": exit_code})


class FakeWandb:
    """Stands for wandb. wandb.init waits for `started`."""

    def __init__(self):
        self.runs: list[FakeRun] = []
        self.started = threading.Event()
        self.started.set()

    def init(self, **arguments) -> FakeRun:
        self.started.wait()
        self.runs.append(FakeRun(arguments))
        return self.runs[-1]

    @property
    def calls(self) -> list[dict]:
        """The calls of the only run."""
        (run,) = self.runs
        return run.calls


@pytest.fixture
def fake(monkeypatch) -> FakeWandb:
    fake = FakeWandb()
    monkeypatch.setattr(wandb, "init", fake.init)
    return fake


@pytest.fixture
def run(fake, tmp_path) -> WandbRun:
    return WandbRun(CONFIG, tmp_path, {})


# Calls


def test_wandb_does_not_start_before_the_first_call(fake, run):
    assert not run.has_started
    run.finish(0)
    assert fake.runs == []


def test_wandb_gets_all_rows_and_the_exit_code(fake, run):
    run.log([{"step": 0}, {"step": 1}])
    run.log([{"step": 2}])
    run.finish(1)
    assert fake.calls == [{"step": 0}, {"step": 1}, {"step": 2}, {"exit_code": 1}]


def test_wandb_gets_the_summary_without_the_status(fake, run):
    """wandb records by itself how the run ends."""
    run.set_summary({"status": "running", "error": None, "best_val_loss": 2.0})
    run.finish(0)
    assert fake.calls == [{"summary": {"best_val_loss": 2.0}}, {"exit_code": 0}]


def test_disabled_wandb_gets_nothing(fake, tmp_path):
    run = WandbRun(WandbConfig(mode="disabled"), tmp_path, {})
    run.log([{"step": 0}])
    run.finish(0)
    assert fake.runs == []
    assert run.id is None


@pytest.mark.parametrize(
    ("mode", "run_id", "resume"),
    [("online", None, None), ("online", "before", "allow"), ("offline", "before", None)],
    ids=["new", "resumed online", "resumed offline"],
)
def test_resumed_run_has_its_former_id(fake, tmp_path, mode, run_id, resume):
    run = WandbRun(WandbConfig(mode=mode), tmp_path, {}, run_id)
    run.log([])
    run.log([{"step": 0}])
    run.finish(0)
    arguments = fake.runs[0].arguments
    assert (arguments["id"], arguments["resume"]) == (run_id or run.id, resume)


def test_new_runs_have_different_ids(tmp_path):
    ids = {WandbRun(CONFIG, tmp_path, {}).id for _ in range(3)}
    assert len(ids) == 3


def test_config_of_wandb_has_flat_keys(fake, tmp_path):
    run = WandbRun(CONFIG, tmp_path, {"seed": 1, "model": {"n_layer": 2}})
    run.log([{"step": 0}])
    run.finish(0)
    assert fake.runs[0].arguments["config"] == {"seed": 1, "model.n_layer": 2}


def test_folder_of_wandb_is_absolute(fake, workdir):
    """wandb's service may run in another folder."""
    run = WandbRun(CONFIG, Path("runs/a"), {})
    run.log([{"step": 0}])
    run.finish(0)
    assert fake.runs[0].arguments["dir"] == workdir / "runs/a"


def log_row(fake: FakeWandb, run: WandbRun, row: dict) -> dict:
    """The row that wandb gets for a row of metrics."""
    run.log([row])
    run.finish(0)
    return fake.calls[0]


def test_picture_is_logged(fake, run, tmp_path):
    picture = tmp_path / "a.png"
    Figure().savefig(picture)
    assert isinstance(log_row(fake, run, {"picture": picture})["picture"], wandb.Image)


def test_page_is_logged(fake, run, tmp_path):
    page = tmp_path / "report.html"
    page.write_text("<p>a report</p>", encoding="utf-8")
    assert log_row(fake, run, {"report": page})["report"].html == "<p>a report</p>"


def test_dataclasses_are_logged_as_a_table(fake, run):
    table = log_row(fake, run, {"table": [CONFIG, CONFIG]})["table"]
    assert table.columns == ["mode", "project", "entity", "group", "tags"]
    assert table.data == [["online", "p", None, None, []]] * 2


# wandb that hangs or fails


def test_training_does_not_wait_for_the_start_of_wandb(fake, run):
    fake.started.clear()
    run.log([{"step": 0}])
    assert fake.runs == []
    fake.started.set()
    run.finish(0)
    assert fake.calls == [{"step": 0}, {"exit_code": 0}]


def test_training_does_not_wait_for_a_call_that_hangs(fake, run):
    service = threading.Event()
    run.call(lambda _: service.wait())
    run.log([{"step": 0}])
    assert not any(fake_run.calls for fake_run in fake.runs)
    service.set()
    run.finish(0)
    assert fake.calls == [{"step": 0}, {"exit_code": 0}]


def wait_briefly(run: WandbRun, monkeypatch) -> tuple[list[float], Callable[[], None]]:
    """Let the run wait for 0.01 s for its thread.

    Returns the list of its time limits, and a function that waits until the thread has ended.
    """
    limits = []
    join = run._thread.join

    def record_and_join(timeout: float) -> None:
        limits.append(timeout)
        join(0.01)

    monkeypatch.setattr(run._thread, "join", record_and_join)
    return limits, join


def test_end_of_a_run_waits_for_wandb_for_a_limited_time(fake, run, monkeypatch, capsys):
    limits, join = wait_briefly(run, monkeypatch)
    fake.started.clear()
    run.log([{"step": 0}])
    run.finish(0)
    fake.started.set()
    join()
    waiting, ended = capsys.readouterr().out.splitlines()
    assert limits == [1, 15]
    assert waiting.startswith("waiting up to 15 s for wandb")
    assert "wandb did not finish within 15 s" in ended


def test_end_of_a_run_prints_nothing_if_wandb_is_fast(run, capsys):
    run.log([{"step": 0}])
    run.finish(0)
    assert capsys.readouterr().out == ""


def fail(_) -> None:
    raise TimeoutError("no server\nmore lines")


def test_wandb_that_fails_after_the_end_of_the_run_prints_nothing(fake, run, monkeypatch, capsys):
    _, join = wait_briefly(run, monkeypatch)
    fake.started.clear()
    run.call(fail)
    run.finish(0)
    capsys.readouterr()
    fake.started.set()
    join()
    assert capsys.readouterr().out == ""


def test_error_of_wandb_is_one_line(run, tmp_path, capsys):
    run.call(fail)
    run.finish(0)
    message = f"wandb: TimeoutError: no server; continuing without wandb, {tmp_path} has all"
    assert capsys.readouterr().out.startswith(message)


def test_error_of_wandb_without_a_message_is_named(run, capsys):
    def fail_silently(_):
        raise TimeoutError

    run.call(fail_silently)
    run.finish(0)
    assert capsys.readouterr().out.startswith("wandb: TimeoutError; continuing without wandb")


def test_wandb_that_has_failed_gets_no_more_calls(fake, run):
    run.call(fail)
    run._thread.join()
    run.log([{"step": 0}])
    run.finish(0)
    assert fake.calls == []


# Complete runs

OFFLINE = ["name=a", "wandb.mode=offline", "wandb.group=g"]


def test_config_of_wandb_has_the_attention_kernel(fake, train):
    assert train("wandb.mode=offline", "train.steps=1") == 0
    expected = {"attention.requested": "sdpa", "attention.resolved": "flash", "model.n_layer": 2}
    assert expected.items() <= fake.runs[0].arguments["config"].items()


def test_wandb_gets_the_rows_and_the_results_of_a_run(fake, train):
    assert train("name=a", "wandb.mode=offline", "train.steps=2") == 0
    steps = [call["step"] for call in fake.calls if "step" in call]
    assert steps == [0, 1, 2]
    last_summary = [call["summary"] for call in fake.calls if "summary" in call][-1]
    assert last_summary["best_val_loss"] == summary("a")["best_val_loss"]
    assert fake.calls[-1] == {"exit_code": 0}


def fail_to_start(**arguments) -> None:
    raise RuntimeError("no service")


@pytest.mark.parametrize("failure", ["wandb.init fails", "wandb is missing"])
def test_wandb_that_cannot_start_does_not_stop_the_run(train, monkeypatch, capsys, failure):
    if failure == "wandb.init fails":
        monkeypatch.setattr(wandb, "init", fail_to_start)
    else:
        monkeypatch.setitem(sys.modules, "wandb", None)
    assert train("name=a", "wandb.mode=offline", "train.steps=2") == 0
    assert "continuing without wandb, runs/a has all results" in capsys.readouterr().out
    assert summary("a")["status"] == "finished"


def read_steps(folder: Path) -> list[int]:
    """The steps in the wandb file of a run of group g, in order."""
    (file,) = folder.glob("run-*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["run"]["run_group"] for row in rows if row["type"] == "run"] == ["g"]
    return [row["history"]["item"]["step"] for row in rows if row["type"] == "history"]


def list_offline_runs(folder: Path) -> list[Path]:
    """The folders that wandb has written, named after the second of their start."""
    return sorted((folder / "runs/a/wandb").glob("offline-run-*"))


def wait_for_next_second() -> None:
    second = int(time.time())
    while int(time.time()) == second:
        time.sleep(0.01)


def run_id(folder: Path) -> str:
    return folder.name.split("-")[3]


@pytest.fixture(scope="module")
def resumed_offline(tmp_path_factory) -> Path:
    """A run of two processes: three steps each."""
    folder = tmp_path_factory.mktemp("offline")
    train_in(folder, *OFFLINE, "train.steps=3")
    wait_for_next_second()
    train_in(folder, *OFFLINE, "eval.attention_maps=true")
    return folder


def test_processes_of_an_offline_run_have_the_same_id(resumed_offline):
    first, second = list_offline_runs(resumed_offline)
    assert run_id(first) == run_id(second)


def test_processes_of_an_offline_run_have_all_steps_together(resumed_offline):
    first, second = list_offline_runs(resumed_offline)
    assert (read_steps(first), read_steps(second)) == ([0, 1, 2, 3], [4, 5, 6])


def test_rows_from_before_the_start_of_wandb_are_sent_later(resumed_offline, workdir, train):
    """The run was killed after its last checkpoint, before wandb has started."""
    copy_here(resumed_offline)
    first, _ = list_offline_runs(workdir)
    shutil.rmtree("runs/a/wandb")
    Path("runs/a/summary.json").unlink()
    assert train(*OFFLINE) == 0
    (third,) = list_offline_runs(workdir)
    assert run_id(third) == run_id(first)
    assert read_steps(third) == list(range(7))


@pytest.fixture(scope="module")
def without_service(tmp_path_factory) -> tuple[Path, str]:
    """A folder with a run whose wandb service was killed, and what it prints."""
    folder = tmp_path_factory.mktemp("service")
    services = []
    start_process = subprocess.Popen
    to_media = wandb_logger._to_media

    def record_process(*args, **options):
        services.append(start_process(*args, **options))
        return services[-1]

    def kill_service_and_convert(row):
        for process in services:
            if "wandb-core" in process.args[0]:
                process.kill()
                process.wait()
        return to_media(row)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", record_process)
        patch.setattr(wandb_logger, "_to_media", kill_service_and_convert)
        code, printed = run_in(folder, "name=a", "wandb.mode=offline")
    assert code == 0
    assert services
    return folder, printed


def test_run_whose_wandb_service_was_killed_finishes(without_service):
    with chdir(without_service[0]):
        assert [row["step"] for row in metrics("a")] == list(range(7))
        assert summary("a")["status"] == "finished"


def test_wandb_service_that_was_killed_is_reported_once(without_service):
    _, printed = without_service
    assert printed.count("continuing without wandb, runs/a has all results") == 1
    assert "Traceback" not in printed


# The API key


def test_login_is_not_checked_offline(monkeypatch):
    monkeypatch.setattr(wandb, "login", fail_to_start)
    check_login(WandbConfig(mode="offline"))


@pytest.fixture
def failing_login(monkeypatch):
    """failing_login(error) lets wandb.login raise the error."""
    monkeypatch.setenv("WANDB_SILENT", "")

    def set_error(error: Exception) -> None:
        def login(**options) -> None:
            raise error

        monkeypatch.setattr(wandb, "login", login)

    return set_error


def test_missing_api_key_is_refused(failing_login):
    failing_login(wandb.errors.UsageError("api_key not configured (no-tty)"))
    with pytest.raises(UserError, match=r"wandb.mode=online needs an API key; run `wandb login`"):
        check_login(CONFIG)


def test_other_errors_of_the_login_do_not_stop_a_run(failing_login):
    failing_login(RuntimeError("damaged settings"))
    check_login(CONFIG)


def test_missing_api_key_is_refused_without_a_question(workdir):
    """With a terminal, wandb would ask for a key."""
    controller, terminal = pty.openpty()
    environment = {key: value for key, value in os.environ.items() if "WANDB" not in key}
    streams = {"stdin": terminal, "stdout": terminal, "stderr": terminal}
    done = subprocess.run(
        [sys.executable, ROOT / "train.py", *TINY, "wandb.mode=online"],
        env=environment | {"NETRC": "none"},
        timeout=600,
        **streams,
    )
    printed = os.read(controller, 10_000).decode()
    os.close(controller)
    os.close(terminal)
    assert done.returncode == 2
    assert printed.startswith("train.py: wandb.mode=online needs an API key")
    assert not Path("runs").exists()
