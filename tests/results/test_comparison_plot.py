"""The plot of a comparison, comparison.png."""

from pathlib import Path

import pytest
from comparison_helpers import KERNEL, write_run

from results.comparison_plot import plot_comparison
from results.read import read_settings
from results.statistics import compute_stats

# Two dollar signs are a formula for matplotlib; the last character is a byte that is not UTF-8.
LONG = "a-very-long-name-of-a-model-that-fits-nowhere-$^$-\udce9" * 3


def plot(folders: list[Path], path: Path) -> tuple[int, int]:
    """Plot the runs. Returns width and height of the picture."""
    settings = read_settings(folders)
    plot_comparison(settings, compute_stats(settings), path)
    png = path.read_bytes()
    return int.from_bytes(png[16:20]), int.from_bytes(png[20:24])


def write_settings(folder: Path, count: int) -> list[Path]:
    names = [f"{LONG}{index}" for index in range(count)]
    return [write_run(folder / f"run{i}", changes={"model.name": names[i]}) for i in range(count)]


def write_refused(folder: Path) -> Path:
    return write_run(folder / "no", status="refused", error="no", changes=KERNEL)


@pytest.mark.parametrize("count", [1, 2, 12])
def test_plot_draws_any_number_of_settings(tmp_path, count):
    width, height = plot(write_settings(tmp_path, count), tmp_path / "a.png")
    assert width == 1500
    assert 900 <= height <= 1800


@pytest.mark.parametrize("count", [0, 1])
def test_plot_draws_refused_settings(tmp_path, count):
    folders = [*write_settings(tmp_path, count), write_refused(tmp_path)]
    assert plot(folders, tmp_path / "a.png")[0] == 1500


def test_plot_draws_losses_of_several_seeds_and_evaluations(tmp_path):
    folders = []
    for seed in (1, 2):
        folder = write_run(tmp_path / f"run{seed}", seed, val=seed)
        lines = [f'{{"step": {step}, "val/loss": {9 - step + seed}}}\n' for step in range(7)]
        (folder / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
        folders.append(folder)
    assert plot(folders, tmp_path / "a.png")[0] == 1500
