"""The plot of a bench, attention.png."""

import matplotlib.image
import pytest
from bench_helpers import make_row, make_rows

from comparison.bench.plot import plot_results


@pytest.mark.parametrize(
    "rows",
    [
        [make_row("a", 64, None), make_row("b", 64, 1.0, peak_memory_bytes=2**20)],
        [
            make_row("a", 64, 1.0, dtype=dtype, phase=phase)
            for dtype in "xy"
            for phase in ("decode", "step")
        ],
        [make_row("a", 64, None), make_row("a", 128, None)],
        make_rows(**{f"b{i}": {2**k: 2**k * 1.2**i for k in range(4, 14)} for i in range(9)}),
    ],
    ids=["unfinished", "two dtypes", "no times", "nine backends"],
)
def test_plot_results_draws_any_rows(rows, tmp_path):
    plot_results(rows, tmp_path / "attention.png", "made up")
    height, width, _ = matplotlib.image.imread(tmp_path / "attention.png").shape
    assert width >= 750 and height >= 900
