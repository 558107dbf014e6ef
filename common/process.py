"""The process of a command: signals, exit codes (common/run_dir.py), and errors as one sentence.

Ctrl-C, SIGTERM, SIGHUP, and the SIGUSR1 and SIGUSR2 of cluster schedulers end every command with exit code 75.
"""

import atexit
import gc
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NoReturn

from common.errors import DISK_FULL_ERRNOS, error_message, printable
from common.run_dir import EXIT_CODES, status_of

STOP_SIGNALS = [s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")]
SPIN_COUNT = "1000"  # idle threads of GNU's OpenMP poll less, and leave a busy machine's cores to others
PYTHON = "uv run" if "UV" in os.environ else "python"  # how the user calls the commands; uv sets UV


def start_process() -> None:
    """Set up signals, output streams and OpenMP, before the slow imports, during which a signal ends the process."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    gc.disable()  # until run_process: collections take 0.3 s of the imports, and free nothing
    set_stop_handlers(_exit_at_once)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a character that the terminal cannot show is escaped


def run_process(main: Callable[..., int], *config: Any) -> NoReturn:
    """Run main(config) as the only work of this process, and exit. Signals raise KeyboardInterrupt in main."""
    gc.freeze()  # modules are not searched for garbage
    gc.enable()

    def main_with_signals() -> int:
        set_stop_handlers(raise_interrupt)
        try:
            return main(*config)
        finally:
            set_stop_handlers(_exit_at_once)

    code = run_main(main_with_signals)
    exit_handlers = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    exit_handlers.start()
    exit_handlers.join(10)  # seconds: wandb removes its temporary files, and its service process may hang
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)  # unloading torch's modules would take 0.5 s


def run_main(main: Callable[..., int], *config: Any) -> int:
    """Run main(config). Returns the exit code. An error that is not a bug is printed as one sentence."""
    try:
        code = main(*config)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of stdout has exited, as in `python sample.py | head`
        return 1
    except (Exception, KeyboardInterrupt) as error:
        is_wrong_path = isinstance(error, OSError) and error.errno not in DISK_FULL_ERRNOS
        status, message = "refused" if is_wrong_path else status_of(error), error_message(error)
        rank = int(os.environ.get("RANK", "0"))
        if rank > 0 and status != "interrupted":
            time.sleep(5)  # rank 0 reports an error that all ranks have; torchrun ends the others when rank 0 exits
        if message is None:
            raise
        if rank == 0 or status != "interrupted":
            with suppress(OSError):  # the terminal is closed, or Ctrl-C has also stopped `tee`
                rank_name = f", rank {rank}" * (rank > 0)
                print(printable(f"{Path(sys.argv[0]).name}{rank_name}: {message}"), file=sys.stderr)
        return EXIT_CODES[status]


def set_stop_handlers(handler) -> None:
    """Handle the stop signals, except ignored ones, such as SIGHUP under nohup."""
    for signum in STOP_SIGNALS:  # docs/train.sbatch ignores SIGUSR1 and SIGUSR2, but only to protect torchrun
        if "USR" in signum.name or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, handler)


def _exit_at_once(signum: int, frame: Any) -> NoReturn:
    """Signal handler that raises nothing: an import may ignore an exception or turn it into another one."""
    os._exit(run_main(raise_interrupt, signum, frame))


def raise_interrupt(signum: int, frame: Any) -> NoReturn:
    """Signal handler that raises KeyboardInterrupt. Later signals except Ctrl-C are ignored during the cleanup."""
    _discard_output_of_closed_terminal()
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    for other in set(STOP_SIGNALS) - {signal.SIGINT}:
        signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt("interrupted")  # with a message, it also ends interactive sampling


class StopRequest(AbstractContextManager):
    """Context manager: after `enable`, a signal sets `requested`, so that the training loop can save and stop."""

    requested = False

    def enable(self) -> None:
        """Call this after a step. Before the first step, there is nothing to save: a signal ends the run at once."""
        set_stop_handlers(self._handle)

    def _handle(self, signum: int, frame: Any) -> None:
        _discard_output_of_closed_terminal()
        is_first, self.requested = not self.requested, True
        has_torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # which repeats signals
        if is_first and os.environ.get("RANK", "0") == "0":
            hint = " Press Ctrl-C again to quit without saving." * (not has_torchrun)
            with suppress(OSError):  # Ctrl-C also stops `tee`. print() is not safe in a signal handler
                os.write(2, f"\nStopping and saving after this step.{hint}\n".encode())
        elif not is_first and signum == signal.SIGINT and not has_torchrun:
            raise KeyboardInterrupt("stopped without saving; steps since the last checkpoint are lost")

    def __exit__(self, *error) -> None:
        if any(signal.getsignal(signum) == self._handle for signum in STOP_SIGNALS):
            set_stop_handlers(raise_interrupt)


def _discard_output_of_closed_terminal() -> None:
    """Otherwise, a print would fail while a checkpoint is saved."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def cpu_count() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def command_line() -> str:
    """The command that started this process, without the folder of the script and the options of torchrun."""
    return shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])
