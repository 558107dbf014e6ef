"""Signals: Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 end every command with exit code 75.

A training run saves a checkpoint first. Cluster schedulers send SIGUSR1 or SIGUSR2 before a time limit.
"""

import os
import signal
from contextlib import suppress

WARNING_SIGNALS = [getattr(signal, name) for name in ("SIGUSR1", "SIGUSR2") if hasattr(signal, name)]
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
STOP_SIGNALS += WARNING_SIGNALS


class Terminated(KeyboardInterrupt):
    """A stop signal other than Ctrl-C. It is handled like Ctrl-C, but it also ends interactive sampling."""


def raise_on_signals() -> None:
    """From now on, Ctrl-C raises KeyboardInterrupt, and the other stop signals raise Terminated.

    Ignored signals stay ignored, such as SIGHUP under nohup.
    """
    set_stop_handlers(raise_interrupt)


def raise_interrupt(number, frame) -> None:
    """Signal handler."""
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    for kind in set(STOP_SIGNALS) - {signal.SIGINT}:
        signal.signal(kind, signal.SIG_IGN)  # a second one, from the shell or torchrun, must not stop the cleanup
    raise Terminated


def set_stop_handlers(handler) -> dict:
    """Set the handler of all stop signals that are not ignored. Returns the previous handlers."""
    kinds = [kind for kind in STOP_SIGNALS if signal.getsignal(kind) != signal.SIG_IGN]
    return {kind: signal.signal(kind, handler) for kind in kinds}


class StopRequest:
    """Context manager: after `enable`, a signal sets `requested`, so that the training loop can save and stop.

    Ctrl-C after another signal raises KeyboardInterrupt. A second signal other than Ctrl-C does nothing, because
    schedulers send several. ignore_repeats: a second Ctrl-C does nothing either, because torchrun repeats it. silent:
    print nothing.
    """

    def __init__(self, ignore_repeats: bool, silent: bool):
        self.requested, self.ignore_repeats, self.silent = False, ignore_repeats, silent
        self.previous: dict = {}

    def __enter__(self) -> "StopRequest":
        return self

    def enable(self) -> None:
        """Call this after a step. Before the first step, there is nothing to save: a signal ends the run at once."""
        if not self.previous:
            self.previous = set_stop_handlers(self._handle)

    def _handle(self, number, frame) -> None:
        is_first, self.requested = not self.requested, True
        if not is_first and number == signal.SIGINT and not self.ignore_repeats:
            raise KeyboardInterrupt("stopped without saving; steps since the last checkpoint are lost")
        if is_first and not self.silent:
            hint = "" if self.ignore_repeats else " Press Ctrl-C again to quit without saving."
            message = f"\nStopping after this step, and saving a checkpoint.{hint}\n"
            with suppress(OSError):  # for example, if `tee` was stopped by the same Ctrl-C
                os.write(2, message.encode())  # print() is not safe in a signal handler

    def __exit__(self, *_) -> None:
        for kind, handler in self.previous.items():
            signal.signal(kind, handler)
