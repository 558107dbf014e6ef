"""The process of a command: signals, exit codes, errors as one sentence, and its words.

run_process(main, config) runs main(config) and exits. Exit codes: common/run_dir.py.
"""

import gc
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from common.errors import DISK_FULL_ERRNOS, error_message, printable
from common.interrupt import raise_interrupt, set_stop_handlers
from common.run_dir import EXIT_CODES, status_of

# How long a thread of GNU's OpenMP polls for work before it sleeps; the library's default is 300,000. Threads that poll
# on a busy machine take the cores from the threads that have work (docs/experiments/nanogpt-training-speed.md).
SPIN_COUNT = "1000"
RANK_0_REPORTS_FIRST_S = 5.0  # how long other ranks wait before they report an error


def start_process() -> None:
    """Set up signals, output streams and OpenMP, before the slow imports, during which a signal ends the process."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    gc.disable()  # until run_process: collections take 0.3 s of the imports, and free nothing
    set_stop_handlers(_exit_at_once)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a character that the terminal cannot show is escaped


def _exit_at_once(signum: int, frame: Any) -> NoReturn:
    """Signal handler that raises nothing: an import may ignore an exception or turn it into another one."""
    try:
        report_error(KeyboardInterrupt())
    finally:
        os._exit(EXIT_CODES["interrupted"])


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
    for child in multiprocessing.active_children():
        child.kill()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # unloading torch's modules would take 0.5 s, and exit handlers of libraries can hang


def run_main(main: Callable[..., int], *config: Any) -> int:
    """Run main(config). Returns the exit code. Errors that users can correct are printed as one sentence."""
    try:
        code = main(*config)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader of stdout has exited, as in `python sample.py | head`
        return 1
    except (Exception, KeyboardInterrupt) as error:
        return report_error(error)


def report_error(error: BaseException) -> int:
    """Print one sentence about an error, and return the exit code. An error that is a bug is raised again.

    Under torchrun, rank 0 reports an error that all ranks have: torchrun ends the others as soon as rank 0 exits.
    """
    rank, message = int(os.environ.get("RANK", "0")), error_message(error)
    is_wrong_path = isinstance(error, OSError) and error.errno not in DISK_FULL_ERRNOS
    status = "refused" if is_wrong_path else status_of(error)
    if rank > 0 and status != "interrupted":
        time.sleep(RANK_0_REPORTS_FIRST_S)
    if message is None:
        raise error
    if rank == 0 or status != "interrupted":
        prefix = Path(sys.argv[0]).name + (f", rank {rank}" if rank > 0 else "")
        with suppress(OSError):  # the terminal is closed, or Ctrl-C has also stopped `tee`
            print(printable(f"{prefix}: {message}"), file=sys.stderr)
    return EXIT_CODES[status]


def cpu_count() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def command_line() -> str:
    """The command that started this process, without the folder of the script."""
    return shlex.join([*_launcher(), Path(sys.argv[0]).name, *sys.argv[1:]])


def resume_command(name: str) -> str:
    """This process's command line with name= set, which resumes the run."""
    words = [word for word in sys.argv if not word.startswith(("name=", "resume="))]
    return shlex.join([*_launcher(), *words, f"name={name}"])


def _launcher() -> list[str]:
    """Program and arguments that started this process: python, or torchrun, without the address of other machines."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return ["python"]
    nodes, processes = os.environ["GROUP_WORLD_SIZE"], os.environ["LOCAL_WORLD_SIZE"]
    return ["torchrun", f"--nnodes={nodes}", f"--nproc_per_node={processes}"]
