"""The command line of every script: argv becomes a checked dataclass, errors become one sentence and an exit code.

config = parse_config("train", __doc__)     exits with code 2 and a sentence if a word is invalid
run_process(main, config)                   runs main(config) and exits; errors also become one sentence
"""

import argparse
import atexit
import errno
import gc
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import yaml

from common.errors import TrainingFailed, UserError, is_out_of_memory, printable
from common.interrupt import WARNING_SIGNALS, raise_interrupt, set_stop_handlers
from common.run_dir import EXIT_CODES
from common.settings import check

DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# File errors that users can correct. Any other OSError is a bug and keeps its traceback.
USER_ERRNOS = DISK_FULL_ERRNOS | {errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST}
USER_ERRNOS |= {errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}
EXIT_HANDLERS_TIMEOUT_S = 10.0
# How long a thread of GNU's OpenMP polls for work before it sleeps; the library's default is 300,000. Threads that poll
# on a busy machine take the cores from the threads that have work (docs/experiments/nanogpt-training-speed.md).
SPIN_COUNT = "1000"
RANK_0_PRINTS_FIRST_S = 5.0  # how long other ranks wait for local rank 0 to print an error that all ranks have
FLAGS = """flags:
  --help            print this page and exit
  --cfg job         print the composed config and exit
  --config-dir DIR  also search DIR for YAML files (DIR/experiment/mine.yaml: experiment=mine)
"""
MULTIRUN_FLAG = """\
  -m                train each combination of several values, as in -m attention=sdpa,flash seed=1,2,3, and compare
                    the runs in runs/sweeps/NAME; hydra/launcher=NAME and hydra.launcher.KEY=VALUE choose where they run
                    sweep.trials=20 'optimizer.lr=log(1e-4,1e-2)' searches the best values in 20 runs
"""


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


def _exit_at_once(number: int, frame: Any) -> NoReturn:
    """Signal handler that raises nothing: an import may ignore an exception or turn it into another one."""
    code = EXIT_CODES["interrupted"]
    try:
        code = report_error("interrupted", code)
    finally:
        os._exit(code)


def parse_config(script: str, doc: str, argv: list[str] | None = None) -> Any:
    """Parse a command line.

    script: its name without .py.
    doc: its docstring, for --help.
    argv: defaults to sys.argv, and also sets up the process's signals and output streams.
    Returns the script's checked config. Exits the process if a word is invalid.
    """
    if argv is None:
        start_process()
    from configs.compose import compose_config  # imports Hydra, which takes 0.2 s

    try:
        flags = _parse_flags(script, argv)
        if flags.help:
            print(_help_page(script, doc))
            raise SystemExit(0)
        if flags.multirun:
            from configs.multirun import run_multirun

            if argv is None:
                run_process(run_multirun, flags)
            raise SystemExit(run_main(run_multirun, flags))
        config = compose_config(script, flags.words, flags.config_dir)
        if script == "compare":
            config.folders += flags.folders
        if flags.cfg:
            print(yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True), end="")
            raise SystemExit(0)
        check(config)
        return config
    except UserError as error:
        raise SystemExit(report_error(error, EXIT_CODES["refused"])) from None
    except OSError as error:  # from reading a file that the command line names
        if error.errno not in USER_ERRNOS:
            raise
        raise SystemExit(report_error(_describe_os_error(error), EXIT_CODES["refused"])) from None


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
    """Run main(config). Returns the exit code; errors that users can correct are printed as one sentence."""
    try:
        code = main(*config)
        sys.stdout.flush()
        return code
    except UserError as error:
        return report_error(error, EXIT_CODES["refused"])
    except TrainingFailed as error:
        return report_error(error, EXIT_CODES["failed"])
    except KeyboardInterrupt as error:
        return report_error(str(error) or "interrupted", EXIT_CODES["interrupted"])
    except BrokenPipeError:  # the reader of stdout has exited, as in `python sample.py | head`
        return 1
    except OSError as error:
        if error.errno not in USER_ERRNOS:
            raise
        return report_error(_describe_os_error(error), EXIT_CODES["failed"])
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return report_error("out of memory; set a smaller batch, context or model", EXIT_CODES["failed"])


def report_error(message: object, code: int) -> int:
    """Print the message. Returns `code`. Under torchrun, local rank 0 prints errors that all ranks have."""
    variable = os.environ.get("RANK", "")
    rank = int(variable) if variable.isdecimal() else 0
    is_interrupted = code == EXIT_CODES["interrupted"]
    if rank > 0 and code == EXIT_CODES["refused"] and os.environ.get("LOCAL_RANK") != "0":
        time.sleep(RANK_0_PRINTS_FIRST_S)  # torchrun ends this process as soon as local rank 0 exits
    if rank == 0 or not is_interrupted:
        prefix = Path(sys.argv[0]).name + (f", rank {rank}" if rank > 0 else "")
        with suppress(OSError):  # the terminal is closed, or Ctrl-C has also stopped `tee`
            print(printable(f"{prefix}: {message}"), file=sys.stderr)
    return code


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


def _describe_os_error(error: OSError) -> str:
    is_full = error.errno in DISK_FULL_ERRNOS
    advice = "free some disk space" if is_full else "set another file, folder or name"
    return f"{error.filename or 'writing a file'}: {error.strerror}; {advice}"


def _parse_flags(script: str, argv: list[str] | None) -> argparse.Namespace:
    """Parse the flags; .words and .launcher_words contain the key=value words. Raises UserError for other words.

    .folders: for compare.py, the other words, and paths such as attention=flash,seed=1, which is a run of a sweep.
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--config-dir")
    if script == "train":
        parser.add_argument("-m", "--multirun", action="store_true")
    parser.set_defaults(multirun=False, launcher_words=[], folders=[])
    try:
        flags, flags.words = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}; see --help") from None
    if flags.multirun:
        flags.launcher_words = [word for word in flags.words if _is_launcher_word(word)]
        flags.words = [word for word in flags.words if not _is_launcher_word(word)]
    if script == "compare":
        flags.folders = [word for word in flags.words if not re.match(r"[+~-]|[\w.-]+=", word) or Path(word).exists()]
        flags.words = [word for word in flags.words if word not in flags.folders]
    for index, word in enumerate(flags.words):
        key = word.split("=", 1)[0]
        if word.startswith("-"):
            from configs.error_messages import explain_unknown_flag

            raise UserError(explain_unknown_flag(script, *flags.words[index : index + 2]))
        if word.startswith(("+", "~")):
            raise UserError(f"{word}: keys cannot be added or removed; set {key.lstrip('+~')}=VALUE instead")
        if re.match(r"hydra\b", key):
            allowed = " (with -m, hydra/launcher and hydra.launcher.KEY are allowed)" if script == "train" else ""
            raise UserError(f"{key} is a setting of Hydra, which this command does not use; remove this key{allowed}")
        if not re.match(r"[\w.-]+=", word):
            raise UserError(f"{word!r} is not of the form key=value; see --help")
    return flags


def _is_launcher_word(word: str) -> bool:
    """Whether a word sets Hydra's launcher. A _target_ is refused: it could run any code."""
    return word.startswith(("hydra/launcher=", "hydra.launcher.")) and "_target_" not in word


def _help_page(script: str, doc: str) -> str:
    from configs.compose import list_choices, list_groups

    lines = [f"  {group + '=':14}{' | '.join(list_choices(group))}" for group in list_groups(script)]
    lines = ["groups and their choices:", *lines, ""] if lines else []
    flags = FLAGS + (MULTIRUN_FLAG if script == "train" else "")
    return "\n".join([doc.strip(), "", *lines, flags.rstrip()])
