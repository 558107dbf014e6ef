"""Printed results of a bench: recommendation, tables, warning and failures."""

from dataclasses import replace
from pathlib import Path

import pytest
from bench_helpers import CONFIG, make_row, make_rows

from attention_bench.table import (
    describe_bench,
    list_failures,
    list_wrong_choices,
    print_results,
)


@pytest.fixture
def print_rows(capsys):
    """print_rows(rows) returns the printed results, as one line."""

    def run(rows) -> str:
        print_results(rows, Path("runs/bench/x"))
        return " ".join(capsys.readouterr().out.split())

    return run


def test_recommendation_is_before_the_tables(print_rows):
    printed = print_rows(make_rows(a={64: 1.0, 128: 2.0}, b={64: 3.0, 128: 9.0}))
    assert printed.index("a, 3.0 times as fast as b") < printed.index("MiB")


def test_files_are_named_at_the_end(print_rows):
    printed = print_rows(make_rows(a={64: 1.0}))
    assert printed.endswith("written runs/bench/x/attention.csv runs/bench/x/attention.png")


def test_row_of_the_table_has_the_figures_of_a_backend(print_rows):
    row = make_row(
        "sdpa",
        1024,
        10.0,
        resolved="flash",
        peak_memory_bytes=3 * 2**19,
        error_y=1e-6,
        error_gradients=3e-6,
    )
    assert "1,024 sdpa flash 10.0 (9.90-10.1) 1.5 1.0e-06 3.0e-06" in print_rows([row])


def test_unknown_figures_are_empty(print_rows):
    assert "64 naive naive 10.0 (9.90-10.1) 128" in print_rows(make_rows(naive={64: 10, 128: 10}))


def test_row_that_did_not_finish_has_its_status_in_the_table(print_rows):
    rows = [make_row("a", 64, 5.0), make_row("b", 64, None)]
    assert "64 b out of memory" in print_rows(rows)


def test_error_can_be_nan(print_rows):
    assert " nan " in print_rows([make_row("a", 64, 1.0, error_y=float("nan"))])


def test_times_that_vary_widely_are_counted(print_rows):
    rows = [make_row("a", 8, 1.0, spread=0.5), make_row("b", 8, 1.0)]
    assert "1 of 2 times vary widely and are not ranked" in print_rows(rows)


def test_times_that_do_not_vary_have_no_warning(print_rows):
    assert "are not ranked" not in print_rows([make_row("a", 8, 1.0, spread=0.1)])


@pytest.mark.parametrize(
    ("times", "count"),
    [
        (dict(naive={128: 9.0}, sdpa={128: 5.0}), 0),  # as auto selects
        (dict(naive={128: 5.0}, sdpa={128: 9.0}), 1),
        (dict(naive={128: 5.0}, sdpa={128: 5.4}), 0),  # equal
        (dict(naive={128: 5.0}), 0),  # not measured
    ],
    ids=["right", "wrong", "equal", "unknown"],
)
def test_choice_of_auto_that_is_slower_on_this_machine_is_reported(times, count):
    rows = [replace(row, phase="step") for row in make_rows(**times)]
    lines = list_wrong_choices(rows)
    assert len(lines) == count
    assert all("auto selects sdpa, but naive is faster" in line for line in lines)


def test_wrong_choice_of_auto_is_printed_before_the_tables(print_rows):
    rows = make_rows(naive={128: 5.0}, sdpa={128: 9.0})
    printed = print_rows([replace(row, phase="step") for row in rows])
    assert printed.index("auto selects sdpa") < printed.index("MiB")


def test_choice_of_auto_for_attention_alone_is_not_reported():
    assert list_wrong_choices(make_rows(naive={128: 5.0}, sdpa={128: 9.0})) == []


def test_failures_with_one_reason_are_listed_together():
    rows = [make_row("naive", 128, None), make_row("naive", 64, None), make_row("a", 64, 1.0)]
    expected = "naive: out of memory (forward; T = 64, 128): needed 8.0 GiB more"
    assert list_failures(rows) == [expected]


def test_reasons_of_failures_are_printed(print_rows):
    assert "needed 8.0 GiB more" in print_rows([make_row("naive", 128, None)])


def test_title_has_shapes_model_and_machine():
    environment = {"device_name": "a chip", "threads": 2, "versions": {"torch": "2.99"}}
    title = describe_bench(CONFIG, environment)
    for part in ("2,048 tokens", "2 heads of 64", "model=modern", "a chip", "2.99"):
        assert part in title
