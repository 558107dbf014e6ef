"""Calls functions in a separate process, so that a crash, a time limit or a lack of memory ends only that call."""

import ctypes
import gc
import os
import platform
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import torch

from common.errors import UserError, is_out_of_memory


class Worker:
    """A process that calls functions one after another. After a failed call, a new process starts."""

    _pool: ProcessPoolExecutor | None = None
    _pid: int | None = None

    def __init__(self, compile_cache: Path):
        """compile_cache: folder of torch.compile's cache."""
        self.compile_cache = compile_cache

    def call(self, function: Callable, *arguments: Any, time_limit: float) -> tuple[str, Any]:
        """Call a function of a module in the process.

        time_limit: seconds, without the start of the process.
        Returns ("finished", result) or (status, reason). status: refused, out of memory, time limit or failed.
        """
        try:
            if self._pool is None:
                self._start()
            status, result = self._pool.submit(_try_call, function, *arguments).result(time_limit)
        except TimeoutError:
            status, result = "time limit", f"took longer than {time_limit:g} s"
        except BrokenProcessPool:
            status, result = "failed", "its process crashed, or Linux killed it for lack of memory"
        if status not in (
            "finished",
            "refused",
        ):  # the process may be damaged, as it is after an error on a GPU
            self.close()
        return status, result

    def _start(self) -> None:
        self._pool = ProcessPoolExecutor(
            1, get_context("spawn"), _set_up, (str(self.compile_cache),)
        )
        mask = signal.pthread_sigmask(
            signal.SIG_BLOCK, {signal.SIGINT}
        )  # the worker inherits it: Ctrl-C is ignored
        pid = self._pool.submit(os.getpid)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._pid = pid.result()

    def close(self) -> None:
        """End the process, even during a call."""
        if self._pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = self._pid = None


def _set_up(compile_cache: str) -> None:
    """Set up the worker process, which ends with its parent even if the parent is killed."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = compile_cache
    for stream in (1, 2):  # warnings of libraries would break the progress bar
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent_process().join()
    os._exit(1)


def _try_call(function: Callable, *arguments: Any) -> tuple[str, Any]:
    """Call the function. Returns (status, result or reason)."""
    try:
        return "finished", function(*arguments)
    except UserError as error:
        return "refused", str(error).split("; set ")[0]  # without the advice, which is for train.py
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return "out of memory" if is_out_of_memory(error) else "failed", reason
    finally:
        gc.collect()
        torch.cuda.empty_cache()  # the workers of other backends need the memory
        return_freed_memory()


def return_blocks_when_freed(min_bytes: int) -> None:
    """Make glibc's malloc return blocks of this size to the system when they are freed, in this process."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(-3, min_bytes)  # M_MMAP_THRESHOLD


def return_freed_memory() -> None:
    """Return freed blocks of glibc's malloc to the system. The next peak would not count blocks that are reused."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
