"""Statistics of a comparison, checked with numpy, hand calculations and published tables."""

import math

import numpy as np
import pytest
from comparison_helpers import KERNEL, LR, compare_rows, write_run

from results.statistics import (
    SettingStats,
    ci95,
    detectable_difference,
    mean,
    seeds_needed,
)

# Student's t of two-sided 95 % intervals, by degrees of freedom.
STUDENT_T = {
    1: 12.706,
    2: 4.303,
    3: 3.182,
    4: 2.776,
    5: 2.571,
    9: 2.262,
    10: 2.228,
    29: 2.045,
    30: 2.042,
    120: 1.980,
}
# Effect sizes that a two-sided paired t-test at 5 % finds with a power of 0.8, by pairs.
EFFECT_SIZES = {3: 3.264, 5: 1.682, 10: 0.996, 34: 0.495, 200: 0.199}


@pytest.mark.parametrize(("df", "t"), STUDENT_T.items())
def test_confidence_interval_has_the_published_quantile(df, t):
    values = np.random.default_rng(df).normal(size=df + 1).tolist()
    standard_error = np.std(values, ddof=1) / math.sqrt(df + 1)
    assert ci95(values) / standard_error == pytest.approx(t, abs=5e-4)


def test_one_value_has_no_confidence_interval():
    assert ci95([1.0]) is None


@pytest.mark.parametrize("pairs", [2, 3, 5, 10])
def test_intervals_and_detectable_difference_hold_in_simulated_sweeps(pairs):
    """Of 2000 sweeps, 95 % have an interval around the true difference, and 80 % find it."""
    deviation = 0.02
    true = detectable_difference(deviation, pairs)
    draws = np.random.default_rng(pairs).normal(true, deviation, size=(2000, pairs)).tolist()
    results = [(mean(draw), ci95(draw)) for draw in draws]
    covering = sum(abs(difference - true) <= interval for difference, interval in results)
    finding = sum(abs(difference) > interval for difference, interval in results)
    assert covering == pytest.approx(0.95 * 2000, abs=4 * math.sqrt(2000 * 0.95 * 0.05))
    assert finding == pytest.approx(0.80 * 2000, abs=4 * math.sqrt(2000 * 0.80 * 0.20))


@pytest.mark.parametrize(("pairs", "effect"), EFFECT_SIZES.items())
def test_detectable_difference_has_the_published_effect_size(pairs, effect):
    assert detectable_difference(1.0, pairs) == pytest.approx(effect, abs=2e-3)


def test_detectable_difference_of_two_pairs_was_integrated_numerically():
    assert detectable_difference(1.0, 2) == pytest.approx(16.334009 / math.sqrt(2), rel=1e-6)


@pytest.mark.parametrize(("pairs", "effect"), EFFECT_SIZES.items())
def test_seeds_needed_are_the_fewest_that_find_the_difference(pairs, effect):
    assert seeds_needed(1.0, effect * 1.001) == pairs
    assert seeds_needed(1.0, effect * 0.99) > pairs


def test_two_seeds_find_a_difference_without_noise():
    assert seeds_needed(0.0, 0.1) == 2


def test_seeds_needed_for_a_tiny_difference_are_computed_at_once():
    normal = 1.959964 + 0.841621  # quantiles of the normal distribution
    assert seeds_needed(1.0, 1e-5) == pytest.approx((normal / 1e-5) ** 2, rel=1e-5)


@pytest.fixture
def rows(tmp_path) -> tuple[SettingStats, SettingStats]:
    """Two settings. The seeds 1, 2 and 3 of the first meet the seeds 1, 2 and 4 of the second.

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
    first, second = compare_rows(folders)
    return first, second


def test_validation_loss_is_a_mean_with_an_interval(rows):
    first, _ = rows
    assert first.seeds == 3
    assert first.val_loss == pytest.approx(1.2)
    assert first.val_loss_ci95 == pytest.approx(4.3027 * 0.2 / math.sqrt(3), rel=1e-4)


def test_first_setting_is_not_compared_with_itself(rows):
    first, _ = rows
    assert (first.difference, first.pairs, first.divergence) == (None, 0, None)


def test_difference_is_the_mean_over_pairs(rows):
    """Seeds 1 and 2 are pairs, 4 has none: differences 0.1 and 0."""
    _, second = rows
    assert second.pairs == 2
    assert second.difference == pytest.approx(0.05)
    # The standard deviation is 0.1 / sqrt(2).
    assert second.difference_ci95 == pytest.approx(12.706 * 0.05, rel=1e-4)


def test_detectable_difference_is_that_of_the_pairs(rows):
    _, second = rows
    assert second.detectable == pytest.approx(detectable_difference(0.1 / math.sqrt(2), 2))


def test_divergence_is_the_largest_distance_of_the_training_losses(rows):
    _, second = rows
    assert second.divergence == 2.0
    assert second.first_divergence == 0.0


def test_divergence_is_that_of_the_worst_pair(tmp_path):
    runs = [write_run(tmp_path / f"a{seed}", seed) for seed in (1, 2, 3)]
    for seed, distance in {1: 0.25, 2: 0.5, 3: 0.125}.items():
        losses = [3.0, 2.0 - distance, 1.0]
        runs.append(write_run(tmp_path / f"b{seed}", seed, losses=losses, changes=KERNEL))
    assert compare_rows(runs)[1].divergence == 0.5


def test_step_times_are_quartiles_without_warmup(rows):
    _, second = rows
    steady = [10.0 + step for step in range(6, 251)]
    expected = np.percentile(steady * 3, [25, 50, 75]).tolist()
    assert [second.step_ms_q1, second.step_ms, second.step_ms_q3] == expected


def test_throughput_is_a_median_without_warmup(rows):
    _, second = rows
    assert second.tokens_per_second == 1000 + 128


def test_memory_is_the_median_of_the_runs(rows):
    _, second = rows
    assert second.peak_memory_bytes == 2 * 2**20


@pytest.mark.parametrize(
    ("attention", "kernel"),
    [
        ({"resolved": "math", "flash_package": None}, "math"),
        ({"resolved": "flash", "flash_package": "FA3"}, "flash (FA3)"),
        (None, None),
    ],
)
def test_kernel_is_the_one_that_ran(tmp_path, attention, kernel):
    (row,) = compare_rows([write_run(tmp_path / "a", attention=attention)])
    assert row.kernel == kernel


def test_different_facts_of_the_runs_are_joined(tmp_path):
    runs = [write_run(tmp_path / f"{n}", n, device_name=f"chip {n}") for n in (1, 2, 3)]
    assert compare_rows(runs)[0].device_name == "chip 1, chip 2, chip 3"


def test_training_flops_are_those_of_all_steps(tmp_path):
    changes = {"train.batch_size": 4, "model.block_size": 8}
    (row,) = compare_rows([write_run(tmp_path / "a", changes=changes, flops_per_token=100)])
    assert row.training_flops == 3 * 4 * 8 * 100


def test_training_flops_are_unknown_without_those_of_a_token(tmp_path):
    assert compare_rows([write_run(tmp_path / "a")])[0].training_flops is None


@pytest.mark.parametrize("key", ["score_variance", "attention_entropy", "attention_distance"])
def test_attention_statistics_are_means(tmp_path, key):
    runs = [write_run(tmp_path / f"{n}", n, **{key: float(n)}) for n in (1, 2, 6)]
    assert getattr(compare_rows(runs)[0], key) == 3.0


def test_only_finished_runs_count(tmp_path):
    good = write_run(tmp_path / "good", 1, val=2.0)
    bad = write_run(tmp_path / "bad", 2, val=99.0, status="failed", error="not finite")
    (row,) = compare_rows([good, bad])
    assert (row.val_loss, row.seeds, row.val_loss_ci95) == (2.0, 1, None)
    assert (row.status, row.reason) == ("1 finished, 1 failed", "not finite")


def test_killed_run_may_have_a_cut_line(tmp_path):
    good = write_run(tmp_path / "good", 1)
    killed = write_run(tmp_path / "killed", 2, status="running")
    with open(killed / "metrics.jsonl", "a", encoding="utf-8") as file:
        file.write('{"step": 4, "trai')
    assert compare_rows([good, killed])[0].status == "1 finished, 1 running"


def test_refused_setting_has_a_reason_and_no_figures(tmp_path):
    refused = write_run(tmp_path / "no", status="refused", error="needs a GPU", changes=KERNEL)
    _, row = compare_rows([write_run(tmp_path / "a"), refused])
    assert (row.status, row.reason) == ("refused", "needs a GPU")
    assert (row.val_loss, row.step_ms, row.peak_memory_bytes) == (None, None, None)


@pytest.mark.parametrize(
    ("data", "pairs", "difference"), [("x", 1, 0.0), ("y", 0, None)], ids=["same", "other"]
)
def test_only_runs_on_the_same_data_are_pairs(tmp_path, data, pairs, difference):
    first = write_run(tmp_path / "a", data="x")
    second = write_run(tmp_path / "b", changes=LR, data=data)
    _, row = compare_rows([first, second])
    assert (row.pairs, row.difference, row.divergence) == (pairs, difference, difference)


def test_seeds_needed_are_for_the_given_difference(tmp_path):
    runs = [write_run(tmp_path / f"a{n}", n) for n in (1, 2, 3)]
    runs += [write_run(tmp_path / f"b{n}", n, val=1 + n / 100, changes=LR) for n in (1, 2, 3)]
    _, row = compare_rows(runs, difference=0.005)
    assert row.seeds_needed == seeds_needed(0.01, 0.005)
    assert compare_rows(runs)[1].seeds_needed is None
