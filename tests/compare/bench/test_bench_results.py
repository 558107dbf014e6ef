"""Rows of a bench: the CSV file, rankings, crossovers and the recommendation."""

from dataclasses import fields, replace

import pytest
from bench_helpers import COLUMNS, make_row, make_rows
from hypothesis import given
from hypothesis import strategies as st

from compare.bench.results import (
    Timing,
    append_row,
    compute_spread,
    find_crossovers,
    group_by_phase,
    rank_backends,
    recommend,
)


def test_columns_keep_their_names_and_order():
    assert ",".join(field.name for field in fields(Timing)) == COLUMNS


def test_append_row_writes_each_row_immediately(tmp_path):
    path = tmp_path / "attention.csv"
    append_row(path, make_row("a", 64, 1.23456789, peak_memory_bytes=5))
    assert len(path.read_text().splitlines()) == 2
    append_row(path, make_row("b", 64, None))
    header, first, second = path.read_text().splitlines()
    assert header == COLUMNS
    assert first.startswith("a,a,,finished,,forward,cpu,float32,1,64,2,2,64,64,1.23457,") and ",5,,,,," in first
    assert second.startswith("b,,,out of memory,needed 8.0 GiB more,forward,cpu")


def test_rows_are_grouped_by_phase_and_dtype():
    rows = [make_row("a", 8, 1.0, dtype=dtype, phase=phase) for phase in ("x", "y") for dtype in ("d", "e")]
    assert list(group_by_phase(rows)) == [("x", "d"), ("x", "e"), ("y", "d"), ("y", "e")]


@given(crossing=st.floats(70, 4000), exponent=st.floats(1.5, 3))
def test_crossover_of_two_power_laws_is_exact(crossing, exponent):
    Ts = (64, 256, 1024, 4096)
    a, b = {T: (T / crossing) ** exponent for T in Ts}, {T: T / crossing for T in Ts}
    found = find_crossovers(make_rows(a=a, b=b))
    assert len(found) <= 1
    if all(max(a[T], b[T]) > 1.1 * min(a[T], b[T]) for T in Ts):
        (crossover,) = found
        assert (crossover.slower, crossover.faster) == ("a", "b")
        assert pytest.approx(crossing, rel=1e-6) == crossover.T
        assert crossover.ms == pytest.approx(1.0, rel=1e-6)


def test_equally_fast_backends_have_no_crossover():
    times = {64: 1.0, 256: 2.0, 1024: 9.0}
    rows = make_rows(a={64: 2.0, 256: 5.0, 1024: 40.0}, b=times, c={64: 1.05, 256: 1.9, 1024: 9.3})
    assert [set(ranking.fastest_names) for ranking in rank_backends(rows)] == [{"b", "c"}] * 3
    assert find_crossovers(rows) == []


def test_overlapping_quartiles_are_a_tie():
    times = {64: 1.0, 256: 2.0}
    rows = [*make_rows(a=times), *(make_row("b", T, 1.3 * ms, spread=0.3) for T, ms in times.items())]
    assert all(set(ranking.fastest_names) == {"a", "b"} for ranking in rank_backends(rows))


def test_ranking_names_the_runner_up_the_baseline_and_unfinished_rows():
    rows = [make_row("a", 64, 3.0), make_row("b", 64, 1.0), make_row("c", 64, 2.0), make_row("d", 64, None)]
    (ranking,) = rank_backends(rows)
    assert ranking.fastest_names == ["b"] and ranking.runner_up.backend == "c"
    assert ranking.baseline.backend == "a" and [row.backend for row in ranking.unfinished] == ["d"]


def test_crossover_is_found_across_a_tie():
    """The winner changes from a to b over a T at which both are equally fast."""
    rows = make_rows(a={64: 1.0, 128: 2.0, 256: 8.0, 512: 32.0}, b={64: 1.5, 128: 2.1, 256: 4.0, 512: 8.0})
    (crossover,) = find_crossovers(rows)
    assert (crossover.slower, crossover.faster) == ("a", "b") and 128 < crossover.T < 256


def test_the_same_kernel_has_no_crossover_with_itself():
    rows = make_rows(sdpa={64: 1.0, 512: 9.0}, flash={64: 2.0, 512: 6.0})
    assert len(find_crossovers(rows)) == 1
    assert find_crossovers([replace(row, resolved="flash") for row in rows]) == []


def test_recommendation_names_the_fastest_backend_and_its_advantage():
    mib = 2**20
    rows = [
        make_row("slow", 64, 1.0),
        make_row("fast", 64, 2.0),
        make_row("slow", 256, 6.0, peak_memory_bytes=20 * mib),
        make_row("fast", 256, 3.0, peak_memory_bytes=4 * mib),
        make_row("slow", 512, 36.0, peak_memory_bytes=80 * mib),
        make_row("fast", 512, 9.0, peak_memory_bytes=8 * mib),
        make_row("slow", 1024, None),
        make_row("fast", 1024, 20.0),
    ]
    assert recommend(rows) == [
        ("forward, float32", "T = 64", "slow, 2.0 times as fast as fast"),
        ("forward, float32", "T = 256 to 512", "fast, 2.0 to 4.0 times as fast as slow, with 10 to 20% of its memory"),
        ("forward, float32", "T = 1,024", "fast; slow: out of memory"),
    ]


@pytest.mark.parametrize(
    "rows, sentence",
    [
        ([make_row("a", 8, None)], "none: a out of memory"),
        ([make_row("a", 8, 1.0)], "a"),
        ([make_row("a", 8, 1.0), make_row("b", 8, 1.0)], "a or b (equal)"),
        (
            [make_row("b", 8, 9.0), make_row("a", 8, 1.0), make_row("c", 8, 1.0)],
            "a or c (equal), 9.0 times as fast as b",
        ),
        (
            make_rows(a={64: 2.0, 128: 9.0, 256: 2.4}, b={64: 1.0, 128: 1.0, 256: 1.0}),
            "b, 2.0 to 9.0 times as fast as a",
        ),
    ],
)
def test_recommendation_sentences(rows, sentence):
    assert [line[2] for line in recommend(rows)] == [sentence]


def test_recommendation_begins_with_the_training_step():
    rows = [make_row("a", 8, 1.0), make_row("a", 8, 1.0, phase="step")]
    assert [line[0] for line in recommend(rows)] == ["step, float32", "forward, float32"]


def test_spread_is_the_ratio_of_quartiles():
    assert compute_spread(make_rows(a={64: 1.0})) == pytest.approx(1.01 / 0.99)
    assert compute_spread([make_row("a", T, 1.0, spread=0.5) for T in (8, 16)]) == pytest.approx(3.0)
    assert compute_spread([make_row("a", 8, None)]) is None
