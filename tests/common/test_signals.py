"""Signals that stop a run, and how a command ends."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

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


@pytest.mark.parametrize("name", NAMES)
def test_signal_after_a_step_requests_a_stop(name):
    with StopRequest() as stop:
        stop.enable()
        assert not stop.requested
        send(name)
        assert stop.requested


@pytest.mark.parametrize("name", NAMES)
def test_signal_after_the_loop_raises(name):
    set_stop_handlers(raise_interrupt)
    with StopRequest() as stop:
        stop.enable()
    with pytest.raises(KeyboardInterrupt):
        send(name)


def test_signal_does_not_interrupt_the_cleanup_after_another_one():
    set_stop_handlers(raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        send("SIGTERM")
    send("SIGHUP")


def test_ctrl_c_interrupts_the_cleanup():
    set_stop_handlers(raise_interrupt)
    with pytest.raises(KeyboardInterrupt):
        send("SIGTERM")
    with pytest.raises(KeyboardInterrupt):
        send("SIGINT")


@pytest.mark.parametrize("second", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"])
def test_second_signal_is_ignored(second):
    with StopRequest() as stop:
        stop.enable()
        send("SIGINT")
        send(second)
        assert stop.requested


def test_second_ctrl_c_ends_the_run_without_saving():
    with pytest.raises(KeyboardInterrupt, match="stopped without saving"), StopRequest() as stop:
        stop.enable()
        send("SIGTERM")
        send("SIGINT")


def test_second_ctrl_c_is_ignored_under_torchrun(monkeypatch):
    """torchrun repeats Ctrl-C."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with StopRequest() as stop:
        stop.enable()
        send("SIGINT")
        send("SIGINT")
        assert stop.requested


def stop_once(capfd) -> str:
    """What a process prints after the first signal."""
    with StopRequest() as stop:
        stop.enable()
        send("SIGINT")
    return capfd.readouterr().err


def test_first_signal_says_how_to_quit_without_saving(capfd):
    assert "Press Ctrl-C again to quit without saving" in stop_once(capfd)


def test_first_signal_offers_no_ctrl_c_under_torchrun(monkeypatch, capfd):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    printed = stop_once(capfd)
    assert "Stopping and saving" in printed
    assert "Ctrl-C" not in printed


def test_only_rank_0_reports_a_signal(monkeypatch, capfd):
    monkeypatch.setenv("RANK", "1")
    assert stop_once(capfd) == ""


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_ignored_signal_stays_ignored(name):
    """nohup ignores SIGHUP."""
    signal.signal(getattr(signal, name), signal.SIG_IGN)
    set_stop_handlers(raise_interrupt)
    with StopRequest() as stop:
        stop.enable()
        send(name)
        assert not stop.requested
    send(name)


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_ignored_signal_of_a_scheduler_stops_the_run(name):
    """docs/train.sbatch ignores it, but only to protect torchrun."""
    signal.signal(getattr(signal, name), signal.SIG_IGN)
    with StopRequest() as stop:
        stop.enable()
        send(name)
        assert stop.requested


@contextmanager
def closed_terminal() -> Iterator[None]:
    """Context manager: replaces the output of this process by a terminal that is closed."""
    controller, terminal = os.openpty()
    output = os.dup(1)
    os.dup2(terminal, 1)
    os.close(terminal)
    os.close(controller)
    try:
        yield
    finally:
        os.dup2(output, 1)
        os.close(output)


def test_output_to_a_closed_terminal_fails():
    with closed_terminal(), pytest.raises(OSError, match="Input/output error"):
        os.write(1, b"step 3")


def test_output_to_a_closed_terminal_is_discarded_after_a_signal():
    with closed_terminal(), StopRequest() as stop:
        stop.enable()
        send("SIGHUP")
        os.write(1, b"saved")


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
def test_error_that_is_not_a_bug_is_one_sentence(waits, capsys, error, code, message):
    assert run_main(fail, error) == code
    assert capsys.readouterr().err == f"train.py: {message}\n"


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


def test_rank_0_reports_an_error_at_once(waits, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    assert run_main(fail, UserError("wrong")) == 2
    assert capsys.readouterr().err == "train.py: wrong\n"
    assert not waits


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


def test_later_ranks_raise_a_bug_after_rank_0(waits, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(KeyError):
        run_main(fail, KeyError("wrong"))
    assert len(waits) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="needs /dev/full")
def test_full_disk_at_the_last_flush_is_reported():
    code = "from common.process import run_process; run_process(lambda: print('result') or 0)"
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=variables,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert "free some disk space" in done.stderr
