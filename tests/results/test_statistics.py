"""Statistics of a comparison, checked with numpy, hand calculations and published tables, and the
verdicts: whether losses differ by more than rounding errors."""

import math

import numpy as np
import pytest
from comparison_helpers import KERNEL, LR, compare_rows, write_run

from results.compare import Row
from results.metrics import Value
from results.statistics import (
    EFFECT_VARIANCE,
    computes_same_function,
    estimate_difference,
    estimate_mean,
    estimate_median,
)

# Student's t of two-sided 95 % intervals, by degrees of freedom.
STUDENT_T = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 10: 2.228, 30: 2.042, 120: 1.980}
LOSSES = [4.0 - step / 10 for step in range(12)]
EQUAL = [0.0, 0.0, 0.0]
FACTS = {"data": "x-bpe", "text_hash": "x"}


@pytest.mark.parametrize(("df", "t"), STUDENT_T.items())
def test_confidence_interval_has_the_published_quantile(df, t):
    values = np.random.default_rng(df).normal(size=df + 1).tolist()
    standard_error = np.std(values, ddof=1) / math.sqrt(df + 1)
    mean = estimate_mean(values)
    assert (mean.high - mean.value) / standard_error == pytest.approx(t, abs=5e-4)


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
    """Seeds 1 and 2 are pairs, 4 has none: differences 0.1 and 0, and a mean loss of 1.1."""
    _, second = rows
    assert second["pairs"].value == 2
    assert second["difference"] == Value(pytest.approx(0.05 / 1.1))


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
    ("facts", "pairs", "difference"),
    [
        pytest.param({}, 1, 0.0, id="same"),
        pytest.param({"data": "x-char", "last_val_bpb": 0.6}, 1, 0.2, id="other tokenizer"),
        pytest.param({"data": "y-bpe", "text_hash": "y"}, 0, None, id="other text"),
    ],
)
def test_only_runs_on_the_same_text_are_pairs(tmp_path, facts, pairs, difference):
    first = write_run(tmp_path / "a", **FACTS)
    second = write_run(tmp_path / "b", changes=LR, **(FACTS | facts))
    _, row = compare_rows([first, second])
    assert (row["pairs"].value, row["difference"].value) == (pairs, pytest.approx(difference))


def test_runs_of_earlier_versions_with_the_same_prepared_data_are_pairs(tmp_path):
    runs = [write_run(tmp_path / "a", data="x"), write_run(tmp_path / "b", changes=LR, data="x")]
    assert compare_rows(runs)[1]["pairs"].value == 1


# Verdicts


def compare_two(
    folder, changes: dict, differences: list[float], first=0.0, second=0.0, last=0.0, **facts
) -> str:
    """The verdict on a variant, compared with a baseline that has as many seeds.

    changes: of the config of the variant. model.dropout and train.minutes change in both.
    differences: of the validation losses of the variant's seeds, in percent.
    first, second, last: differences of the training losses at these steps.
    """
    common = {key: changes.get(key) for key in ("model.dropout", "train.minutes")}
    losses = [*LOSSES]
    losses[0] += first
    losses[1] += second
    losses[-1] += last
    runs = []
    for seed, difference in enumerate(differences):
        facts |= {"val": 3.0, "changes": common}
        runs.append(write_run(folder / f"a{seed}", seed, losses=LOSSES, **facts))
        facts |= {"val": 3 + 0.03 * difference, "changes": common | changes}
        runs.append(write_run(folder / f"b{seed}", seed, losses=losses, **facts))
    return compare_rows(runs)[1]["verdict"].value


@pytest.mark.parametrize(
    ("differences", "distances", "verdict"),
    [
        pytest.param(EQUAL, {}, "equal losses", id="equal"),
        pytest.param(
            [1e-6, 1.0001e-6, 1.0002e-6],
            {"first": 3e-7, "second": 2e-6},
            "equal up to rounding",
            id="rounding, although the interval excludes 0",
        ),
        pytest.param(
            [0.4, -0.5, 0.1],
            {"first": 3e-7, "second": 6e-5, "last": 0.3},
            "equal up to rounding",
            id="chaotic growth",
        ),
        pytest.param([0.4], {"first": 3e-7}, "equal up to rounding", id="one seed"),
        pytest.param(
            [0.40, 0.41, 0.405],
            {"first": 3e-7, "second": 2e-6},
            "worse",
            id="small error late in the training",
        ),
        pytest.param([1.0, 0.9], {"first": 3e-7}, "undecided", id="large error, two seeds"),
        pytest.param([0.41, 0.4, 0.405], {}, "worse", id="error of the evaluation"),
        pytest.param(
            [0.1, 0.2, 0.3], {"first": 1e-3, "second": 2e-3}, "differs from step 1", id="forward"
        ),
        pytest.param(
            [0.1, 0.2, 0.3], {"first": 3e-7, "second": 2e-3}, "differs from step 2", id="backward"
        ),
    ],
)
def test_verdict_on_another_implementation(tmp_path, differences, distances, verdict):
    assert compare_two(tmp_path, KERNEL, differences, **distances) == verdict


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({"dtype": "float32"}, "differs from step 1"),
        ({"dtype": "bfloat16"}, "equal up to rounding"),
        ({"tf32": True}, "equal up to rounding"),
    ],
)
def test_low_precision_may_differ_more(tmp_path, facts, verdict):
    differences = [0.1, -0.2, 0.1]
    assert compare_two(tmp_path, KERNEL, differences, first=1e-3, second=2e-3, **facts) == verdict


@pytest.mark.parametrize("changes", [{"model.dropout": 0.1}, {"train.minutes": 1.0}])
def test_implementations_differ_with_dropout_and_with_a_time_limit(tmp_path, changes):
    verdict = compare_two(tmp_path, KERNEL | changes, [0.1, -0.2, 0.1], first=1e-3)
    assert verdict == "undecided"


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        pytest.param([-1.0, -1.1, -1.05], "better", id="better"),
        pytest.param([1.0, 1.1, 1.05], "worse", id="worse"),
        # an interval is 3.29 standard deviations wide on each side with four seeds
        pytest.param([-0.1, 0.1, -0.1, 0.1], "no difference above 0.5 %", id="no difference"),
        pytest.param([-0.2, 0.2, -0.2, 0.2], "undecided", id="noise"),
        pytest.param([0.1, 0.11, 0.105], "worse", id="small, but certain"),
        pytest.param([-1.0, -1.0], "undecided", id="two seeds"),
        pytest.param([-1.0, -0.2, -1.8], "undecided", id="three seeds with much noise"),
    ],
)
def test_verdict_on_another_training(tmp_path, differences, verdict):
    assert compare_two(tmp_path, LR, differences, second=2e-3) == verdict


def test_more_settings_need_more_evidence(tmp_path):
    """With one setting, these differences are a verdict; with five, they are not."""
    verdicts = []
    for num_settings in (1, 5):
        runs = []
        for setting in range(num_settings + 1):
            for seed, noise in enumerate([-0.02, 0.02, 0.01, -0.01]):
                val = 3.0 if setting == 0 else 3.06 + noise
                folder = tmp_path / f"{num_settings}-{setting}-{seed}"
                changes = {"optimizer.lr": 0.1 + setting}
                runs.append(write_run(folder, seed, val=val, changes=changes))
        verdicts.append(compare_rows(runs)[1]["verdict"].value)
    assert verdicts == ["worse", "undecided"]


def test_variant_with_a_failed_run_is_not_judged_by_the_others(tmp_path):
    """Otherwise, a setting that often diverges could be better by its lucky seeds."""
    runs = [write_run(tmp_path / f"a{seed}", seed, val=1.0) for seed in range(5)]
    for seed in range(5):
        status = "failed" if seed == 3 else "finished"
        facts = {"val": 0.9 + seed / 1000, "status": status, "changes": LR}
        runs.append(write_run(tmp_path / f"b{seed}", seed, **facts))
    assert compare_rows(runs)[1]["verdict"].value == "failed in 1 of 5 runs"


def test_refused_setting_costs_no_evidence(tmp_path):
    runs = [write_run(tmp_path / f"a{seed}", seed, val=3.0) for seed in range(4)]
    runs += [write_run(tmp_path / f"b{n}", n, val=3.01 + n / 1e3, changes=LR) for n in range(4)]
    alone = compare_rows(runs)[1]
    refused = write_run(tmp_path / "c", status="refused", changes=KERNEL)
    assert compare_rows([*runs, refused])[1]["difference"] == alone["difference"]


def test_variant_without_a_pair_has_no_verdict(tmp_path):
    runs = write_run(tmp_path / "a", 1), write_run(tmp_path / "b", 2, changes=LR)
    assert compare_rows(list(runs))[1]["verdict"] == Value()


# Intervals of a confidence sequence


def integrate_likelihood_ratio(values: np.ndarray) -> float:
    """Likelihood ratio of a mean of delta standard deviations, over that of a mean of 0.

    Averaged over delta ~ N(0, EFFECT_VARIANCE) and over the logarithm of the standard deviation,
    which is uniform. Sums over a grid approximate the integrals.
    """
    log_scales, deltas = np.linspace(-5, 15, 401), np.linspace(-20, 20, 401)
    standardized = values / np.exp(log_scales)[:, None]
    squares = np.square(standardized[:, None] - deltas[:, None]).sum(axis=-1)
    likelihoods = np.exp(-len(values) * log_scales[:, None] - squares / 2)
    prior = np.exp(-(deltas**2) / (2 * EFFECT_VARIANCE))
    prior /= prior.sum()
    return float((likelihoods @ prior).sum() / likelihoods[:, deltas == 0].sum())


@pytest.mark.parametrize(("count", "num_comparisons"), [(3, 1), (5, 1), (10, 1), (5, 3), (10, 10)])
def test_ends_of_the_interval_have_a_likelihood_ratio_of_1_over_the_error_rate(
    count, num_comparisons
):
    values = np.random.default_rng(count).normal(1.0, size=count)
    difference = estimate_difference(values.tolist(), num_comparisons)
    for end in (difference.low, difference.high):
        ratio = integrate_likelihood_ratio(values - end)
        assert ratio == pytest.approx(20 * num_comparisons, rel=1e-6)


@pytest.mark.parametrize("count", [1, 2])
def test_one_and_two_differences_have_no_interval(count):
    assert estimate_difference([1.0, 1.1][:count]).low is None


def test_at_most_5_percent_of_sequences_exclude_the_true_mean_at_any_look():
    """Four standard errors above 5 % are 8.9 %. Intervals of Student's t exclude it in 17 %."""
    sequences = np.random.default_rng(1).normal(size=(500, 10)).tolist()
    num_wrong = 0
    for sequence in sequences:
        looks = [estimate_difference(sequence[:count]) for count in range(3, 11)]
        num_wrong += any(look.low > 0 or look.high < 0 for look in looks)
    assert 0 < num_wrong <= 44


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ({"attention.backend": "naive"}, True),
        ({"parallel": "fsdp"}, True),
        ({"train.activation_checkpointing": "block"}, True),
        ({"eval.initial": False}, True),
        ({"eval.attention_maps": True}, True),
        ({"model.window": 32}, False),
        ({"train.batch_size": 8}, False),
        ({"eval.windows": 8}, False),
    ],
    ids=str,
)
def test_implementations_compute_the_same_function(change, is_same):
    assert computes_same_function(change, {}) == is_same
