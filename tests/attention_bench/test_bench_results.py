"""Rows of a bench: ranking and the recommendation."""

import pytest
from bench_helpers import make_row, make_rows

from attention_bench.results import Timing, rank_by_time, recommend


def names(kernels: list[list[Timing]]) -> list[list[str]]:
    return [[row.backend for row in kernel] for kernel in kernels]


def test_kernels_are_sorted_by_time():
    fastest, slower = rank_by_time(make_rows(a={8: 3.0}, b={8: 1.0}, c={8: 2.0}))
    assert (names(fastest), names(slower)) == ([["b"]], [["c"], ["a"]])


def test_medians_within_ten_percent_are_equal():
    fastest, slower = rank_by_time(make_rows(a={8: 1.09}, b={8: 1.0}, c={8: 1.11}))
    assert (names(fastest), names(slower)) == ([["b"], ["a"]], [["c"]])


def test_overlapping_quartiles_are_equal():
    rows = [make_row("a", 8, 1.12, spread=0.15), make_row("b", 8, 1.0)]
    fastest, _ = rank_by_time(rows)
    assert names(fastest) == [["b"], ["a"]]


def test_rows_that_did_not_finish_are_not_ranked():
    fastest, slower = rank_by_time([make_row("a", 8, None), make_row("b", 8, 1.0)])
    assert (names(fastest), names(slower)) == ([["b"]], [])


def test_rows_whose_times_vary_are_not_ranked():
    rows = [make_row("a", 8, 5.0, spread=0.3), make_row("b", 8, 1.0)]
    fastest, slower = rank_by_time(rows)
    assert (names(fastest), names(slower)) == ([["b"]], [])


def test_nothing_is_ranked_if_a_row_whose_times_vary_could_be_the_fastest():
    rows = [make_row("a", 8, 0.5, spread=0.3), make_row("b", 8, 1.0)]
    assert rank_by_time(rows) == ([], [])


def test_backends_that_ran_the_same_kernel_are_ranked_together():
    rows = make_rows(naive={8: 2.5}, sdpa={8: 1.0}, flash={8: 1.4})
    rows[1].resolved = "flash"
    fastest, slower = rank_by_time(rows)
    assert (names(fastest), names(slower)) == ([["sdpa", "flash"]], [["naive"]])


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        pytest.param([make_row("a", 8, 1.0)], "a", id="one backend"),
        pytest.param(
            make_rows(a={8: 1.0}, b={8: 2.0}, c={8: 3.0}),
            "a, 2.0 times as fast as b",
            id="baseline is the fastest",
        ),
        pytest.param(make_rows(a={8: 1.0}, b={8: 1.0}), "a or b (equal)", id="all are equal"),
        pytest.param(
            make_rows(b={8: 9.0}, a={8: 1.0}, c={8: 1.0}),
            "a or c (equal), 9.0 times as fast as b",
            id="two are faster than the baseline",
        ),
        pytest.param(
            [make_row("a", 8, None), make_row("b", 8, 20.0)],
            "b; a: out of memory",
            id="baseline did not finish",
        ),
        pytest.param(
            [make_row("a", 8, None), make_row("b", 8, None)],
            "not ranked; a: out of memory; b: out of memory",
            id="none finished",
        ),
        pytest.param(
            [make_row("a", 8, 1.0), make_row("b", 8, 3.0, spread=0.3)],
            "a; b: times vary",
            id="times of one vary",
        ),
        pytest.param(
            [make_row("naive", 8, 4.0)]
            + [make_row(name, 8, 2.0, resolved="flash") for name in ("sdpa", "flash")],
            "flash or sdpa (same kernel), 2.0 times as fast as naive",
            id="two run the same kernel",
        ),
        pytest.param(
            make_rows(naive={8: 4.0}, flash={8: 2.0}, none={8: 1.0}),
            "flash, 2.0 times as fast as naive",
            id="step without attention is no backend",
        ),
    ],
)
def test_recommendation_names_the_fastest_backend_and_its_advantage(rows, sentence):
    assert recommend(rows) == [("forward, float32", "T = 8", sentence)]


def test_linear_attention_is_not_recommended():
    rows = make_rows(naive={8: 4.0}, flash={8: 2.0}, linear={8: 1.0})
    assert recommend(rows)[0][2] == "flash, 2.0 times as fast as naive"


def test_linear_attention_alone_has_no_recommendation():
    assert recommend(make_rows(linear={8: 1.0})) == []


def test_recommendation_begins_with_the_last_phase():
    rows = [make_row("a", T, 1.0, phase=phase) for phase in ("forward", "step") for T in (8, 16)]
    lines = [line[:2] for line in recommend(rows)]
    assert lines == [
        ("step, float32", "T = 8"),
        ("step, float32", "T = 16"),
        ("forward, float32", "T = 8"),
        ("forward, float32", "T = 16"),
    ]
