"""Curves from metrics.jsonl."""

from common.plots import read_curves


def test_curve_has_the_steps_with_a_value():
    rows = [b'{"step": 0, "val/loss": 3.25}', b'{"step": 1, "train/loss": 2, "x": {"y": [1]}}']
    rows += [b'{"step": 2, "train/loss": null}', b'{"train/loss": 0.1, "val/loss": null, "step": 3}']
    train, val = read_curves(rows, "train/loss", "val/loss").values()
    assert (train[0].tolist(), train[1].tolist()) == ([1, 3], [2.0, 0.1])
    assert (val[0].tolist(), val[1].tolist()) == ([0], [3.25])
    assert [len(values) for values in read_curves([], "train/loss")["train/loss"]] == [0, 0]
