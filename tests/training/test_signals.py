"""Signals that stop a run."""

import signal

import pytest

from training.signals import STOP_SIGNALS, StopRequest, raise_interrupt, set_stop_handlers


@pytest.fixture(autouse=True)
def previous_handlers():
    previous = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    yield
    for signum, handler in previous.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize(
    ("second", "has_torchrun"), [("SIGTERM", False), ("SIGUSR1", False), ("SIGINT", True)]
)
def test_second_signal_is_ignored(monkeypatch, second, has_torchrun):
    """torchrun repeats Ctrl-C."""
    if has_torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with StopRequest() as stop:
        stop.enable()
        for signum in (signal.SIGINT, getattr(signal, second), getattr(signal, second)):
            signal.raise_signal(signum)
        assert stop.requested


def test_second_ctrl_c_raises():
    with pytest.raises(KeyboardInterrupt, match="stopped without saving"), StopRequest() as stop:
        stop.enable()
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)


def test_signals_raise_before_the_first_step_and_after_the_loop():
    set_stop_handlers(raise_interrupt)
    with StopRequest() as stop:
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        stop.enable()
        signal.raise_signal(signal.SIGHUP)
        assert stop.requested
    with pytest.raises(KeyboardInterrupt, match="interrupted"):
        signal.raise_signal(signal.SIGHUP)
    signal.raise_signal(signal.SIGTERM)  # a second one does not interrupt the cleanup


def test_ignored_signal_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    set_stop_handlers(raise_interrupt)
    with StopRequest() as stop:
        stop.enable()
        signal.raise_signal(signal.SIGHUP)
        assert not stop.requested
    signal.raise_signal(signal.SIGHUP)
