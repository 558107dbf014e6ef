"""Speedup at equal loss, checked with simulated sweeps whose speedups are known."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from comparison_helpers import LR, compare_rows, write_run

from results.compare import format_cell
from results.metrics import Value
from results.speedup import estimate_speedup

LENGTHS = [800, 1000, 1250]
STEPS = 1000
NO_TIME_DIFFERENCE = np.zeros(3)


def true_loss(steps):
    """A power law, as of training runs with complete schedules."""
    return 3.0 + 40 * steps**-0.5


def estimate(loss: float, steps: int = STEPS) -> Value:
    """The speedup of three seeds, whose losses differ from `loss` and the power law equally."""
    offsets = np.array([-0.1, 0.0, 0.1])
    curves = true_loss(np.array(LENGTHS)) + offsets[:, None]
    return estimate_speedup(LENGTHS, curves, loss + offsets, steps, NO_TIME_DIFFERENCE)


def simulate_coverage(speedup: float, seeds: int, noise: float, time_noise: float) -> float:
    """Fraction of 300 simulated sweeps whose interval contains the true speedup.

    noise: standard deviation of single losses. time_noise: of the logarithm of single step times.
    Both share an offset of each seed, and the variant's steps take 5 % longer than the baseline's.
    """
    generator = np.random.default_rng(seeds)
    covering = 0
    for _ in range(300):
        offsets = generator.normal(0, 0.05, size=(seeds, 1))
        curves = true_loss(np.array(LENGTHS)) + offsets
        curves += generator.normal(0, noise, size=curves.shape)
        losses = true_loss(STEPS * speedup * 1.05) + offsets[:, 0]
        losses += generator.normal(0, noise, size=seeds)
        ratios = np.log(1 / 1.05) + generator.normal(0, time_noise, size=seeds)
        result = estimate_speedup(LENGTHS, curves, losses, STEPS, ratios)
        low = -math.inf if result.low is None else result.low
        high = math.inf if result.high is None else result.high
        covering += low <= speedup <= high
    return covering / 300


@pytest.mark.parametrize(
    ("speedup", "seeds", "noise", "time_noise"),
    [(0.85, 3, 0.001, 0.0), (1.15, 5, 0.005, 0.02)],
)
def test_intervals_contain_the_true_speedup_in_simulated_sweeps(seeds, speedup, noise, time_noise):
    coverage = simulate_coverage(speedup, seeds, noise, time_noise)
    # four standard errors of 300 sweeps are 0.050
    assert coverage == pytest.approx(0.95, abs=0.05)


@pytest.mark.parametrize(
    ("length", "steps"), [(850, 1000), (1000, 1000), (1200, 1000), (1250, 1250)]
)
def test_loss_of_another_length_is_reached_by_that_length(length, steps):
    """All seeds have the same offset, which cancels: the interval is narrow."""
    result = estimate(true_loss(length), steps)
    expected = pytest.approx(length / steps, rel=2e-3)
    assert (result.value, result.low, result.high) == (expected, expected, expected)


def test_single_seed_has_no_interval():
    curves = np.array([true_loss(np.array(LENGTHS))])
    losses = np.array([true_loss(STEPS)])
    result = estimate_speedup(LENGTHS, curves, losses, STEPS, np.log([1.5]))
    assert result == Value(pytest.approx(1.5))


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (true_loss(1300), (None, pytest.approx(1.25), None)),
        (true_loss(700), (None, None, pytest.approx(0.8))),
        (1.0, (None, pytest.approx(1.25), None)),
        (9.0, (None, None, pytest.approx(0.8))),
    ],
    ids=["better", "worse", "much better", "much worse"],
)
def test_loss_outside_of_the_curve_has_a_bound(loss, expected):
    result = estimate(loss)
    assert (result.value, result.low, result.high) == expected


@pytest.mark.parametrize(
    ("distances", "times"),
    [
        ([0.04, 0.005, 0.03], [0.0, 0.0, 0.0]),  # less than the noise of the losses
        ([0.5, 0.5, 0.5], [-0.1, 0.0, 0.1]),
    ],
    ids=["losses", "step times"],
)
def test_bound_has_the_uncertainty(distances, times):
    """Without it, the bounds are 1 and 0.8."""
    data = ([800, 1000], np.array([[2.0, 1.0]] * 3))
    better = estimate_speedup(*data, 1.0 - np.array(distances), STEPS, np.array(times))
    worse = estimate_speedup(*data, 2.0 + np.array(distances), STEPS, np.array(times))
    assert better.low < 1.0
    assert worse.high > 0.8


def write_runs(folder: Path, curve: dict[int, float], other: float, **facts) -> list[Path]:
    """Three seeds of a baseline with several train.steps, and of a variant with 100 steps.

    curve: losses by train.steps. other: loss of the variant. facts: of the variant.
    """
    runs = []
    for seed in (1, 2, 3):
        offset = seed / 10
        for steps, loss in curve.items():
            changes = {"train.steps": steps}
            options = {"val": loss + offset, "changes": changes, "step": steps}
            runs.append(write_run(folder / f"a{steps}-{seed}", seed, losses=[3.0] * 9, **options))
        options = {"losses": [3.0] * 9, "changes": LR | {"train.steps": 100}, "step": 100}
        runs.append(write_run(folder / f"b{seed}", seed, val=other + offset, **(options | facts)))
    return runs


CURVE = {100: 2.0, 50: 3.0, 200: 1.0}


def get_problem(runs: list[Path]) -> str | None:
    """Why the last variant has no speedup."""
    return compare_rows(runs)[-1]["speedup_problem"].value


def set_loss(run: Path, loss: float) -> None:
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    text = json.dumps(summary | {"last_val_loss": loss})
    (run / "summary.json").write_text(text, encoding="utf-8")


def test_variants_have_speedups_except_the_lengths_of_the_baseline(tmp_path):
    rows = compare_rows(write_runs(tmp_path, CURVE, 1.0001))
    cells = [format_cell(row, "speedup") for row in rows]
    assert cells == ["–", "–", "–", "2.00 (2.00–2.00)"]  # noqa: RUF001


@pytest.mark.parametrize(
    ("curve", "loss", "cell"),
    [(CURVE, 0.5, "> 2.00"), (CURVE, 3.5, "< 0.50"), ({100: 2.0}, 1.0, "–")],  # noqa: RUF001
    ids=["better", "worse", "one length"],
)
def test_cell_has_the_bound_of_a_loss_outside_of_the_curve(tmp_path, curve, loss, cell):
    row = compare_rows(write_runs(tmp_path, curve, loss))[-1]
    assert format_cell(row, "speedup") == cell


@pytest.mark.parametrize("losses", [(2.0, 2.0), (2.1, 1.0)], ids=["none", "without one seed"])
def test_speedup_needs_losses_that_fall_without_any_one_seed(tmp_path, losses):
    runs = write_runs(tmp_path, {100: 2.0, 200: 2.01}, 2.0)
    set_loss(tmp_path / "a100-1", losses[0])
    set_loss(tmp_path / "a200-1", losses[1])
    assert "do not clearly have lower losses" in get_problem(runs)


def test_losses_of_single_seeds_may_rise(tmp_path):
    runs = write_runs(tmp_path, {100: 2.0, 200: 1.0}, 1.5)
    set_loss(tmp_path / "a200-1", 2.2)
    assert get_problem(runs) is None


def test_length_without_all_seeds_is_ignored(tmp_path):
    runs = write_runs(tmp_path, CURVE | {400: 0.5}, 1.5)
    complete = [run for run in runs if run.name not in ("a400-2", "a400-3")]
    assert format_cell(compare_rows(complete)[-1], "speedup") == "1.41 (1.41–1.41)"  # noqa: RUF001


def test_run_that_ended_early_has_no_speedup(tmp_path):
    """Time limits and train.patience end runs before train.steps."""
    row = compare_rows(write_runs(tmp_path, CURVE, 1.5, step=99))[-1]
    assert row["speedup"] == Value()


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({"device_name": "another chip"}, "the devices differ"),
        ({"losses": [3.0] * 30}, "step times vary"),  # from 16 to 40 ms
        ({"losses": []}, "are missing"),
    ],
)
def test_times_that_cannot_be_compared_have_a_speedup_per_step_only(tmp_path, facts, problem):
    row = compare_rows(write_runs(tmp_path, CURVE, 1.5, **facts))[-1]
    assert problem in row["speedup_problem"].value
    assert row["speedup"] == Value()
    assert row["speedup_per_step"].value == pytest.approx(1.41, abs=0.01)


def test_faster_steps_are_a_larger_speedup_than_per_step(tmp_path):
    """The baseline's median step takes 17.5 ms, and that of the variant 16 ms."""
    row = compare_rows(write_runs(tmp_path, CURVE, 1.5, losses=[3.0] * 6))[-1]
    ratio = row["speedup"].value / row["speedup_per_step"].value
    assert ratio == pytest.approx(17.5 / 16)


def test_single_length_has_no_speedup_and_no_note(tmp_path):
    row = compare_rows(write_runs(tmp_path, {100: 2.0}, 1.5))[-1]
    assert (row["speedup"], row["speedup_problem"]) == (Value(), Value())


def test_time_limit_without_steps_has_no_speedup(tmp_path):
    changes = {"train.steps": None, "train.minutes": 1}
    runs = [write_run(tmp_path / "a", changes=changes), write_run(tmp_path / "b", changes=LR)]
    assert compare_rows(runs)[-1]["speedup"] == Value()
