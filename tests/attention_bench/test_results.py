"""The results of a bench: the fastest backends, the printed tables, and attention.png."""

import pytest
from bench_helpers import make_row

from attention_bench.results import find_fastest, plot_results, print_results

pytestmark = pytest.mark.draws
MACHINE = {"device_name": "a chip", "threads": 2, "versions": {"torch": "2.99"}}


def fastest(*rows: dict) -> list[str]:
    return [row["backend"] for row in find_fastest(list(rows))]


def test_fastest_backend_has_the_smallest_median():
    assert fastest(make_row("a", 8, 3.0), make_row("b", 8, 1.0), make_row("c", 8, 2.0)) == ["b"]


def test_row_that_did_not_finish_is_not_the_fastest():
    assert fastest(make_row("a", 8, None), make_row("b", 8, 1.0), make_row("a", 9, None)) == ["b"]


def test_linear_attention_is_not_recommended():
    assert fastest(make_row("linear", 8, 1.0), make_row("naive", 8, 4.0)) == ["naive"]


@pytest.mark.parametrize(
    "change", [{"T": 9}, {"phase": "decode"}, {"mask": "window:5"}, {"dtype": "bfloat16"}]
)
def test_every_case_has_a_fastest_backend(change):
    assert fastest(make_row("a", 8, 1.0), make_row("b", 8, 2.0) | change) == ["a", "b"]


@pytest.fixture
def print_rows(capsys):
    """print_rows(row, ...) returns the printed results, as one line."""

    def run(*rows: dict) -> str:
        print_results(list(rows))
        return " ".join(capsys.readouterr().out.split())

    return run


def test_table_has_the_figures_of_a_backend(print_rows):
    figures = {"resolved": "flash", "peak_memory_bytes": 3 * 2**19}
    errors = {"error_y": 1e-6, "error_gradients": 3e-6}
    printed = print_rows(make_row("sdpa", 1024, 10.0, **figures, **errors))
    assert "1,024 sdpa flash fastest 10.0 (9.90-10.1) 1.5 1.0e-06 3.0e-06" in printed


def test_unknown_figures_are_empty(print_rows):
    printed = print_rows(make_row("a", 64, 5.0), make_row("b", 64, 9.0))
    assert "64 a a fastest 5.00 (4.95-5.05) 64 b b 9.00" in printed


def test_row_that_did_not_finish_has_its_status_and_its_reason_once(print_rows):
    printed = print_rows(make_row("a", 64, None), make_row("a", 128, None))
    assert "64 a out of memory 128 a out of memory" in printed
    assert printed.count("a: out of memory: needed 8.0 GiB more") == 1


def test_phases_masks_and_dtypes_have_tables(print_rows):
    printed = print_rows(make_row("a", 64, 5.0), make_row("a", 64, 5.0, mask="window:5"))
    assert printed.index("forward, causal, float32") < printed.index("forward, window:5, float32")


UNFINISHED = [make_row("a", 64, None), make_row("b", 64, 1.0, peak_memory_bytes=2**20)]
TWO_PHASES = [make_row("a", 64, 1.0, phase=phase) for phase in ("forward", "decode")]
NO_TIMES = [make_row("a", 64, None), make_row("a", 128, None)]
NINE_BACKENDS = [
    make_row(f"b{index}", 2**k, 2**k * 1.2**index) for index in range(9) for k in (4, 9, 14)
]


@pytest.mark.parametrize(
    ("rows", "width"),
    [
        pytest.param(UNFINISHED, 750, id="unfinished"),
        pytest.param(TWO_PHASES, 900, id="two phases"),
        pytest.param(NO_TIMES, 750, id="no times"),
        pytest.param(NINE_BACKENDS, 750, id="nine backends"),
    ],
)
def test_plot_draws_any_rows(rows, width, tmp_path):
    import matplotlib.image  # takes most of a second

    plot_results(rows, MACHINE, tmp_path / "attention.png")
    assert matplotlib.image.imread(tmp_path / "attention.png").shape[:2] == (960, width)
