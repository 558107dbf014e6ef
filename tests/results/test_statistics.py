"""Statistics of a comparison, checked with numpy, hand calculations and published tables, and the
verdicts: whether losses differ by more than rounding errors."""

import math

import numpy as np
import pytest
from comparison_helpers import KERNEL, LR, compare_rows, write_run

from results.compare import Row
from results.metrics import Value
from results.statistics import ci95, estimate_mean, estimate_median

# Student's t of two-sided 95 % intervals, by degrees of freedom.
STUDENT_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980}
LOSSES = [4.0 - step / 10 for step in range(12)]
NOISE = [0.010, -0.011, 0.0005]  # differences of the validation losses, by seed
EQUAL = [0.0, 0.0, 0.0]


@pytest.mark.parametrize(("df", "t"), STUDENT_T.items())
def test_confidence_interval_has_the_published_quantile(df, t):
    values = np.random.default_rng(df).normal(size=df + 1).tolist()
    standard_error = np.std(values, ddof=1) / math.sqrt(df + 1)
    assert ci95(values) / standard_error == pytest.approx(t, abs=5e-4)


def test_interval_of_a_mean_is_around_it():
    result = estimate_mean([1.0, 1.2, 1.4])
    margin = 4.3027 * 0.2 / math.sqrt(3)
    assert result.value == pytest.approx(1.2)
    assert (result.low, result.high) == pytest.approx((1.2 - margin, 1.2 + margin), rel=1e-4)


@pytest.mark.parametrize("estimate", [estimate_mean, estimate_median])
def test_one_value_has_no_interval_and_no_value_is_unknown(estimate):
    assert estimate([1.5]) == Value(1.5)
    assert estimate([]) == Value()


@pytest.fixture
def rows(tmp_path) -> list[Row]:
    """Two variants. The seeds 1, 2 and 3 of the first meet the seeds 1, 2 and 4 of the second.

    The training losses of a pair are equal but for 0.5 at step 200 and 2 at step 250.
    """
    losses = np.array([5.0] * 250)
    folders = []
    for seed, val in {1: 1.0, 2: 1.2, 3: 1.4}.items():
        shifted = (losses + seed).tolist()
        folders.append(write_run(tmp_path / f"a{seed}", seed, losses=shifted, val=val))
    losses[199] = 5.5
    losses[249] = 3.0
    for seed, val in {1: 1.1, 2: 1.2, 4: 9.0}.items():
        facts = {"changes": KERNEL, "peak_memory_bytes": seed * 2**20}
        shifted = (losses + seed).tolist()
        folders.append(write_run(tmp_path / f"b{seed}", seed, losses=shifted, val=val, **facts))
    return compare_rows(folders)


def test_baseline_is_not_compared_with_itself(rows):
    for name in ("difference", "divergence", "verdict"):
        assert rows[0][name] == Value()


def test_difference_is_the_mean_over_pairs(rows):
    """Seeds 1 and 2 are pairs, 4 has none: differences 0.1 and 0."""
    _, second = rows
    difference = second["difference"]
    assert second["pairs"].value == 2
    assert difference.value == pytest.approx(0.05)
    # The standard deviation is 0.1 / sqrt(2).
    assert difference.high - difference.value == pytest.approx(12.706 * 0.05, rel=1e-4)


def test_divergence_is_the_largest_distance_of_the_training_losses(rows):
    _, second = rows
    assert second["divergence"].value == 2.0
    assert second["first_divergence"].value == 0.0


def test_divergence_is_that_of_the_worst_pair(tmp_path):
    runs = [write_run(tmp_path / f"a{seed}", seed) for seed in (1, 2, 3)]
    for seed, distance in {1: 0.25, 2: 0.5, 3: 0.125}.items():
        losses = [3.0, 2.0 - distance, 1.0]
        runs.append(write_run(tmp_path / f"b{seed}", seed, losses=losses, changes=KERNEL))
    assert compare_rows(runs)[1]["divergence"].value == 0.5


@pytest.mark.parametrize(("name", "first"), [("step_ms", 16.0), ("tokens_per_second", 1006.0)])
def test_speed_is_the_median_of_the_steps_after_the_warmup(rows, name, first):
    steady = [first + step for step in range(245)]
    low, median, high = np.percentile(steady * 3, [25, 50, 75]).tolist()
    assert rows[1][name] == Value(median, low, high)


def test_memory_is_the_median_of_the_runs(rows):
    assert rows[1]["peak_memory_bytes"] == Value(2 * 2**20, 1.5 * 2**20, 3 * 2**20)


@pytest.mark.parametrize(
    ("data", "pairs", "difference"), [("x", 1, 0.0), ("y", 0, None)], ids=["same", "other"]
)
def test_only_runs_on_the_same_data_are_pairs(tmp_path, data, pairs, difference):
    first = write_run(tmp_path / "a", data="x")
    second = write_run(tmp_path / "b", changes=LR, data=data)
    _, row = compare_rows([first, second])
    assert (row["pairs"].value, row["difference"].value) == (pairs, difference)


# Verdicts


def compare_two(
    folder, changes: dict, differences: list[float], first=0.0, second=0.0, last=0.0, **facts
) -> str:
    """The verdict on a variant, compared with a baseline of three seeds.

    changes: of the config of the variant. model.dropout and train.minutes change in both.
    differences: of the validation losses of the variant's seeds.
    first, second, last: differences of the training losses at these steps.
    """
    common = {key: changes.get(key) for key in ("model.dropout", "train.minutes")}
    losses = [*LOSSES]
    losses[0] += first
    losses[1] += second
    losses[-1] += last
    runs = []
    for seed in (1, 2, 3):
        facts |= {"val": 3 + seed / 10, "changes": common}
        runs.append(write_run(folder / f"a{seed}", seed, losses=LOSSES, **facts))
    for seed, difference in enumerate(differences, 1):
        facts |= {"val": 3 + seed / 10 + difference, "changes": common | changes}
        runs.append(write_run(folder / f"b{seed}", seed, losses=losses, **facts))
    return compare_rows(runs)[1]["verdict"].value


@pytest.mark.parametrize(
    ("differences", "distances", "verdict"),
    [
        pytest.param(EQUAL, {}, "equal losses", id="equal"),
        pytest.param(
            [1.0e-7, 1.1e-7, 1.2e-7],
            {"first": 3e-7, "second": 2e-6},
            "same up to rounding",
            id="rounding, although the interval excludes 0",
        ),
        pytest.param(
            NOISE,
            {"first": 3e-7, "second": 6e-5, "last": 0.3},
            "same up to rounding",
            id="chaotic growth",
        ),
        pytest.param(
            [0.010, 0.011, 0.0105],
            {"first": 3e-7, "second": 2e-6},
            "higher loss",
            id="error late in the training",
        ),
        pytest.param([0.1, 0.1, 0.1], {}, "higher loss", id="error of the evaluation"),
        pytest.param(
            NOISE,
            {"first": 1e-3, "second": 2e-3},
            "differs from step 1",
            id="wrong forward pass",
        ),
        pytest.param(
            NOISE,
            {"first": 3e-7, "second": 2e-3},
            "differs from step 2",
            id="wrong backward pass",
        ),
        pytest.param(
            [1.0, 0.9],
            {"first": 3e-7, "last": 0.3},
            "same for 10 steps; later: too few seeds",
            id="two seeds",
        ),
        pytest.param([1e-6], {"first": 3e-7}, "same up to rounding", id="one seed"),
        # the interval is 0.0025, and three times as wide it contains 0
        pytest.param(
            [0.004, 0.003, 0.005], {"first": 3e-7}, "same up to rounding", id="wide interval"
        ),
    ],
)
def test_verdict_on_another_implementation(tmp_path, differences, distances, verdict):
    assert compare_two(tmp_path, KERNEL, differences, **distances) == verdict


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({"dtype": "float32"}, "differs from step 1"),
        ({"dtype": "bfloat16"}, "same up to rounding"),
        ({"tf32": True}, "same up to rounding"),
    ],
)
def test_low_precision_may_differ_more(tmp_path, facts, verdict):
    assert compare_two(tmp_path, KERNEL, NOISE, first=1e-3, second=2e-3, **facts) == verdict


@pytest.mark.parametrize("changes", [{"model.dropout": 0.1}, {"train.minutes": 1.0}])
def test_implementations_differ_with_dropout_and_with_a_time_limit(tmp_path, changes):
    verdict = compare_two(tmp_path, KERNEL | changes, NOISE, first=1e-3)
    assert verdict == "no difference found"


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        pytest.param(NOISE, "no difference found", id="noise"),
        # the interval is 0.0076
        pytest.param([0.009, 0.003, 0.005], "no difference found", id="mean within the interval"),
        pytest.param([-0.010, -0.011, -0.0105], "lower loss", id="lower"),
        pytest.param([0.010, 0.011, 0.0105], "higher loss", id="higher"),
        pytest.param([-0.010], "not tested: one pair", id="one pair"),
    ],
)
def test_verdict_on_another_training(tmp_path, differences, verdict):
    assert compare_two(tmp_path, LR, differences, second=2e-3) == verdict


def test_variant_without_a_pair_has_no_verdict_and_no_advice(tmp_path):
    runs = write_run(tmp_path / "a", 1), write_run(tmp_path / "b", 2, changes=LR)
    _, row = compare_rows(list(runs))
    assert (row["verdict"], row["speedup_problem"]) == (Value(), Value())
