"""Signals: Ctrl-C and SIGTERM stop a run after its current step. The exit codes are in common/run_dir.py."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


class StopRequest:
    """Context manager: Ctrl-C and SIGTERM set `requested`, so that the training loop can stop after its step.

    A second signal raises KeyboardInterrupt. ignore_repeats: a second signal does nothing, because torchrun and
    schedulers send several signals before they kill the process. silent: print nothing.
    """

    def __init__(self, ignore_repeats: bool, silent: bool):
        self.requested, self.ignore_repeats, self.silent = False, ignore_repeats, silent

    def __enter__(self) -> "StopRequest":
        self.previous = {kind: signal.signal(kind, self._handle) for kind in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _handle(self, number, frame) -> None:
        if self.requested and not self.ignore_repeats:
            raise KeyboardInterrupt("stopped without saving; steps since the last checkpoint are lost")
        if not self.requested and not self.silent:
            hint = "" if self.ignore_repeats else " Press Ctrl-C again to quit without saving."
            message = f"\nStopping after this step, and saving a checkpoint.{hint}\n"
            os.write(2, message.encode())  # print() is not safe in a signal handler
        self.requested = True

    def __exit__(self, *_) -> None:
        for kind, handler in self.previous.items():
            signal.signal(kind, handler)


@contextmanager
def sigterm_as_keyboard_interrupt() -> Iterator[None]:
    """Context manager: SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does."""
    kinds = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    previous = {kind: signal.signal(kind, signal.default_int_handler) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in previous.items():
            signal.signal(kind, handler)
