"""Signals: Ctrl-C and SIGTERM stop a run after its current step."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # torch, which a config's check need not wait for
    pass


class StopRequest:
    """Ctrl-C or SIGTERM asks the loop to stop after the step at hand; a second one stops at once.

    patient: it does not. torchrun and schedulers send several, and kill after half a minute anyway. silent: do not say.
    """

    def __init__(self, ignore_repeats: bool, silent: bool):
        self.requested, self.patient, self.silent = False, ignore_repeats, silent

    def __enter__(self) -> "StopRequest":
        self.before = {kind: signal.signal(kind, self._handle) for kind in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _handle(self, number, frame) -> None:
        if self.requested and not self.patient:
            raise KeyboardInterrupt("stopped at once; what no checkpoint holds is lost")
        if not self.requested and not self.silent:
            again = "" if self.patient else "; once more stops at once"
            os.write(2, f"\nstopping after this step, and saving{again}\n".encode())  # print() is not for handlers
        self.requested = True

    def __exit__(self, *_) -> None:
        for kind, handler in self.before.items():
            signal.signal(kind, handler)


@contextmanager
def sigterm_as_keyboard_interrupt() -> Iterator[None]:
    """Inside, what asks the process to end, or a terminal that is closed, does as Ctrl-C does."""
    kinds = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {kind: signal.signal(kind, signal.default_int_handler) for kind in kinds}
    try:
        yield
    finally:
        for kind, handler in before.items():
            signal.signal(kind, handler)
