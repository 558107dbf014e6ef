"""Signals that stop a run."""

import signal

import pytest

from common.interrupt import STOP_SIGNALS, StopRequest, Terminated, raise_on_signals


@pytest.fixture(autouse=True)
def previous_handlers():
    previous = {kind: signal.getsignal(kind) for kind in STOP_SIGNALS}
    yield
    for kind, handler in previous.items():
        signal.signal(kind, handler)


def test_second_signal_raises_unless_repeats_are_ignored():
    with StopRequest(ignore_repeats=True, silent=True) as stop:
        stop.enable()
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert stop.requested
    with (
        pytest.raises(KeyboardInterrupt, match="stopped without saving"),
        StopRequest(ignore_repeats=False, silent=True) as stop,
    ):
        stop.enable()
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)


def test_signals_raise_before_the_first_step_and_after_the_loop():
    raise_on_signals()
    with StopRequest(ignore_repeats=False, silent=True) as stop:
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGHUP)
        stop.enable()
        signal.raise_signal(signal.SIGHUP)
        assert stop.requested
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_ignored_signal_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    raise_on_signals()
    with StopRequest(ignore_repeats=False, silent=True) as stop:
        stop.enable()
        signal.raise_signal(signal.SIGHUP)
        assert not stop.requested
    signal.raise_signal(signal.SIGHUP)
