"""The plot of a bench, attention.png."""

import matplotlib.image
import pytest
from bench_helpers import make_row, make_rows

from attention_bench.plot import plot_results

UNFINISHED = [make_row("a", 64, None), make_row("b", 64, 1.0, peak_memory_bytes=2**20)]
TWO_DTYPES = [
    make_row("a", 64, 1.0, dtype=dtype, phase=phase)
    for dtype in ("float32", "bfloat16")
    for phase in ("decode", "step")
]
NO_TIMES = [make_row("a", 64, None), make_row("a", 128, None)]
NINE_BACKENDS = make_rows(
    **{f"b{index}": {2**k: 2**k * 1.2**index for k in range(4, 14)} for index in range(9)}
)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(UNFINISHED, id="unfinished"),
        pytest.param(TWO_DTYPES, id="two dtypes"),
        pytest.param(NO_TIMES, id="no times"),
        pytest.param(NINE_BACKENDS, id="nine backends"),
    ],
)
def test_plot_draws_any_rows(rows, tmp_path):
    plot_results(rows, tmp_path / "attention.png", "made up")
    height, width, _ = matplotlib.image.imread(tmp_path / "attention.png").shape
    assert width >= 750
    assert height >= 900
