"""Calls functions in a separate process.

A crash, a time limit or a lack of memory ends only that call.
"""

import gc
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from attention_bench.results import FAILED, FINISHED, OUT_OF_MEMORY, REFUSED, TIME_LIMIT
from common.errors import UserError, is_out_of_memory
from common.process import call_glibc


class Worker:
    """A process that calls functions one after another. After a failed call, a new one starts."""

    def __init__(self, compile_cache: Path):
        """compile_cache: folder of torch.compile's cache."""
        self.compile_cache = compile_cache
        self.process = None
        self.connection = None

    def call(self, function: Callable, *arguments: Any, time_limit: float) -> tuple[str, Any]:
        """Call a function of a module in the process.

        time_limit: seconds, without the start of the process.
        Returns (FINISHED, result) or (status, reason).
        """
        try:
            if self.process is None:
                self._start()
            self.connection.send((function, arguments))
            if not self.connection.poll(time_limit):
                raise TimeoutError
            answer = self.connection.recv()
        except TimeoutError:
            answer = TIME_LIMIT, f"took longer than {time_limit:g} s"
        except (EOFError, OSError):
            answer = FAILED, "its process crashed, or Linux killed it for lack of memory"
        if answer[0] not in (FINISHED, REFUSED):
            self.close()  # the process may be damaged, as it is after an error on a GPU
        return answer

    def _start(self) -> None:
        context = get_context("spawn")
        self.connection, connection = context.Pipe()
        arguments = connection, self.compile_cache
        self.process = context.Process(target=_serve, args=arguments)
        # Ctrl-C reaches all processes of a terminal. The new process inherits that it is blocked.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self.process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        connection.close()
        self.connection.recv()  # it is ready

    def close(self) -> None:
        """End the process, even during a call."""
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.connection.close()
        self.process = None


def _serve(connection: Connection, compile_cache: Path) -> None:
    """Answer calls until the other end is closed."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compile_cache)
    for stream in (1, 2):  # warnings of libraries would break the progress bar
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    connection.send("ready")
    with suppress(EOFError):
        while True:
            function, arguments = connection.recv()
            connection.send(_try_call(function, arguments))


def _try_call(function: Callable, arguments: tuple) -> tuple[str, Any]:
    """Call the function. Returns (status, result or reason)."""
    try:
        return FINISHED, function(*arguments)
    except UserError as error:
        return REFUSED, str(error).split("; set ")[0]  # without the advice, which is for train.py
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        status = OUT_OF_MEMORY if is_out_of_memory(error) else FAILED
        return status, f"{type(error).__name__}: {first_line}"
    finally:
        gc.collect()
        torch.cuda.empty_cache()  # the workers of other backends need the memory
        call_glibc("malloc_trim", 0)  # returns freed blocks to the system
