"""Rounds of a bench: turns, failures, and the figures of a row. These tests start no process."""

from dataclasses import replace
from pathlib import Path

import pytest
from bench_helpers import CONFIG, make_case, make_row

from comparison.bench.cases import measure
from comparison.bench.runner import REFERENCE, measure_group, summarize

TIMED_OUT = "time limit", "took longer than 300 s"


def answer(*seconds, **changes):
    """The answer of a worker that has measured these calls."""
    return "finished", (make_row("naive", 16, 0.0, **changes), list(seconds))


class FakeWorker:
    """Replaces a worker process. turns: the answer of each turn. order: gets the name of the worker at each turn."""

    def __init__(self, name, turns, order):
        self.name, self.turns, self.order = name, iter(turns), order

    def call(self, function, *arguments, time_limit):
        assert time_limit == CONFIG.time_limit and (function is measure) == (self.name != REFERENCE)
        self.order.append(self.name)
        return next(self.turns)


def run_group(reference=Path("missing.pt"), references=(TIMED_OUT,), **turns):
    """Measure a group with a backend for each keyword argument. Returns (rows, order of turns)."""
    order = []
    workers = {
        name: FakeWorker(name, values, order)
        for name, values in (turns | {REFERENCE: references}).items()
    }
    config = replace(CONFIG, rounds=max(len(values) for values in turns.values()))
    return measure_group(
        [make_case(backend=name) for name in turns], config, workers, reference
    ), order


def test_backends_take_turns_and_each_round_begins_with_another_one():
    _, order = run_group(naive=[answer(1.0)] * 3, flash=[answer(1.0)] * 3)
    assert order == [REFERENCE, "naive", "flash", "flash", "naive", "naive", "flash"]


@pytest.mark.parametrize(
    "turns, status, ms",
    [
        ([answer(2.0), TIMED_OUT, answer(4.0)], "finished", 3000.0),
        ([answer(1.0), ("out of memory", "needed 8.0 GiB more")], "out of memory", None),
    ],
)
def test_time_limit_in_a_later_round_keeps_the_other_rounds(turns, status, ms):
    ((row,), _) = run_group(naive=turns)
    assert (row.status, row.ms_median) == (status, ms)


def test_rounds_have_the_same_weight_in_a_row():
    rounds = [([1.0] * 500, 5, 9.0), ([3.0], 7, 1.0), ([4.0, 4.0], 6, 1.0)]
    results = [
        answer(*seconds, peak_memory_bytes=memory, compile_s=c)[1] for seconds, memory, c in rounds
    ]
    row = summarize(results, flops=1000)
    assert (row.ms_q1, row.ms_median, row.ms_q3) == (1000.0, 3000.0, 4000.0)
    assert row.flops_per_second == pytest.approx(1000 / 3)
    assert row.peak_memory_bytes == 7 and row.compile_s == 9.0, "later rounds use the compile cache"
