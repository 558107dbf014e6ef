"""Signals that stop a run, and how a command starts and ends."""

import errno
import os
import signal
import subprocess
import sys

import pytest
from helpers import ROOT

from common.errors import TrainingFailed, UserError
from common.process import StopRequest, raise_interrupt, run_main, set_stop_handlers

NAMES = ["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"]


def send(name: str) -> None:
    """Send a signal to this process."""
    signal.raise_signal(getattr(signal, name))


@pytest.mark.parametrize("name", NAMES)
def test_signal_before_the_first_step_raises(name):
    set_stop_handlers(raise_interrupt)
    with StopRequest(), pytest.raises(KeyboardInterrupt):
        send(name)


def test_only_ctrl_c_interrupts_the_cleanup_after_a_signal():
    set_stop_handlers(raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        send("SIGTERM")
    send("SIGHUP")
    with pytest.raises(KeyboardInterrupt):
        send("SIGINT")


@pytest.mark.parametrize("name", NAMES)
def test_signal_after_a_step_requests_a_stop_and_raises_after_the_loop(name):
    set_stop_handlers(raise_interrupt)
    with StopRequest() as stop:
        stop.enable()
        assert not stop.requested
        send(name)
        assert stop.requested
    with pytest.raises(KeyboardInterrupt):
        send(name)


@pytest.mark.parametrize(
    ("second", "variables"),
    [("SIGTERM", {}), ("SIGHUP", {}), ("SIGUSR1", {}), ("SIGINT", {"TORCHELASTIC_RUN_ID": "x"})],
    ids=["SIGTERM", "SIGHUP", "SIGUSR1", "Ctrl-C that torchrun repeats"],
)
def test_second_signal_is_ignored(monkeypatch, second, variables):
    monkeypatch.setattr("os.environ", os.environ | variables)
    with StopRequest() as stop:
        stop.enable()
        send("SIGINT")
        send(second)
        assert stop.requested


@pytest.mark.parametrize("name", NAMES)
def test_ignored_signal_stays_ignored_unless_it_is_of_a_scheduler(name):
    """nohup ignores SIGHUP. docs/train.sbatch ignores SIGUSR1 and 2, but to protect torchrun."""
    signal.signal(getattr(signal, name), signal.SIG_IGN)
    with StopRequest() as stop:
        stop.enable()
        send(name)
        assert stop.requested == ("USR" in name)


def test_second_ctrl_c_ends_the_run_without_saving():
    with pytest.raises(KeyboardInterrupt, match="stopped without saving"), StopRequest() as stop:
        stop.enable()
        send("SIGTERM")
        send("SIGINT")


@pytest.mark.parametrize(
    ("variables", "printed"),
    [
        ({}, "Stopping and saving after this step. Press Ctrl-C again to quit without saving."),
        ({"TORCHELASTIC_RUN_ID": "none"}, "Stopping and saving after this step."),
        ({"RANK": "1"}, ""),
    ],
    ids=["one process", "torchrun", "another rank"],
)
def test_first_signal_is_answered(monkeypatch, capfd, variables, printed):
    monkeypatch.setattr("os.environ", os.environ | variables)
    with StopRequest() as stop:
        stop.enable()
        send("SIGINT")
    assert capfd.readouterr().err.strip() == printed


# How a command ends


def fail(error: BaseException) -> int:
    raise error


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """The times that run_main waits, in seconds, instead of waiting."""
    waits = []
    monkeypatch.setattr("common.process.time.sleep", waits.append)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    return waits


def test_result_of_main_is_the_exit_code():
    assert run_main(int, 75) == 75


FULL_DISK = OSError(errno.ENOSPC, "No space left on device", "runs/a/last.pt")
WRONG_PATH = OSError(errno.EACCES, "Permission denied", "/root/text.txt")


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (UserError("set a"), 2, "set a"),
        (TrainingFailed("nan"), 1, "nan"),
        (KeyboardInterrupt(), 75, "interrupted"),
        (WRONG_PATH, 2, "/root/text.txt: Permission denied; set another file, folder or name"),
        (FULL_DISK, 1, "runs/a/last.pt: No space left on device; free some disk space"),
    ],
    ids=["wrong input", "failed training", "signal", "wrong path", "full disk"],
)
def test_error_that_is_not_a_bug_is_one_sentence(waits, monkeypatch, capsys, error, code, message):
    monkeypatch.chdir(ROOT)
    assert run_main(fail, error) == code
    assert capsys.readouterr().err == f"train.py: {message}\n"
    assert not waits


def test_bug_keeps_its_traceback():
    with pytest.raises(KeyError):
        run_main(fail, KeyError("wrong"))


def test_reader_of_the_output_that_has_exited_is_no_error(waits, capsys):
    """As in sample.py | head."""
    assert run_main(fail, BrokenPipeError()) == 1
    assert capsys.readouterr().err == ""


def test_error_cannot_control_the_terminal(waits, capsys):
    run_main(fail, UserError("name=\x1b[31m"))
    assert capsys.readouterr().err == "train.py: name=\ufffd[31m\n"


def test_later_ranks_report_an_error_after_rank_0(waits, monkeypatch, capsys):
    """torchrun ends them while they wait, so that an error of all ranks is printed once."""
    monkeypatch.setenv("RANK", "3")
    assert run_main(fail, UserError("wrong")) == 2
    assert capsys.readouterr().err == "train.py, rank 3: wrong\n"
    assert len(waits) == 1


def test_later_ranks_report_no_interruption(waits, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "3")
    assert run_main(fail, KeyboardInterrupt()) == 75
    assert capsys.readouterr().err == ""
    assert not waits


# Processes


def run_code(code: str, **options) -> subprocess.CompletedProcess:
    """Run code in a new process, with buffered output."""
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    options = {"env": variables, "stdout": subprocess.PIPE} | options
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_full_disk_at_the_last_flush_is_reported():
    with open("/dev/full", "w", encoding="utf-8") as full:
        code = "from common.process import run_process; run_process(lambda: print('result') or 0)"
        done = run_code(code, stdout=full)
    assert done.returncode == 1
    assert "free some disk space" in done.stderr


START = """
import atexit, os
from common.process import run_process, start_process
start_process()
atexit.register(print, "exit handler")
print(os.environ.get("GOMP_SPINCOUNT"), end=" ")
run_process(lambda: 3)
"""


@pytest.mark.parametrize(
    ("variables", "spin_count"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
    ids=["default", "spin count", "wait policy"],
)
def test_process_sets_the_spin_count_and_runs_exit_handlers(variables, spin_count):
    done = run_code(START, env=variables)
    assert (done.returncode, done.stdout) == (3, f"{spin_count} exit handler\n")


PRINT_USER_OF_DYNAMO = """
import sys
import torch
from helpers import ADAMW, MUON, tiny_model
from training.optimizer import *

def report(name):
    if "torch._dynamo" in sys.modules:
        print(name)
        sys.exit()

model = tiny_model()
tokens = torch.zeros(2, 8, dtype=torch.int64)
scaler = torch.amp.GradScaler("cpu", enabled=False)
for config in (ADAMW, MUON):
    optimizers = build_optimizers(model, config)
    report("build_optimizers")
    model(tokens, tokens).backward()
    optimizer_step(model, optimizers, scaler, 1.0)
    report("optimizer_step")
    state = state_by_name(model, optimizers)
    load_state_by_name(model, optimizers, state)
    report("load_state_by_name")
"""


@pytest.mark.slow
def test_optimizers_do_not_import_dynamo():
    """The import takes most of a second. In a new process, because other tests import it."""
    done = run_code(f"import sys; sys.path.append({str(ROOT / 'tests')!r})" + PRINT_USER_OF_DYNAMO)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_command_runs_with_closed_streams():
    command = f"{sys.executable} {ROOT}/compare.py missing <&- >&- 2>&-"
    assert subprocess.run(command, shell=True).returncode == 2


def test_command_runs_without_docstrings():
    command = [sys.executable, "-OO", ROOT / "sample.py", "--help"]
    assert b"attention=" in subprocess.run(command, check=True, capture_output=True).stdout


def test_script_that_another_program_runs_raises_an_exception_at_the_end():
    code = f"""
import io, runpy, sys
sys.path.insert(0, "{ROOT}")
sys.argv = ["compare.py", "missing"]
sys.stdout = io.StringIO()  # as in a notebook
try:
    runpy.run_path("{ROOT}/compare.py", run_name="__main__")
except SystemExit as error:
    print("exit code", error.code, file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.endswith("exit code 2\n"), done.stderr
