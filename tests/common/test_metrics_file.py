"""Curves from metrics.jsonl: which steps have values, and points for plots."""

import numpy as np

from common.metrics_file import read_curves
from common.plots import PLOTTED_BLOCKS, thin_curve


def test_curve_has_the_steps_with_a_value(tmp_path):
    rows = ['{"step": 0, "val/loss": 3.25}', '{"step": 1, "train/loss": 2, "x": {"y": [1]}}']
    rows.append('{"step": 2, "train/loss": NaN}')
    (tmp_path / "metrics.jsonl").write_text("\n".join([*rows, '{"train/loss": 0.1, "val/loss": null, "step": 3}\n']))
    train, val = read_curves(tmp_path / "metrics.jsonl", "train/loss", "val/loss").values()
    assert (train[0].tolist(), train[1].tolist()) == ([1, 3], [2.0, 0.1])
    assert (val[0].tolist(), val[1].tolist()) == ([0], [3.25])


def test_plot_of_a_long_curve_has_few_points_but_all_spikes():
    steps, values = np.arange(123_457), np.linspace(3, 1, 123_457)
    values[[0, 70_001, 123_456]] = 9.0, 11.0, 0.5
    thin_steps, thin_values = thin_curve(steps, values)
    assert len(thin_steps) < 3 * PLOTTED_BLOCKS and (np.diff(thin_steps) > 0).all()
    assert np.array_equal(thin_values, values[thin_steps]) and {0, 70_001, 123_456} <= set(thin_steps.tolist())
    for count in (0, 1, PLOTTED_BLOCKS):
        assert np.array_equal(thin_curve(steps[:count], values[:count])[0], steps[:count])
