"""Signals that stop a run."""

import signal

import pytest

from common.interrupt import StopRequest


def test_second_signal_raises_unless_repeats_are_ignored():
    with StopRequest(ignore_repeats=True, silent=True) as stop:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert stop.requested
    with (
        pytest.raises(KeyboardInterrupt, match="stopped without saving"),
        StopRequest(ignore_repeats=False, silent=True),
    ):
        for _ in range(2):
            signal.raise_signal(signal.SIGTERM)
