"""Statistics of a comparison: means with confidence intervals over seeds, paired differences,
divergence, and the verdict.

Runs with the same seed form pairs, so that initial weights and batches cancel in differences.
docs/sweeps.md explains the verdicts.
"""

import math
from collections.abc import Sequence

import numpy as np

from results.metrics import Value
from results.read import Run, Variant, find_changes

# Prefixes of keys that select an implementation. They change the losses only by rounding errors.
IMPLEMENTATION = (
    "attention.",
    "checkpoint.",
    "compile",
    "deterministic",
    "device",
    "dtype",
    "eval.attention_maps",
    "eval.attention_stats",
    "eval.every",
    "eval.initial",
    "eval.sample.",
    "parallel",
    "tf32",
    "train.activation_checkpointing",
    "train.micro_batch_size",
    "world_size",
)
# Largest rounding error of the training loss at step 1, relative to the loss. It may grow in
# proportion to the step until ROUNDING_STEPS. Later growth has no bound.
FLOAT32_TOLERANCE = 1e-5
LOW_PRECISION_TOLERANCE = 1e-3
ROUNDING_STEPS = 10
ERROR_RATE = 0.05  # of a comparison: the probability that any of its verdicts is wrong
EFFECT_VARIANCE = 8.0  # with this value, the confidence sequence is narrow from five seeds on


def estimate_mean(values: Sequence[float]) -> Value:
    """Mean with a 95 % confidence interval (Student's t), which a single value does not have."""
    if not values:
        return Value()
    count = len(values)
    mean = math.fsum(values) / count
    if count == 1:
        return Value(mean)
    from scipy.special import stdtrit  # train.py plots without scipy, which takes time to import

    margin = float(stdtrit(count - 1, 0.975) * np.std(values, ddof=1)) / math.sqrt(count)
    return Value(mean, mean - margin, mean + margin)


def estimate_median(values: Sequence[float]) -> Value:
    """Median with quartiles, which a single value does not have."""
    if not values:
        return Value()
    low, median, high = np.percentile(values, [25, 50, 75]).tolist()
    return Value(median, low, high) if len(values) > 1 else Value(median)


def estimate_difference(differences: Sequence[float], num_comparisons: int = 1) -> Value:
    """Mean with an interval of a confidence sequence, which few values do not have.

    The intervals after 1, 2, 3, ... seeds contain the true mean all at once, with a probability of
    95 %. So a sweep may look after each seed, stop when it likes, and continue later.
    Wang and Ramdas, "Anytime-valid t-tests and confidence sequences for Gaussian means with unknown
    variance" (arXiv:2310.03722): with n values, it contains all means m whose likelihood ratio

        sqrt(r) ((1 + t^2 / (n - 1)) / (1 + r t^2 / (n - 1)))^(n / 2),    r = 1 / (1 + n g),

    is below 1 / error rate. t is Student's statistic for the mean m, and g is EFFECT_VARIANCE.

    num_comparisons: with the same baseline. They share the error rate (Bonferroni).
    """
    n = len(differences)
    if n == 0:
        return Value()
    mean = math.fsum(differences) / n
    error_rate = ERROR_RATE / num_comparisons
    r = 1 / (1 + n * EFFECT_VARIANCE)
    largest_ratio = (error_rate**2 * r) ** (-1 / n)  # of 1 + t^2 / (n - 1) to 1 + r t^2 / (n - 1)
    if largest_ratio * r >= 1:
        return Value(mean)
    squared_margin = (largest_ratio - 1) / (1 - largest_ratio * r)  # t^2 / (n - 1)
    margin = math.sqrt(squared_margin) * float(np.std(differences))
    return Value(mean, mean - margin, mean + margin)


def find_pairs(variant: Variant, baseline: Variant) -> list[tuple[Run, Run]]:
    """Pair finished runs with the same seed and text. The baseline itself has no pairs."""
    if variant is baseline:
        return []
    others = baseline.by_seed
    return [
        (run, others[seed])
        for seed, run in variant.by_seed.items()
        if seed in others and run.has_text_of(others[seed])
    ]


def divergence(pairs: list[tuple[Run, Run]]) -> dict[int, float]:
    """Compute the largest |difference of training losses| over pairs, by step."""
    largest: dict[int, float] = {}
    for run, other in pairs:
        losses = run.curves["train/loss"]
        other_losses = other.curves["train/loss"]
        for step in losses.keys() & other_losses.keys():
            distance = abs(losses[step] - other_losses[step])
            largest[step] = max(largest.get(step, 0.0), distance)
    return dict(sorted(largest.items()))


def compare_losses(pairs: list[tuple[Run, Run]]) -> list[float]:
    """Differences of the validation losses of pairs, relative to the baseline's mean loss.

    Losses are in bits per byte, which variants with other tokenizers have in common. A run whose
    loss is infinite has no value.
    """
    losses = [(run.newest("val/bpb"), other.newest("val/bpb")) for run, other in pairs]
    known = [pair for pair in losses if None not in pair]
    if not known:
        return []
    baseline_mean = math.fsum(other for _, other in known) / len(known)
    return [(loss - other) / baseline_mean for loss, other in known]


def judge(
    variant: Variant,
    baseline: Variant,
    difference: Value,
    distances: dict[int, float],
    negligible: float,
) -> str | None:
    """Return the verdict on a variant. None without a pair.

    A variant of which a run has failed is not judged by its other runs, which may have been lucky.
    difference: of the validation losses, from estimate_difference.
    distances: of the training losses, from divergence.
    negligible: a difference of this size counts as none.
    """
    num_failed = [run.status for run in variant.runs].count("failed")
    if num_failed > 0:
        return f"failed in {num_failed} of {len(variant.runs)} runs"
    if difference.value is None or not distances:
        return None
    if difference.value == 0 and not any(distances.values()):
        return "equal losses"
    has_interval = difference.low is not None
    is_lower = has_interval and difference.high < 0
    is_higher = has_interval and difference.low > 0
    if computes_same_function(variant.config, baseline.config):
        tolerance = _rounding_tolerance(variant, baseline)
        first_loss = max(run.curves["train/loss"].get(1, 0.0) for run in baseline.finished)
        for step, distance in distances.items():
            if step <= ROUNDING_STEPS and distance > tolerance * first_loss * step:
                return f"differs from step {step}"
        limit = tolerance if is_lower or is_higher else negligible
        if abs(difference.value) <= limit:
            return "equal up to rounding"
    if is_lower:
        return "better"
    if is_higher:
        return "worse"
    if has_interval and -negligible < difference.low and difference.high < negligible:
        return f"no difference above {100 * negligible:g} %"
    return "undecided"


def computes_same_function(config: dict, other: dict) -> bool:
    """Whether two configs differ only in the implementation.

    Implementations draw different dropout masks, and with train.minutes the learning rate depends
    on their speed.
    """
    if config.get("model.dropout") or config.get("train.minutes") is not None:
        return False
    return all(key.startswith(IMPLEMENTATION) for key in find_changes(config, other))


def _rounding_tolerance(variant: Variant, baseline: Variant) -> float:
    """Largest difference of the training losses at step 1 that rounding explains, relative."""
    runs = variant.finished + baseline.finished
    kinds = {(run.summary.get("dtype"), bool(run.summary.get("tf32"))) for run in runs}
    return FLOAT32_TOLERANCE if kinds == {("float32", False)} else LOW_PRECISION_TOLERANCE
