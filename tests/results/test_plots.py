"""The plots of runs, loss.png, and of comparisons, comparison.png."""

import json
from pathlib import Path

import pytest
from comparison_helpers import KERNEL, NEGLIGIBLE, write_run

from results import plots
from results.compare import compare_variants
from results.plots import plot_comparison, plot_run
from results.read import read_variants

# Two dollar signs are a formula for matplotlib; the last character is a byte that is not UTF-8.
pytestmark = pytest.mark.draws
LONG = "a-very-long-name-of-a-model-that-fits-nowhere-$^$-\udce9" * 3


def write_metrics(folder: Path, *rows: dict) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")


@pytest.mark.parametrize(
    "row",
    [{"step": 1}, {"step": 1, "val/loss": 2.0}],
    ids=["no loss", "validation loss"],
)
def test_losses_of_a_run_are_plotted(tmp_path, row):
    write_metrics(tmp_path, row)
    plot_run(tmp_path)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_dotted_lines_are_the_first_steps_of_the_models(tmp_path, monkeypatch):
    rows = [{"step": step, "train/loss": 2.0, "teachers": step // 3} for step in range(1, 8)]
    write_metrics(tmp_path, *rows)
    figures = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: figures.append(figure))
    plot_run(tmp_path)
    (axes,) = figures[0].axes
    dotted = [line.get_xdata()[0] for line in axes.lines if line.get_linestyle() == ":"]
    assert sorted(dotted) == [1, 3, 6]


def test_losses_of_a_run_that_train_writes_are_plotted(trained):
    """While it trains, loss.png stays empty in tests."""
    plot_run(Path("runs/a"))
    assert Path("runs/a/loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("count", [0, 12])
def test_plot_draws_any_number_of_variants_and_a_refused_one(tmp_path, count):
    changes = [{"model.name": f"{LONG}{index}"} for index in range(count)]
    folders = [write_run(tmp_path / f"{n}", changes=changes[n]) for n in range(count)]
    folders.append(write_run(tmp_path / "no", status="refused", error="no", changes=KERNEL))
    variants = read_variants(folders)
    plot_comparison(
        variants, compare_variants(variants, NEGLIGIBLE), NEGLIGIBLE, tmp_path / "a.png"
    )
    png = (tmp_path / "a.png").read_bytes()
    assert int.from_bytes(png[16:20]) == 1500  # width in pixels
    assert 700 <= int.from_bytes(png[20:24]) <= 1800


def test_validation_loss_is_the_mean_of_the_seeds_without_the_first_evaluation(
    tmp_path, monkeypatch
):
    figures = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: figures.append(figure))
    folders = [write_run(tmp_path / f"run{seed}", seed) for seed in (1, 2)]
    for seed, folder in enumerate(folders, 1):
        write_metrics(folder, *({"step": step, "val/loss": 9 - step + seed} for step in range(7)))
    variants = read_variants(folders)
    plot_comparison(
        variants, compare_variants(variants, NEGLIGIBLE), NEGLIGIBLE, tmp_path / "a.png"
    )
    (line,) = figures[0].axes[2].lines
    assert line.get_xdata().tolist() == [1, 2, 3, 4, 5, 6]
    assert line.get_ydata().tolist() == [9.5, 8.5, 7.5, 6.5, 5.5, 4.5]


def test_differences_that_count_as_none_are_grey(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: figures.append(figure))
    variants = read_variants([write_run(tmp_path / "a"), write_run(tmp_path / "b", changes=KERNEL)])
    plot_comparison(variants, compare_variants(variants, 0.02), 0.02, tmp_path / "a.png")
    (band,) = figures[0].axes[0].patches
    assert (band.get_x(), band.get_width()) == (-2.0, 4.0)  # percent


def test_rows_have_one_setting_per_line(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: figures.append(figure))
    changes = {"model.key_offset": True, "model.rotary_fraction": 0.5}
    variants = read_variants(
        [write_run(tmp_path / "a"), write_run(tmp_path / "b", changes=changes)]
    )
    variants[1].label = "model.key_offset=true, model.rotary_fraction=0.5"
    plot_comparison(variants, compare_variants(variants, 0.02), 0.02, tmp_path / "a.png")
    label = figures[0].axes[0].get_yticklabels()[1].get_text()
    assert label == "model.key_offset=true\nmodel.rotary_fraction=0.5"


def test_single_evaluation_is_visible(tmp_path, monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save_figure", lambda figure, path: figures.append(figure))
    run = write_run(tmp_path / "a")
    last = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()[-1]
    (run / "metrics.jsonl").write_text(last + "\n", encoding="utf-8")
    variants = read_variants([run])
    plot_comparison(variants, compare_variants(variants, 0.02), 0.02, tmp_path / "a.png")
    (line,) = figures[0].axes[2].lines
    assert (len(line.get_xdata()), line.get_marker()) == (1, "o")
