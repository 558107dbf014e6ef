"""The power law of loss over training FLOPs, on synthetic runs."""

from pathlib import Path

import numpy as np
from helpers import metrics

from compare.runs.read import Run, Setting, read_settings
from compare.runs.scaling import PowerLaw, training_flops, write_scaling

FLOPS = np.geomspace(1e12, 1e15, 6)


def test_interval_contains_the_exponent_95_times_in_100():
    """Also that of the line, at FLOPs outside of the points."""
    noise = np.random.default_rng(0).normal(size=(2000, 6))
    laws = [PowerLaw(FLOPS, 100 * FLOPS**-0.05 * np.exp(0.02 * sample)) for sample in noise]
    assert 0.935 < np.mean([abs(law.exponent - 0.05) <= law.ci95 for law in laws]) < 0.965
    ends = [law.predict(np.array([1e16])) for law in laws]
    assert 0.935 < np.mean([low < 100 * 1e16**-0.05 < high for _, low, high in ends]) < 0.965


def make_setting(path, n_layer: int, losses: list[float], **summary) -> Setting:
    """A setting with one run per loss. Its FLOPs are proportional to n_layer."""
    config = {"train.batch_size": 4, "model.block_size": 8, "data.name": "text"}
    summary = {
        "status": "finished",
        "step": 100,
        "flops_per_token": 1e6 * n_layer,
        "data": "x",
        "vocab_size": 65,
    } | summary
    return Setting(
        [
            Run(path, config, seed, summary | {"last_val_loss": loss, "last_val_bpb": loss / 2})
            for seed, loss in enumerate(losses)
        ]
    )


def test_law_uses_means_over_seeds_and_the_best_setting_of_each_size(tmp_path):
    sizes = (1, 2, 4, 8)
    settings = [make_setting(tmp_path, n, [0.9 * 5 * n**-0.1, 1.1 * 5 * n**-0.1]) for n in sizes]
    settings += [make_setting(tmp_path, n, [6.0]) for n in sizes]
    path = tmp_path / "scaling.png"
    assert write_scaling(settings, path) == "loss ~ C^-0.100 (95 % interval 0.100 to 0.100, 4 settings)"
    assert path.stat().st_size > 10_000
    bits = [make_setting(tmp_path, n, [5 * n**-0.2], vocab_size=n, data=f"x-{n}") for n in sizes]
    assert write_scaling(bits, path).startswith("loss ~ C^-0.200")


def test_law_needs_four_sizes_and_the_same_data(tmp_path):
    settings = [make_setting(tmp_path, n, [5 / n]) for n in (1, 2, 4)]
    path = tmp_path / "scaling.png"
    path.write_text("of an earlier comparison")
    assert write_scaling(settings, path) is None and not path.exists()
    almost_equal = [make_setting(tmp_path, n, [5 / n]) for n in (1, 1.01, 1.02, 4)]
    assert write_scaling(almost_equal, path) is None
    assert write_scaling([*settings, make_setting(tmp_path, 8, [1.0], data="y")], path) is None
    assert write_scaling([make_setting(tmp_path, 8, [loss]) for loss in (1.0, 2.0, 3.0, 4.0)], path) is None
    assert write_scaling([make_setting(tmp_path, n, [1.0], flops_per_token=None) for n in (1, 2, 4, 8)], path) is None
    assert not path.exists()


def test_runs_record_their_flops(trained):
    (setting,) = read_settings([Path("runs/a")])
    (run,) = setting.runs
    assert training_flops(run) == metrics("a")[-1]["tokens"] * run.summary["flops_per_token"] > 1e6
