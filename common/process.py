"""The process of a command: signals, exit codes, start-up and memory tuning, its machine.

Ctrl-C, SIGTERM, SIGHUP, and the SIGUSR1 and SIGUSR2 of cluster schedulers end every command with
exit code 75. common/errors.py has the other exit codes. The last line of an interrupted run, with
the command that resumes it, is made by RunFolder.end.

Gains of the tuning, measured on two cores of an Intel Xeon (family 6, model 167), as medians of 5
or 7 pairs:

    no garbage collection during imports    0.3 s of 1.2 s until train.py is imported
    without_dynamo                          0.8 s of 1.7 s until the first optimizer step
    exit_process                            0.15 s of 2.4 s for a run of three steps
    keep_freed_memory                       10 % of a step of the default run
    GOMP_SPINCOUNT                          nothing on an idle machine; on a busy one, steps take 4
                                            to 50 times as long without it
"""

import atexit
import ctypes
import gc
import io
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from inspect import currentframe, unwrap
from pathlib import Path
from typing import Any, NoReturn

from common.errors import DISK_FULL_ERRNOS, EXIT_CODES, error_message, printable, status_of

STOP_SIGNALS = [
    s for s in signal.Signals if s.name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
]
LATER_RANKS_WAIT_S = 5  # so that rank 0 is the first to report an error that all ranks have


def start_process() -> None:
    """Set up a command before its slow imports, during which a signal ends the process."""
    set_stop_handlers(_exit_at_once)
    gc.disable()  # imports create many objects, but no garbage
    if "OMP_WAIT_POLICY" not in os.environ:
        # idle threads of GNU's OpenMP wait instead of poll; torch reads it when it is imported
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    # Daemons close the standard streams. No file of a run may get their descriptors, 0 to 2.
    while os.open(os.devnull, os.O_RDWR) <= 2:
        pass
    # None is a closed stream
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (stays open)
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # not in a notebook
            stream.reconfigure(errors="backslashreplace")  # characters that a terminal cannot show


def run_process(main: Callable[..., int], *config: Any) -> NoReturn:
    """Run main(config) as the only work of this process, and exit with its exit code.

    A signal raises KeyboardInterrupt in main. A script that another program runs, such as a
    profiler or %run in a notebook, raises SystemExit.
    """
    gc.freeze()  # do not search the imported modules for garbage
    gc.enable()
    set_stop_handlers(raise_interrupt)
    code = run_main(main, *config)
    if currentframe().f_back.f_back is not None:
        raise SystemExit(code)
    set_stop_handlers(_exit_at_once)  # an exit handler may ignore an exception
    exit_process(code)


def run_main(main: Callable[..., int], *config: Any) -> int:
    """Run main(config). Returns the exit code. An error that is no bug is one sentence."""
    try:
        code = main(*config)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of stdout has exited, as in `python sample.py | head`
        return 1
    except (Exception, KeyboardInterrupt) as error:
        status = status_of(error)
        if isinstance(error, OSError) and error.errno not in DISK_FULL_ERRNOS:
            status = "refused"  # a wrong path
        message = error_message(error)
        rank = os.environ.get("RANK", "0")
        if rank != "0" and status != "interrupted":
            time.sleep(LATER_RANKS_WAIT_S)  # torchrun ends all ranks when rank 0 exits
        if message is None:
            raise
        if rank == "0" or status != "interrupted":
            sender = Path(sys.argv[0]).name
            if rank != "0":
                sender += f", rank {rank}"
            with suppress(OSError):  # the terminal is closed, or Ctrl-C has also stopped `tee`
                print(printable(f"{sender}: {message}"), file=sys.stderr)
        return EXIT_CODES[status]


def set_stop_handlers(handler: Any) -> None:
    """Handle the stop signals, except ignored ones, such as SIGHUP under nohup."""
    for signum in STOP_SIGNALS:
        # docs/train.sbatch ignores SIGUSR1 and SIGUSR2, but only to protect torchrun
        if "USR" in signum.name or signal.getsignal(signum) != signal.SIG_IGN:
            signal.signal(signum, handler)


def _exit_at_once(signum: int, frame: Any) -> NoReturn:
    """Signal handler during imports, which may ignore an exception or turn it into another one."""
    os._exit(run_main(raise_interrupt, signum, frame))


def raise_interrupt(signum: int, frame: Any) -> NoReturn:
    """Signal handler: raises KeyboardInterrupt.

    Later signals except Ctrl-C are ignored, so that they do not interrupt the cleanup.
    """
    _discard_output_of_closed_terminal()
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    for other in STOP_SIGNALS:
        if other != signal.SIGINT:
            signal.signal(other, signal.SIG_IGN)
    raise KeyboardInterrupt("interrupted")  # with a message, it also ends interactive sampling


class StopRequest(AbstractContextManager):
    """Context manager: a signal sets `requested`, so that the training loop can save and stop.

    Before `enable` is called, there is nothing to save: a signal raises KeyboardInterrupt.
    """

    requested = False

    def enable(self) -> None:
        """Call this after a step."""
        set_stop_handlers(self._handle)

    def _handle(self, signum: int, frame: Any) -> None:
        _discard_output_of_closed_terminal()
        has_torchrun = "TORCHELASTIC_RUN_ID" in os.environ  # which repeats signals
        if self.requested:
            if signum == signal.SIGINT and not has_torchrun:
                raise KeyboardInterrupt(
                    "stopped without saving; steps since the last checkpoint are lost"
                )
            return
        self.requested = True
        if os.environ.get("RANK", "0") == "0":
            line = "\nStopping and saving after this step."
            if not has_torchrun:
                line += " Press Ctrl-C again to quit without saving."
            with suppress(OSError):  # Ctrl-C has also stopped `tee`
                os.write(2, f"{line}\n".encode())  # print is not safe in a signal handler

    def __exit__(self, *error: object) -> None:
        if any(signal.getsignal(signum) == self._handle for signum in STOP_SIGNALS):
            set_stop_handlers(raise_interrupt)


def _discard_output_of_closed_terminal() -> None:
    """Otherwise, a print would fail while a checkpoint is saved."""
    for descriptor in (1, 2):
        try:
            os.write(descriptor, b"")
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def exit_process(code: int) -> NoReturn:
    """Run exit handlers, and exit without unloading modules."""
    # Private: atexit has no public function that runs the handlers. Checked with Python 3.13.
    atexit._run_exitfuncs()
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)


def keep_freed_memory() -> None:
    """Let malloc reuse the memory that a step frees: the system zeroes new memory page by page."""
    # M_MMAP_THRESHOLD: the largest possible; larger blocks are always new
    call_glibc("mallopt", -3, 2**25)
    call_glibc("mallopt", -1, -1)  # M_TRIM_THRESHOLD: never


def without_dynamo(optimizer_class: type) -> type:
    """Class decorator for an optimizer: its methods no longer import torch._dynamo when called."""
    for name in ("add_param_group", "state_dict", "load_state_dict"):
        setattr(optimizer_class, name, unwrap(getattr(optimizer_class, name)))
    return optimizer_class


def command_line() -> str:
    """The command that started this process.

    The folder of the script and the options of torchrun are left out.
    """
    return shlex.join(["python", Path(sys.argv[0]).name, *sys.argv[1:]])


def cpu_count() -> int:
    """CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def call_glibc(function: str, *arguments: int) -> None:
    """Call a function of glibc, such as mallopt. Without glibc, do nothing."""
    if platform.libc_ver()[0] == "glibc":
        getattr(ctypes.CDLL(None), function)(*arguments)
