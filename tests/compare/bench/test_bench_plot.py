"""The plot of a bench, attention.png."""

import matplotlib.image
import pytest
from bench_helpers import make_row, make_rows

from compare.bench.plot import plot_results


@pytest.mark.parametrize(
    "rows",
    [
        make_rows(a={64: 1.0, 256: 9.0}, b={64: 2.0, 256: 4.0}),
        [make_row("a", 64, None), make_row("b", 64, 1.0, peak_memory_bytes=2**20)],
        [
            make_row("a", 64, 1.0, dtype=dtype, phase=phase)
            for dtype in ("float32", "x")
            for phase in ("decode", "step")
        ],
        [make_row("a", 64, None), make_row("a", 128, None)],
        [make_row(f"b{i}", T, T * 1.2**i) for i in range(9) for T in (2**k for k in range(4, 14))],
    ],
    ids=["two backends", "unfinished", "two dtypes", "no times", "nine backends"],
)
def test_plot_results_draws_any_rows(rows, tmp_path):
    plot_results(rows, tmp_path / "attention.png", "made up")
    height, width, _ = matplotlib.image.imread(tmp_path / "attention.png").shape
    assert width >= 750 and height >= 900
