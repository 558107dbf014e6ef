"""Rows of a bench: the CSV file, ranking and the recommendation."""

from dataclasses import fields, replace

import pytest
from bench_helpers import COLUMNS, CONFIG, make_row, make_rows

from compare.bench.results import (
    Timing,
    add_predictions,
    append_row,
    compute_spread,
    group_rows,
    rank_by_time,
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
    assert (
        first.startswith("a,a,,finished,,forward,causal,cpu,float32,1,64,64,2,2,64,64,1.23457,") and ",5,,,,," in first
    )
    assert second.startswith("b,,,out of memory,needed 8.0 GiB more,forward,causal,cpu")


def test_rows_are_grouped_by_columns():
    rows = [make_row("a", 8, 1.0, dtype=dtype, phase=phase) for phase in ("x", "y") for dtype in ("d", "e")]
    assert list(group_rows(rows, "phase", "dtype")) == [("x", "d"), ("x", "e"), ("y", "d"), ("y", "e")]


def test_close_medians_and_overlapping_quartiles_are_ties():
    rows = [make_row("a", 64, 3.0), make_row("b", 64, 1.05), make_row("c", 64, 1.0), make_row("d", 64, 1.3, spread=0.3)]
    fastest, slower = rank_by_time([*rows, make_row("e", 64, None), make_row("f", 64, 2.0)])
    assert [row.backend for row in fastest] == ["c", "b", "d"]
    assert [row.backend for row in slower] == ["f", "a"]


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


def test_linear_attention_is_not_recommended():
    rows = make_rows(naive={64: 4.0}, flash={64: 2.0}, linear={64: 1.0})
    assert [line[2] for line in recommend(rows)] == ["flash, 2.0 times as fast as naive"]


def test_recommendation_begins_with_the_training_step():
    rows = [make_row("a", 8, 1.0), make_row("a", 8, 1.0, phase="step")]
    assert [line[0] for line in recommend(rows)] == ["step, float32", "forward, float32"]


def test_spread_is_the_ratio_of_quartiles():
    assert compute_spread(make_rows(a={64: 1.0})) == pytest.approx(1.01 / 0.99)
    assert compute_spread([make_row("a", T, 1.0, spread=0.5) for T in (8, 16)]) == pytest.approx(3.0)
    assert compute_spread([make_row("a", 8, None)]) is None


MODEL = CONFIG.model  # 2 layers
STEP = [make_row(name, 64, ms, phase="step") for name, ms in (("naive", 20.0), ("flash", 10.0), ("none", 8.0))]
ATTENTION = [make_row(name, 64, ms, phase="forward+backward") for name, ms in (("naive", 5.0), ("flash", 1.5))]


def test_step_times_are_predicted_from_attention_alone():
    naive, flash, none = add_predictions(STEP, ATTENTION, MODEL)
    assert (naive.predicted_ms, flash.predicted_ms, none.predicted_ms) == (8 + 2 * 5, 8 + 2 * 1.5, None)
    assert (naive.attention_share, flash.attention_share) == (pytest.approx(0.6), pytest.approx(0.2))


@pytest.mark.parametrize("change", [{"window": 8}, {"dropout": 0.1}, {"attention_softcap": 5.0}])
def test_step_times_are_not_predicted_for_another_kind_of_attention(change):
    rows = add_predictions(STEP, ATTENTION, replace(MODEL, **change))
    assert {row.predicted_ms for row in rows} == {None} and rows[0].attention_share == pytest.approx(0.6)
    other_shape = [replace(row, H=3) for row in ATTENTION]
    assert {row.predicted_ms for row in add_predictions(STEP, other_shape, MODEL)} == {None}


def test_recommendation_states_the_largest_possible_gain():
    ((_, _, sentence),) = recommend(add_predictions(STEP, ATTENTION, MODEL))
    assert sentence == (
        "flash, 2.0 times as fast as naive; attention takes 20%: no backend can gain more than 1.25 times"
    )
