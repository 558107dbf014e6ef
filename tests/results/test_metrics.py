"""The registry: one entry, and one line where training computes it, are enough for a metric."""

import csv
import json
from types import SimpleNamespace

import pytest
from comparison_helpers import LR, NEGLIGIBLE, compare_rows, write_run

from results.compare import compare, print_comparison
from results.metrics import MEAN, METRICS, STEP_MEDIAN, Metric
from results.read import read_variants
from training.run_folder import summary_key


@pytest.fixture
def compared(tmp_path, monkeypatch) -> SimpleNamespace:
    """A comparison of two runs with a metric that somebody adds: rows and folder."""
    metric = Metric("accuracy", "{:.1%}".format, MEAN, "Accuracy: of the top token.")
    monkeypatch.setitem(METRICS, "val/accuracy", metric)
    runs = [write_run(tmp_path / "a", last_val_accuracy=0.25)]
    runs.append(write_run(tmp_path / "b", changes=LR, last_val_accuracy=0.5))
    rows = compare(runs, tmp_path, NEGLIGIBLE)
    return SimpleNamespace(rows=rows, folder=tmp_path)


def test_added_metric_is_in_the_table(compared, capsys):
    print_comparison(compared.rows, compared.folder)
    printed = capsys.readouterr().out
    assert all(text in printed for text in ("accuracy", "25.0%", "50.0%", "of the top token"))


def test_added_metric_is_in_the_csv_file(compared):
    with open(compared.folder / "comparison.csv", newline="", encoding="utf-8") as file:
        assert [row["val_accuracy"] for row in csv.DictReader(file)] == ["0.25", "0.5"]


def test_added_metric_of_steps_is_a_median_without_warmup(tmp_path, monkeypatch):
    monkeypatch.setitem(METRICS, "grad_norm", Metric(compare=STEP_MEDIAN))
    run = write_run(tmp_path / "a")
    rows = [json.dumps({"step": step, "grad_norm": step}) for step in range(10)]
    (run / "metrics.jsonl").write_text("\n".join(rows), encoding="utf-8")
    assert compare_rows([run])[0]["grad_norm"].value == 7.5


def test_number_of_teachers_is_compared(tmp_path):
    """A run has its final number only at its end."""
    assert compare_rows([write_run(tmp_path / "a", n_teachers=2)])[0]["n_teachers"].value == 2


@pytest.mark.parametrize(
    ("name", "key"),
    [("val/loss", "last_val_loss"), ("step_ms", "step_ms"), ("n_teachers", "n_teachers")],
)
def test_summary_has_the_newest_value(tmp_path, name, key):
    assert summary_key(name) == key
    (variant,) = read_variants([write_run(tmp_path / "a", **{key: 7.0})])
    assert variant.newest(name) == [7.0]
