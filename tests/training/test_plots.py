"""Plots of a run, and attention statistics: metrics, picture, and no effect on training."""

import json

import pytest
from helpers import metrics, summary, train_here, untimed
from run_helpers import train_in

from generation.head_statistics import STATISTICS
from training.plots import plot_run

HEADS = [f"/layer_{layer}/head_{head}" for layer in (1, 2) for head in (1, 2)]
KEYS = {f"attention/{name}{end}" for name in STATISTICS for end in ("", *HEADS)}
KEYS.add("attention_heads")
SETTINGS = ["dtype=bfloat16", "model.dropout=0.2", "optimizer=adamw"]


@pytest.mark.parametrize(
    "row",
    [{"step": 1}, {"step": 1, "train/loss": 2.0}, {"step": 1, "val/loss": 2.0}],
    ids=["no loss", "training loss", "validation loss"],
)
def test_losses_are_plotted(tmp_path, row):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    plot_run(tmp_path)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "attention.png").exists()


@pytest.fixture(scope="module")
def folder_with_statistics(tmp_path_factory):
    folder = tmp_path_factory.mktemp("statistics")
    train_in(folder, "name=a", "eval.attention_stats=true", *SETTINGS)
    return folder


@pytest.fixture
def with_statistics(folder_with_statistics, monkeypatch) -> None:
    """A folder with the run a, which has attention statistics."""
    monkeypatch.chdir(folder_with_statistics)


def test_each_evaluation_has_statistics_of_all_heads(with_statistics):
    for row in metrics("a"):
        keys = {key for key in row if key.startswith("attention")}
        assert keys == (KEYS if "val/loss" in row else set())
        assert None not in row.values()


def test_summary_has_the_statistics_of_the_last_evaluation(with_statistics):
    assert summary("a")["attention_entropy"] == metrics("a")[-1]["attention/entropy"]


def test_statistics_are_plotted(with_statistics):
    with open("runs/a/attention.png", "rb") as file:
        assert file.read(4) == b"\x89PNG"


def test_statistics_do_not_change_training(with_statistics):
    assert train_here("name=b", *SETTINGS) == 0
    rows = [{k: v for k, v in row.items() if k not in KEYS} for row in metrics("a")]
    assert untimed(rows) == untimed(metrics("b"))
