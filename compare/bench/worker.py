"""Calls functions in a separate Python process, so that a crash or a lack of memory ends only that call.

A worker process serves any number of calls and imports torch once. After a failed call, a new process starts.
"""

import gc
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from common.errors import TrainingFailed, UserError, is_out_of_memory
from common.system import available_memory, process_memory, return_freed_memory

TERMINATE_GRACE_S = 2.0  # for exit handlers, which release semaphores and end compiler processes


class IsolatedCallFailed(TrainingFailed):
    """A call in a worker failed. status: refused, out of memory, time limit or failed. reason: one sentence."""

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


class Worker(AbstractContextManager):
    """Context manager: a Python process that calls functions one after another, and ends with the context.

    environment: environment variables of the process, in addition to those of the current process.
    limit_memory: on Linux, allocations beyond the available memory fail, before the system swaps or kills.
    """

    def __init__(self, environment: dict[str, str] | None = None, limit_memory: bool = False):
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self.environment = os.environ | {"PYTHONPATH": paths} | (environment or {})
        self.limit_memory = limit_memory
        self._process: subprocess.Popen | None = None

    def call(self, function: Callable, *arguments: Any, time_limit: float | None = None) -> Any:
        """Return function(*arguments), called in the worker. `function` must be importable from a module.

        time_limit: seconds that the call may take. The start of the process and imports do not count.
        Raises IsolatedCallFailed if the call raises, crashes or exceeds the limit.
        """
        if self._process is None:
            self._start()
        try:
            self._connection.send((function, arguments, self.limit_memory))
            self._connection.recv()  # the worker has imported the function and calls it now
            in_time = self._connection.poll(time_limit)
            status, result = (
                self._connection.recv() if in_time else ("time limit", f"took longer than {time_limit:g} s")
            )
        except (EOFError, OSError):  # the process ended
            status, result = self._explain_crash()
        except BaseException:  # Ctrl-C: the reply to this call must not become that of the next one
            self.close()
            raise
        if status == "finished":
            return result
        if status != "refused":  # the process may be damaged, as it is after an error on a GPU
            self.close()
        raise IsolatedCallFailed(status, result)

    def _start(self) -> None:
        self._connection, worker_connection = Pipe()
        self._log = tempfile.TemporaryFile()  # library output would break the progress bar  # noqa: SIM115
        with worker_connection:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(worker_connection.fileno())],
                pass_fds=[worker_connection.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env=self.environment,
                start_new_session=True,  # Ctrl-C does not reach the worker; the current process ends it
            )

    def close(self) -> None:
        """End the process and all processes that it started, such as compilers."""
        process, self._process = self._process, None
        if process is None:
            return
        self._connection.close()  # an idle worker exits
        with suppress(subprocess.TimeoutExpired):
            process.wait(TERMINATE_GRACE_S)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._log.close()

    def _explain_crash(self) -> tuple[str, str]:
        code = self._process.wait()
        if code == -signal.SIGKILL:
            return "out of memory", "its process was killed, probably by Linux for lack of memory"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        cause = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        return "failed", ": ".join([f"its process {cause}", *lines[-1:]])

    def __exit__(self, *_) -> None:
        self.close()


def _serve(connection: Connection) -> None:
    """The loop of the worker process: receive a function, call it, send its result."""
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    with suppress(EOFError, OSError):  # the parent has closed the connection, or has ended
        while True:
            function, arguments, limit_memory = connection.recv()
            connection.send("started")
            if limit_memory:
                _limit_memory()
            reply = try_call(function, *arguments)
            gc.collect()
            torch.cuda.empty_cache()  # the workers of other backends need the memory
            return_freed_memory()
            connection.send(reply)
    gc.freeze()  # the exit would search torch's modules for garbage, which takes half a second


def _end_with_parent(parent: int) -> None:
    """Thread: end this process during a call if the parent is killed."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)


def try_call(function: Callable, *arguments: Any) -> tuple[str, Any]:
    """Call the function -> (status, result). If it raises, the second value is the reason."""
    try:
        return "finished", function(*arguments)
    except UserError as error:
        return "refused", str(error)
    except Exception as error:
        reason = traceback.format_exception_only(error)[0].strip().split("\n")[0]
        return "out of memory" if is_out_of_memory(error) else "failed", reason


def _limit_memory() -> None:
    available = available_memory()
    if available is not None:
        _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (available + process_memory("VmData"), hard_limit))


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
