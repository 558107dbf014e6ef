"""Worker processes: results, failures, limits, and their end."""

import os
import signal
import subprocess
import sys
import time
from math import sqrt
from pathlib import Path

import pytest
from bench_helpers import reserve
from helpers import ROOT

from compare.bench.worker import IsolatedCallFailed, Worker
from training.device import resolve_device

FOREVER_S = 3000


@pytest.fixture(scope="module")
def worker():
    with Worker() as worker:
        yield worker


def test_worker_calls_functions_in_one_other_process(worker):
    assert worker.call(sqrt, 4.0) == 2.0
    assert worker.call(os.getpid) == worker.call(os.getpid) != os.getpid()


@pytest.mark.parametrize(
    "function, arguments, status, reason",
    [
        (int, ("x",), "failed", "ValueError: invalid literal for int() with base 10: 'x'"),
        (bytearray, (2**60,), "out of memory", "MemoryError"),
        (os._exit, (3,), "failed", "its process exited with code 3"),
        (os.abort, (), "failed", "its process was killed by SIGABRT"),
        (signal.raise_signal, (signal.SIGKILL,), "out of memory", "its process was killed, probably by Linux"),
    ],
)
def test_worker_reports_the_failure_and_starts_again(worker, function, arguments, status, reason):
    with pytest.raises(IsolatedCallFailed) as failure:
        worker.call(function, *arguments)
    assert failure.value.status == status and reason in failure.value.reason
    assert worker.call(sqrt, 9.0) == 3.0


def test_process_continues_after_a_refusal(worker):
    pid = worker.call(os.getpid)
    with pytest.raises(IsolatedCallFailed, match="device=tpu is unknown") as failure:
        worker.call(resolve_device, "tpu")
    assert failure.value.status == "refused"
    assert worker.call(os.getpid) == pid


def test_time_limit_ends_the_call(worker):
    with pytest.raises(IsolatedCallFailed) as failure:
        worker.call(time.sleep, FOREVER_S, time_limit=0.25)
    assert (failure.value.status, failure.value.reason) == ("time limit", "took longer than 0.25 s")


def test_time_limit_begins_when_the_function_is_called():
    """The process starts and imports before it sends its first message; this takes an unknown time."""
    events = []

    class Connection:
        def send(self, data):
            events.append("request")

        def recv(self):
            events.append("receive")
            return "finished", 1

        def poll(self, seconds):
            events.append(f"wait {seconds} s")
            return True

    worker = Worker()
    worker._process, worker._connection = "running", Connection()
    assert worker.call(sqrt, 1.0, time_limit=5) == 1
    assert events == ["request", "receive", "wait 5 s", "receive"]


def test_worker_has_a_separate_session_which_ctrl_c_does_not_reach(worker):
    assert worker.call(os.getsid, 0) == worker.call(os.getpid) != os.getsid(0)


def has_ended(pid: int) -> bool:
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()  # empty: a zombie, whose parent has not waited for it yet
    except FileNotFoundError:
        return True


def wait_for_end(pid: int) -> bool:
    deadline = time.monotonic() + 300
    while not has_ended(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return has_ended(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_close_ends_the_process():
    with Worker() as worker:
        pid = worker.call(os.getpid)
        assert not has_ended(pid)
    assert wait_for_end(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_worker_ends_if_its_parent_is_killed():
    code = f"""
import os, time
from compare.bench.worker import Worker
worker = Worker()
print(worker.call(os.getpid), flush=True)
worker.call(time.sleep, {FOREVER_S})
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.communicate()
    assert wait_for_end(pid)


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="memory is limited on Linux only")
def test_limit_memory_refuses_more_than_is_available():
    """Without the limit, Linux reserves more memory than there is."""
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    available = 1024 * int(meminfo["MemAvailable"].split()[0])
    with Worker(limit_memory=True) as worker:
        assert worker.call(reserve, 2**30) == 2**30
        with pytest.raises(IsolatedCallFailed) as failure:
            worker.call(reserve, available + 2**29)
    assert failure.value.status == "out of memory"
