"""Rounds of a bench and its processes: turns, failures, limits, and the figures of a row."""

import multiprocessing.connection
import os
import signal
import sys
import time
from dataclasses import replace
from math import sqrt
from unittest.mock import Mock

import pytest
from bench_helpers import CONFIG, make_case, parent_death_signal

from attention_bench import measure as measure_module
from attention_bench.measure import (
    call_process,
    kill_processes,
    measure_group,
    summarize,
    try_call,
)
from common.machine import resolve_device

FOREVER_S = 3000.0
TOO_LARGE = ("out of memory", "needed 8.0 GiB more")


@pytest.fixture(scope="module")
def call():
    """call(function, ...) calls it in a process."""
    pools: dict = {}

    def call_in_process(function, *arguments, time_limit=FOREVER_S):
        return call_process(pools, "a", time_limit, function, *arguments)

    yield call_in_process
    kill_processes(pools)


def test_calls_run_in_one_other_process(call):
    first = call(os.getpid)
    assert call(os.getpid) == first
    assert first != ("finished", os.getpid())


def test_ctrl_c_does_not_reach_the_process(call):
    _, pid = call(os.getpid)
    os.kill(pid, signal.SIGINT)
    assert call(os.getpid) == ("finished", pid)


@pytest.mark.skipif(sys.platform != "linux", reason="NOT RUN: only Linux has prctl")
def test_process_ends_with_a_killed_bench(call):
    assert call(parent_death_signal) == ("finished", signal.SIGKILL)


def test_crash_is_reported_and_the_next_call_runs(call):
    status, reason = call(signal.raise_signal, signal.SIGKILL)
    assert status == "failed"
    assert "Linux killed it" in reason
    assert call(sqrt, 9.0) == ("finished", 3.0)


def test_time_limit_ends_the_process(call):
    call(os.getpid)
    (process,) = multiprocessing.active_children()
    answer = call(time.sleep, FOREVER_S, time_limit=0.25)
    assert answer == ("time limit", "took longer than 0.25 s")
    assert multiprocessing.connection.wait([process.sentinel], timeout=60)


@pytest.mark.parametrize(
    ("function", "argument", "status", "reason"),
    [
        pytest.param(resolve_device, "tpu", "refused", "no tpu device", id="refusal"),
        pytest.param(int, "x", "failed", "ValueError: invalid literal", id="exception"),
        pytest.param(bytearray, 2**60, "out of memory", "MemoryError", id="memory"),
    ],
)
def test_error_has_its_status_and_a_reason_without_advice(function, argument, status, reason):
    error_status, error_reason = try_call(function, argument)
    assert error_status == status
    assert reason in error_reason
    assert "set" not in error_reason


def finish(*seconds: float, **columns) -> tuple:
    """The answer of a process that has measured these calls."""
    return "finished", (make_case() | columns, list(seconds))


@pytest.fixture
def run_group(monkeypatch):
    """run_group(reference, answer, ...) -> (rows, backends in the order of their turns).

    Measures naive and flash in two rounds, with processes that give these answers.
    """

    def run(*answers: tuple) -> tuple[list[dict], list[str]]:
        process = Mock(side_effect=answers)
        monkeypatch.setattr(measure_module, "call_process", process)
        group = [make_case(backend=name) for name in ("naive", "flash")]
        rows = measure_group(group, replace(CONFIG, rounds=2), {})
        return rows, [call.args[1] for call in process.call_args_list]

    return run


def test_backends_take_turns(run_group):
    _, turns = run_group(*[finish(1.0)] * 5)
    assert turns == ["reference", "naive", "flash", "naive", "flash"]


@pytest.mark.parametrize(
    "answers",
    [
        pytest.param([TOO_LARGE, finish(1.0), finish(1.0)], id="first round"),
        pytest.param([finish(1.0), finish(1.0), TOO_LARGE, finish(1.0)], id="second round"),
    ],
)
def test_failure_is_the_row_and_the_last_turn(run_group, answers):
    rows, _ = run_group(finish(1.0), *answers)
    assert (rows[0]["status"], rows[0]["reason"]) == TOO_LARGE
    assert [row["status"] for row in rows] == ["out of memory", "finished"]


def test_cases_are_measured_without_a_reference_that_failed(monkeypatch):
    process = Mock(side_effect=[TOO_LARGE, finish(1.0)])
    monkeypatch.setattr(measure_module, "call_process", process)
    measure_group([make_case()], CONFIG, {})
    assert process.call_args.args[-1] is None


def test_row_has_quartiles_of_all_rounds():
    results = [finish(1.0, 2.0)[1], finish(3.0, 4.0, 5.0)[1]]
    row = summarize(results)
    assert (row["ms_q1"], row["ms_median"], row["ms_q3"]) == (2000.0, 3000.0, 4000.0)


def test_row_has_the_first_call_of_the_first_round():
    """Later rounds do not compile."""
    results = [finish(1.0, first_call_s=seconds)[1] for seconds in (9.0, 1.0)]
    assert summarize(results)["first_call_s"] == 9.0
