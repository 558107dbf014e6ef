"""Worker processes: results, failures, limits, and their end."""

import os
import signal
import time
from functools import partial
from importlib.metadata import version
from math import sqrt

import pytest

from common.device import resolve_device
from comparison.bench.worker import Worker

FOREVER_S = 3000.0


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    worker = Worker(tmp_path_factory.mktemp("cache"))
    worker.call = partial(worker.call, time_limit=FOREVER_S)
    yield worker
    worker.close()


def test_worker_calls_functions_in_one_other_process(worker):
    pid = worker.call(os.getpid)
    assert worker.call(sqrt, 4.0) == ("finished", 2.0)
    assert worker.call(resolve_device, "tpu") == (
        "refused",
        f"torch {version('torch')} finds no tpu device",
    )
    assert worker.call(os.getpid) == pid != ("finished", os.getpid()), (
        "it continues after a refusal"
    )
    assert worker.call(os.getenv, "TORCHINDUCTOR_CACHE_DIR") == (
        "finished",
        str(worker.compile_cache),
    )


@pytest.mark.parametrize(
    "function, arguments, status, reason",
    [
        (int, ("x",), "failed", "ValueError: invalid literal for int() with base 10: 'x'"),
        (bytearray, (2**60,), "out of memory", "MemoryError"),
        (os._exit, (3,), "failed", "crashed"),
        (signal.raise_signal, (signal.SIGKILL,), "failed", "Linux killed it for lack of memory"),
    ],
)
def test_worker_reports_the_failure_and_starts_again(worker, function, arguments, status, reason):
    failed_status, failed_reason = worker.call(function, *arguments)
    assert failed_status == status and reason in failed_reason
    assert worker.call(sqrt, 9.0) == ("finished", 3.0)


def test_time_limit_ends_the_process(worker):
    _, pid = worker.call(os.getpid)
    os.kill(pid, signal.SIGINT)  # Ctrl-C does not reach the worker
    assert worker.call(time.sleep, FOREVER_S, time_limit=0.25) == (
        "time limit",
        "took longer than 0.25 s",
    )
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert worker.call(sqrt, 9.0) == ("finished", 3.0)
