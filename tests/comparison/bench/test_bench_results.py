"""Rows of a bench: the CSV file, ranking and the recommendation."""

import pytest
from bench_helpers import COLUMNS, make_row, make_rows

from comparison.bench.results import append_row, rank_by_time, recommend


def test_append_row_writes_each_row_immediately(tmp_path):
    path = tmp_path / "attention.csv"
    append_row(path, make_row("a", 64, 1.23456789, peak_memory_bytes=5))
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2
    append_row(path, make_row("b", 64, None))
    header, first, second = path.read_text(encoding="utf-8").splitlines()
    assert header == COLUMNS
    assert (
        first
        == "a,a,finished,,forward,causal,cpu,float32,2,64,4,2,8,6,1.23457,1.22222,1.24691,,5,,,"
    )
    assert second.startswith("b,,out of memory,needed 8.0 GiB more,forward,causal,cpu")


def test_close_medians_and_overlapping_quartiles_are_ties():
    rows = [
        make_row("a", 64, 3.0),
        make_row("b", 64, 1.05),
        make_row("c", 64, 1.0),
        make_row("d", 64, 1.3, spread=0.3),
    ]
    fastest, slower = rank_by_time([*rows, make_row("e", 64, None), make_row("f", 64, 2.0)])
    assert [row.backend for row in fastest] == ["c", "b", "d"]
    assert [row.backend for row in slower] == ["f", "a"]


@pytest.mark.parametrize(
    "rows, sentence",
    [
        (
            [make_row("a", 8, None), make_row("b", 8, None)],
            "none: a out of memory, b out of memory",
        ),
        ([make_row("a", 8, 1.0)], "a"),
        (make_rows(a={8: 1.0}, b={8: 2.0}, c={8: 3.0}), "a, 2.0 times as fast as b"),
        (make_rows(a={8: 1.0}, b={8: 1.0}), "a or b (equal)"),
        (make_rows(b={8: 9.0}, a={8: 1.0}, c={8: 1.0}), "a or c (equal), 9.0 times as fast as b"),
        ([make_row("a", 8, None), make_row("b", 8, 20.0)], "b, a: out of memory"),
        (
            [
                make_row("a", 8, 6.0, peak_memory_bytes=20 * 2**20),
                make_row("b", 8, 3.0, peak_memory_bytes=4 * 2**20),
            ],
            "b, 2.0 times as fast as a, with 20% of its memory",
        ),
        (
            make_rows(naive={8: 4.0}, flash={8: 2.0}, linear={8: 1.0}),
            "flash, 2.0 times as fast as naive",
        ),
        (
            [
                make_row(name, 8, ms, phase="step")
                for name, ms in (("naive", 20.0), ("flash", 10.0), ("none", 8.0))
            ],
            "flash, 2.0 times as fast as naive; attention takes 20%: no backend can gain more than 1.25 times",
        ),
        (
            [make_row(name, 8, ms, phase="step") for name, ms in (("flash", 10.0), ("none", 12.0))],
            "flash",
        ),  # noise
    ],
)
def test_recommendation_names_the_fastest_backend_and_its_advantage(rows, sentence):
    assert [line[2] for line in recommend(rows)] == [sentence]
