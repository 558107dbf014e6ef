"""Rounds of a bench: turns, failures, and the figures of a row. These tests start no process."""

from dataclasses import replace
from pathlib import Path

import pytest
from bench_helpers import CONFIG, make_case, make_row

from attention_bench.measure import measure, write_reference
from attention_bench.results import Timing
from attention_bench.runner import REFERENCE, measure_group, summarize

TIMED_OUT = ("time limit", "took longer than 300 s")
TOO_LARGE = ("out of memory", "needed 8.0 GiB more")
NO_REFERENCE = Path("missing.pt")


def make_round(*seconds: float, **changes) -> tuple[Timing, list[float]]:
    """The result of `measure` for calls of these durations. changes: columns of the row."""
    return make_row("naive", 16, 0.0, **changes), list(seconds)


def answer(*seconds: float) -> tuple:
    """The answer of a worker that has measured these calls."""
    return "finished", make_round(*seconds)


class FakeWorker:
    """Replaces a worker process.

    turns: the answer of each turn. order: gets the name of the worker at each turn.
    """

    def __init__(self, name: str, turns: list[tuple], order: list[str]):
        self.name = name
        self.turns = iter(turns)
        self.order = order

    def call(self, function, *arguments, time_limit):
        assert time_limit == CONFIG.time_limit
        assert function is (write_reference if self.name == REFERENCE else measure)
        self.order.append(self.name)
        return next(self.turns)


def run_group(
    reference: Path = NO_REFERENCE, reference_answer: tuple = TIMED_OUT, **turns: list[tuple]
) -> tuple[list[Timing], list[str]]:
    """Measure a group with a backend for each keyword argument. Returns (rows, order of turns)."""
    order = []
    workers = {name: FakeWorker(name, answers, order) for name, answers in turns.items()}
    workers[REFERENCE] = FakeWorker(REFERENCE, [reference_answer], order)
    config = replace(CONFIG, rounds=max(len(answers) for answers in turns.values()))
    group = [make_case(backend=name) for name in turns]
    return measure_group(group, config, workers, reference), order


def test_backends_take_turns_and_each_round_begins_with_another_one():
    _, order = run_group(naive=[answer(1.0)] * 3, flash=[answer(1.0)] * 3)
    assert order == [REFERENCE, "naive", "flash", "flash", "naive", "naive", "flash"]


def test_backend_that_failed_has_no_more_turns():
    _, order = run_group(naive=[answer(1.0)] * 2, flash=[TOO_LARGE] * 2)
    assert order == [REFERENCE, "naive", "flash", "naive"]


def test_row_of_a_failure_has_the_status_and_the_reason():
    (row,), _ = run_group(naive=[TOO_LARGE])
    assert (row.status, row.reason) == TOO_LARGE


def test_rows_have_the_order_of_the_group():
    rows, _ = run_group(naive=[answer(1.0)], flash=[TOO_LARGE], sdpa=[answer(1.0)])
    assert [row.backend for row in rows] == ["naive", "flash", "naive"]  # as the answers say
    assert [row.status for row in rows] == ["finished", "out of memory", "finished"]


def test_time_limit_in_a_later_round_keeps_the_other_rounds():
    (row,), _ = run_group(naive=[answer(2.0), TIMED_OUT, answer(4.0)])
    assert (row.status, row.ms_median) == ("finished", 3000.0)


def test_time_limit_in_the_first_round_is_the_result():
    (row,), _ = run_group(naive=[TIMED_OUT, answer(1.0)])
    assert (row.status, row.ms_median) == ("time limit", None)


def test_lack_of_memory_in_a_later_round_is_the_result():
    (row,), _ = run_group(naive=[answer(1.0), TOO_LARGE])
    assert (row.status, row.ms_median) == ("out of memory", None)


def test_reference_of_another_group_is_removed(tmp_path):
    path = tmp_path / "reference.pt"
    path.touch()
    run_group(path, ("finished", None), naive=[answer(1.0)])
    assert not path.exists()


@pytest.mark.parametrize(
    ("reference_answer", "is_kept"),
    [
        pytest.param(("finished", None), True, id="finished"),
        pytest.param(TIMED_OUT, False, id="incomplete"),
    ],
)
def test_only_a_complete_reference_is_used(tmp_path, monkeypatch, reference_answer, is_kept):
    path = tmp_path / "reference.pt"

    def call(self, function, *arguments, time_limit):
        if self.name == REFERENCE:
            path.touch()
        return next(self.turns)

    monkeypatch.setattr(FakeWorker, "call", call)
    run_group(path, reference_answer, naive=[answer(1.0)])
    assert path.exists() == is_kept


def test_rounds_have_the_same_weight_in_a_row():
    rounds = [make_round(*[1.0] * 500), make_round(3.0), make_round(4.0, 4.0)]
    row = summarize(rounds, flops=1000)
    assert (row.ms_q1, row.ms_median, row.ms_q3) == (1000.0, 3000.0, 4000.0)


def test_row_has_the_flops_of_the_median():
    row = summarize([make_round(2.0), make_round(4.0), make_round(9.0)], flops=1000)
    assert row.flops_per_second == pytest.approx(250)


def test_row_has_the_largest_memory_of_the_rounds():
    rounds = [make_round(1.0, peak_memory_bytes=size) for size in (5, 7, 6)]
    assert summarize(rounds, flops=1).peak_memory_bytes == 7


def test_memory_stays_unknown_where_it_cannot_be_measured():
    assert summarize([make_round(1.0)], flops=1).peak_memory_bytes is None


def test_row_has_the_first_call_of_the_first_round():
    """Later rounds use the compile cache."""
    rounds = [make_round(1.0, first_call_s=seconds) for seconds in (9.0, 1.0)]
    assert summarize(rounds, flops=1).first_call_s == 9.0
