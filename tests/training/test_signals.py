"""Signals that stop a run, and the exit of a process."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from helpers import ROOT

from training import startup
from training.signals import StopRequest, raise_interrupt, set_stop_handlers

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


# The exit of a process

EXIT = """
import atexit, sys, time
from training.startup import exit_process
atexit.register(print, "exit handler")
print("flushed", end=" ")
exit_process(3)
"""


@pytest.fixture(scope="module")
def ended() -> subprocess.CompletedProcess:
    """A process that ended with exit_process."""
    return subprocess.run([sys.executable, "-c", EXIT], cwd=ROOT, capture_output=True, text=True)


def test_process_ends_with_the_exit_code(ended):
    assert ended.returncode == 3


def test_process_runs_exit_handlers_and_flushes_its_output(ended):
    assert ended.stdout == "flushed exit handler\n"


class Exited(BaseException):
    pass


def test_exit_handler_that_hangs_does_not_stop_the_exit(monkeypatch):
    """Such as a handler of wandb."""

    def exit_with(code: int) -> None:
        raise Exited(code)

    monkeypatch.setattr("atexit._run_exitfuncs", lambda: time.sleep(1000))
    monkeypatch.setattr(startup, "EXIT_HANDLERS_TIMEOUT_S", 0.01)
    monkeypatch.setattr("os._exit", exit_with)
    with pytest.raises(Exited) as exited:
        startup.exit_process(75)
    assert exited.value.args == (75,)
