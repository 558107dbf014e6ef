"""The process of a command: signals, exit codes, and errors as one sentence.

run_process(main, config) runs main(config) and exits. Exit codes: common/run_dir.py.
"""

import atexit
import errno
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from common.errors import TrainingFailed, UserError, is_out_of_memory, printable
from common.interrupt import WARNING_SIGNALS, raise_interrupt, set_stop_handlers
from common.run_dir import EXIT_CODES

# File errors that users can correct. Any other OSError is a bug and keeps its traceback.
DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
USER_ERRNOS = DISK_FULL_ERRNOS | {errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST}
USER_ERRNOS |= {errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
EXIT_HANDLERS_TIMEOUT_S = 10.0
# How long a thread of GNU's OpenMP polls for work before it sleeps; the library's default is 300,000. Threads that poll
# on a busy machine take the cores from the threads that have work (docs/experiments/nanogpt-training-speed.md).
SPIN_COUNT = "1000"
RANK_0_PRINTS_FIRST_S = 5.0  # how long other ranks wait for local rank 0 to print an error that all ranks have


def start_process() -> None:
    """Set up signals, output streams and OpenMP, before the slow imports, during which a signal ends the process."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    gc.disable()  # until run_process: collections take 0.3 s of the imports, and free nothing
    for signum in WARNING_SIGNALS:
        signal.signal(signum, _exit_at_once)  # even if it is ignored, as in docs/train.sbatch to protect torchrun
    set_stop_handlers(_exit_at_once)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a character that the terminal cannot show is escaped


def _exit_at_once(signum: int, frame: Any) -> NoReturn:
    """Signal handler that raises nothing: an import may ignore an exception or turn it into another one."""
    try:
        report_error("interrupted", "interrupted")
    finally:
        os._exit(EXIT_CODES["interrupted"])


def run_process(main: Callable[..., int], *config: Any) -> NoReturn:
    """Run main(config) as the only work of this process, and exit. Signals raise KeyboardInterrupt in main."""
    gc.freeze()  # modules are not searched for garbage
    gc.enable()

    def main_with_signals(*config: Any) -> int:
        set_stop_handlers(raise_interrupt)
        try:
            return main(*config)
        finally:
            set_stop_handlers(_exit_at_once)

    exit_fast(run_main(main_with_signals, *config))


def run_main(main: Callable[..., int], *config: Any) -> int:
    """Run main(config). Returns the exit code. Errors that users can correct are printed as one sentence."""
    try:
        code = main(*config)
        sys.stdout.flush()
        return code
    except UserError as error:
        return report_error(error, "refused")
    except TrainingFailed as error:
        return report_error(error, "failed")
    except KeyboardInterrupt as error:
        return report_error(str(error) or "interrupted", "interrupted")
    except BrokenPipeError:  # the reader of stdout has exited, as in `python sample.py | head`
        return 1
    except OSError as error:
        if error.errno not in USER_ERRNOS:
            raise
        is_full = error.errno in DISK_FULL_ERRNOS
        advice = "free some disk space" if is_full else "set another file, folder or name"
        message = f"{error.filename or 'writing a file'}: {error.strerror}; {advice}"
        return report_error(message, "failed" if is_full else "refused")
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return report_error("out of memory; set a smaller batch, context or model", "failed")


def report_error(message: object, status: str) -> int:
    """Print the message. Returns the exit code. Under torchrun, local rank 0 prints errors that all ranks have."""
    variable = os.environ.get("RANK", "")
    rank = int(variable) if variable.isdecimal() else 0
    if rank > 0 and status == "refused" and os.environ.get("LOCAL_RANK") != "0":
        time.sleep(RANK_0_PRINTS_FIRST_S)  # torchrun ends this process as soon as local rank 0 exits
    if rank == 0 or status != "interrupted":
        prefix = Path(sys.argv[0]).name + (f", rank {rank}" if rank > 0 else "")
        with suppress(OSError):  # the terminal is closed, or Ctrl-C has also stopped `tee`
            print(printable(f"{prefix}: {message}"), file=sys.stderr)
    return EXIT_CODES[status]


def exit_fast(code: int) -> NoReturn:
    """Exit without unloading torch's modules, which takes most of a second. Exit handlers run for a limited time."""
    for child in multiprocessing.active_children():  # an exit handler would wait for them
        child.kill()
    exit_handlers = threading.Thread(target=atexit._run_exitfuncs, daemon=True)
    exit_handlers.start()
    exit_handlers.join(EXIT_HANDLERS_TIMEOUT_S)  # wandb's handler waits for its service process, which may be stalled
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
