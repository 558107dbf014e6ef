"""Rounds of a bench: turns, time limits, and the figures of a row. These tests start no process."""

from dataclasses import replace

import pytest
from bench_helpers import CONFIG, make_case

from compare.bench.cases import BenchResult, measure
from compare.bench.runner import BenchRunner, summarize
from compare.bench.worker import IsolatedCallFailed
from model.attention import ResolvedAttention

RESULT = BenchResult(
    ResolvedAttention("naive", "naive"),
    seconds=[1.0],
    wall_seconds=2.0,
    peak_memory_bytes=5,
    compile_s=None,
    errors={},
    mask_seconds=None,
)
TIMED_OUT = IsolatedCallFailed("time limit", "took longer than 300 s")


class FakeWorker:
    """Replaces a worker process. answer(T): the result of measure(), or the failure to raise."""

    def __init__(self, answer):
        self.answer, self.time_limits = answer, []

    def call(self, function, case, *_, time_limit):
        if function is not measure:
            raise IsolatedCallFailed("out of memory", "no reference, and no peak")
        self.time_limits.append(time_limit)
        result = self.answer(case.request.Tk)
        if isinstance(result, IsolatedCallFailed):
            raise result
        return result


def make_runner(folder, rounds, **answers):
    workers = {name: FakeWorker(answer) for name, answer in answers.items()}
    return BenchRunner(replace(CONFIG, rounds=rounds), workers, FakeWorker(None), folder / "reference.pt")


def run_naive(runner, T):
    (row,) = runner.run_group([make_case(T=T)], lambda part: None)
    return row


def test_time_limit_is_a_row_and_larger_contexts_are_not_tried(tmp_path):
    runner = make_runner(tmp_path, 3, naive=lambda T: TIMED_OUT if T > 8 else RESULT)
    rows = [run_naive(runner, T) for T in (8, 2048, 4096)]
    assert [row.status for row in rows] == ["finished", "time limit", "time limit"]
    assert rows[1].reason == "took longer than 300 s"
    assert rows[2].reason == "not tried, as T = 2,048 took longer than 300 s"
    assert len(runner.workers["naive"].time_limits) == 3 + 1


def test_time_limit_covers_all_rounds(tmp_path):
    runner = make_runner(tmp_path, 9, naive=lambda T: replace(RESULT, wall_seconds=125.0))
    assert run_naive(runner, 8).status == "finished"
    assert runner.workers["naive"].time_limits == [300.0, 175.0, 50.0]


def test_time_limit_in_a_later_round_keeps_earlier_rounds(tmp_path):
    answers = iter([replace(RESULT, seconds=[2.0]), replace(RESULT, seconds=[4.0]), TIMED_OUT])
    runner = make_runner(tmp_path, 9, naive=lambda T: next(answers))
    row = run_naive(runner, 8)
    assert row.status == "finished" and row.ms_median == 3000.0


def test_other_failures_end_a_row_in_any_round(tmp_path):
    answers = iter([RESULT, IsolatedCallFailed("out of memory", "needed 8.0 GiB more; set batch_size=1")])
    row = run_naive(make_runner(tmp_path, 9, naive=lambda T: next(answers)), 8)
    assert (row.status, row.reason, row.ms_median) == ("out of memory", "needed 8.0 GiB more", None)


def test_backends_take_turns_and_each_round_begins_with_another_one(tmp_path):
    order, progress = [], []
    runner = make_runner(
        tmp_path, 2, naive=lambda T: order.append("naive") or RESULT, flash=lambda T: order.append("flash") or RESULT
    )
    runner.run_group([make_case(), make_case(backend="flash")], progress.append)
    assert order == ["naive", "flash", "flash", "naive"]
    assert progress == [0.0, 0.25, 0.5, 0.75]


def test_rounds_have_the_same_weight_in_a_row():
    rounds = [([1.0] * 500, 5, 9.0), ([3.0], 7, 1.0), ([4.0, 4.0], 6, 1.0)]
    results = [replace(RESULT, seconds=s, peak_memory_bytes=memory, compile_s=c) for s, memory, c in rounds]
    row = summarize(make_case(T=5), results, flops=1000, peaks=[1000.0, 100.0])
    assert (row.ms_q1, row.ms_median, row.ms_q3) == (1000.0, 3000.0, 4000.0)
    assert row.tokens_per_second == pytest.approx(10 / 3) and row.flops_per_second == pytest.approx(1000 / 3)
    assert row.peak_share == pytest.approx(1 / 3)
    assert row.bytes_per_second == pytest.approx(2 * 4 * 5 * (4 + 2) * (8 + 6) / 3)
    assert row.bandwidth_share == pytest.approx(row.bytes_per_second / 100)
    assert row.pairs_per_second == pytest.approx(2 * 4 * 15 / 3)
    assert row.peak_memory_bytes == 7 and row.compile_s == 9.0
    assert row.resolved == "naive" and row.impl is None
    assert summarize(make_case(), results, flops=1000, peaks=[]).peak_share is None


def test_peak_share_uses_the_highest_peak_of_all_rounds(tmp_path):
    runner = make_runner(tmp_path, 3, naive=lambda T: RESULT)
    peaks = iter([None, (4e3, 1e3), (2e3, 5e3)])
    runner.measure_peaks = lambda case: next(peaks)
    row = run_naive(runner, 8)
    assert row.peak_share == pytest.approx(row.flops_per_second / 4e3)
    assert row.bandwidth_share == pytest.approx(row.bytes_per_second / 5e3)
