"""Printed results of a bench: recommendation, warning and notes."""

from pathlib import Path

from bench_helpers import make_row, make_rows

from comparison.bench.table import list_notes, print_results


def test_results_begin_with_the_recommendation(capsys):
    rows = make_rows(a={64: 1.0, 128: 2.0}, b={64: 3.0, 128: 9.0})
    print_results(rows[:-1], Path("runs/bench/x"))  # interrupted: T = 128 is incomplete
    printed = capsys.readouterr().out
    assert (
        printed.index("a, 3.0 times as fast as b")
        < printed.index("MiB")
        < printed.index("attention.csv")
    )
    assert "not reliable" not in printed
    print_results([make_row("a", T, 1.0, spread=0.5) for T in (8, 16)], Path("runs/bench/x"))
    assert "the upper quartile is typically 3.0 times the lower" in " ".join(
        capsys.readouterr().out.split()
    )


def test_notes_explain_kernels_errors_and_failures():
    rows = [
        make_row("sdpa", 64, 1.0, resolved="flash", error_y=1e-6, error_gradients=3e-6),
        make_row("naive", 64, None),
        make_row("naive", 128, None),
    ]
    notes = list_notes(rows)
    assert "sdpa ran flash (forward)." in notes
    assert "Largest error in float32, compared with float64: 3.0e-06, by sdpa." in notes
    assert "naive: out of memory (forward; T = 64, 128): needed 8.0 GiB more" in notes
    worst = make_row("b", 64, 1.0, error_y=float("nan"))
    assert any("nan, by b" in note for note in list_notes([*rows, worst]))
