"""Worker processes: results, failures, limits, and their end."""

import os
import signal
import time
from functools import partial
from math import sqrt

import pytest

from attention_bench.worker import Worker
from common.machine import resolve_device

FOREVER_S = 3000.0


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    worker = Worker(tmp_path_factory.mktemp("cache"))
    worker.call = partial(worker.call, time_limit=FOREVER_S)
    yield worker
    worker.close()


def test_call_returns_the_result(worker):
    assert worker.call(sqrt, 4.0) == ("finished", 2.0)


def test_calls_run_in_one_other_process(worker):
    first = worker.call(os.getpid)
    assert worker.call(os.getpid) == first
    assert first != ("finished", os.getpid())


def test_refusal_has_the_reason_without_the_advice(worker):
    status, reason = worker.call(resolve_device, "tpu")
    assert status == "refused"
    assert "no tpu device" in reason
    assert "set" not in reason


def test_process_continues_after_a_refusal(worker):
    pid = worker.call(os.getpid)
    worker.call(resolve_device, "tpu")
    assert worker.call(os.getpid) == pid


def test_process_has_its_compile_cache(worker):
    folder = str(worker.compile_cache)
    assert worker.call(os.getenv, "TORCHINDUCTOR_CACHE_DIR") == ("finished", folder)


@pytest.mark.parametrize(
    ("function", "arguments", "status", "reason"),
    [
        pytest.param(int, ("x",), "failed", "ValueError: invalid literal", id="exception"),
        pytest.param(bytearray, (2**60,), "out of memory", "MemoryError", id="memory"),
        pytest.param(os._exit, (3,), "failed", "crashed", id="exit"),
        pytest.param(
            signal.raise_signal, (signal.SIGKILL,), "failed", "Linux killed it", id="killed"
        ),
    ],
)
def test_worker_reports_the_failure_and_starts_again(worker, function, arguments, status, reason):
    failed_status, failed_reason = worker.call(function, *arguments)
    assert failed_status == status
    assert reason in failed_reason
    assert worker.call(sqrt, 9.0) == ("finished", 3.0)


def test_process_that_was_killed_between_two_calls_is_a_failure(worker):
    _, pid = worker.call(os.getpid)
    os.kill(pid, signal.SIGKILL)
    worker.process.join()
    assert worker.call(sqrt, 9.0)[0] == "failed"


def test_time_limit_ends_the_process(worker):
    _, pid = worker.call(os.getpid)
    status, reason = worker.call(time.sleep, FOREVER_S, time_limit=0.25)
    assert (status, reason) == ("time limit", "took longer than 0.25 s")
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert worker.call(sqrt, 9.0) == ("finished", 3.0)


def test_ctrl_c_does_not_reach_the_process(worker):
    _, pid = worker.call(os.getpid)
    os.kill(pid, signal.SIGINT)
    assert worker.call(os.getpid) == ("finished", pid)


def test_end_of_the_other_end_ends_the_process(tmp_path):
    worker = Worker(tmp_path)
    worker.call(os.getpid, time_limit=FOREVER_S)
    worker.connection.close()
    worker.process.join(FOREVER_S)
    assert worker.process.exitcode == 0
