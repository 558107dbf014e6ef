"""Calls functions in a separate Python process, so that a crash or a lack of memory ends only that call.

A worker process serves any number of calls and imports torch once. After a failed call, a new process starts.
"""

import gc
import os
import pickle
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
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


class Worker:
    """Context manager: a Python process that calls functions one after another, and ends with the context.

    environment: environment variables of the process, in addition to those of the current process.
    """

    def __init__(self, environment: dict[str, str] | None = None):
        paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
        self.environment = os.environ | {"PYTHONPATH": paths} | (environment or {})
        self._process: subprocess.Popen | None = None

    def call(
        self, function: Callable, *arguments: Any, time_limit: float | None = None, limit_memory: bool = False
    ) -> Any:
        """Return function(*arguments), called in the worker. `function` must be importable from a module.

        time_limit: seconds that the call may take. The start of the process and imports do not count.
        limit_memory: on Linux, allocations beyond the available memory fail. The system neither swaps nor kills.
        Raises IsolatedCallFailed if the call raises, crashes or exceeds the limit.
        """
        if self._process is None:
            self._start()
        try:
            self._connection.send_bytes(pickle.dumps((function, arguments, limit_memory)))
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
        return "failed", f"its process {cause}" + (f": {lines[-1]}" if lines else "")

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _serve(connection: Connection) -> None:
    """The loop of the worker process: receive a function, call it, send its result."""
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(connection, requests), daemon=True).start()
    while (request := requests.get()) is not None:
        function, arguments, limit_memory = pickle.loads(request)
        connection.send("started")
        if limit_memory:
            _limit_memory()
        status, result = _call(function, arguments)
        _release_memory()
        connection.send((status, result))


def _receive(connection: Connection, requests: queue.SimpleQueue) -> None:
    """Thread: put requests into the queue. End this process if the parent closes the connection or dies."""
    with suppress(EOFError, OSError):
        while True:
            requests.put(connection.recv_bytes())
    requests.put(None)
    time.sleep(TERMINATE_GRACE_S)
    os.killpg(0, signal.SIGKILL)


def _call(function: Callable, arguments: tuple) -> tuple[str, Any]:
    """Call the function -> (status, result). If it raises, the second value is the reason."""
    try:
        return "finished", function(*arguments)
    except UserError as error:
        return "refused", str(error)
    except Exception as error:
        if is_out_of_memory(error):
            return "out of memory", _requested_memory(error)
        return "failed", f"{type(error).__name__}: {_first_line(error)}"


def _limit_memory() -> None:
    available = available_memory()
    if available is not None:
        import resource

        _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (available + process_memory("VmData"), hard_limit))


def _release_memory() -> None:
    """Return freed memory to the system and to the GPU, where the worker of another backend needs it."""
    gc.collect()
    torch.cuda.empty_cache()
    return_freed_memory()


def _requested_memory(error: Exception) -> str:
    """Return "needed 64.0 GiB more", if PyTorch's message contains the size."""
    found = re.search(r"tried to allocate ([\d.]+) (\w+)", str(error), re.IGNORECASE)
    if not found:
        return _first_line(error) or type(error).__name__
    size, unit = float(found.group(1)), found.group(2)
    return f"needed {size / 2**30:,.1f} GiB more" if unit == "bytes" else f"needed {size:g} {unit} more"


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0]


if __name__ == "__main__":
    _serve(Connection(int(sys.argv[1])))
