"""Signals: Ctrl-C, SIGTERM, SIGHUP, SIGUSR1 and SIGUSR2 end every command with exit code 75.

A training run saves a checkpoint first. Cluster schedulers send SIGUSR1 or SIGUSR2 before a time limit.
"""

import os
import signal
from contextlib import AbstractContextManager, suppress

STOP_SIGNALS = [s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")]


class Terminated(KeyboardInterrupt):
    """A stop signal other than Ctrl-C. It is handled like Ctrl-C, but it also ends interactive sampling."""


def set_stop_handlers(handler) -> dict:
    """Handle the stop signals. Ignored signals stay ignored, such as SIGHUP under nohup. Returns previous handlers.

    SIGUSR1 and SIGUSR2 are always handled: docs/train.sbatch ignores them only to protect torchrun.
    """
    signums = [s for s in STOP_SIGNALS if "USR" in s.name or signal.getsignal(s) != signal.SIG_IGN]
    return {signum: signal.signal(signum, handler) for signum in signums}


def raise_interrupt(signum: int, frame) -> None:
    """Signal handler that raises KeyboardInterrupt. Later signals except Ctrl-C are ignored during the cleanup."""
    discard_output_of_closed_terminal()
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    for other in set(STOP_SIGNALS) - {signal.SIGINT}:
        signal.signal(other, signal.SIG_IGN)
    raise Terminated


class StopRequest(AbstractContextManager):
    """Context manager: after `enable`, a signal sets `requested`, so that the training loop can save and stop.

    A second Ctrl-C raises KeyboardInterrupt, except under torchrun, which repeats signals.
    """

    def __init__(self):
        self.requested = False
        self.previous_handlers: dict = {}

    def enable(self) -> None:
        """Call this after a step. Before the first step, there is nothing to save: a signal ends the run at once."""
        if not self.previous_handlers:
            self.previous_handlers = set_stop_handlers(self._handle)

    def _handle(self, signum: int, frame) -> None:
        discard_output_of_closed_terminal()
        is_first, self.requested = not self.requested, True
        has_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        if is_first and os.environ.get("RANK", "0") == "0":
            hint = "" if has_torchrun else " Press Ctrl-C again to quit without saving."
            with suppress(OSError):  # Ctrl-C also stops `tee`. print() is not safe in a signal handler
                os.write(2, f"\nStopping after this step, and saving a checkpoint.{hint}\n".encode())
        elif signum == signal.SIGINT and not has_torchrun:
            raise KeyboardInterrupt("stopped without saving; steps since the last checkpoint are lost")

    def __exit__(self, *error) -> None:
        for signum, handler in self.previous_handlers.items():
            signal.signal(signum, handler)


def discard_output_of_closed_terminal() -> None:
    """Discard output if the terminal is closed. Otherwise, a print would fail while a checkpoint is saved."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
