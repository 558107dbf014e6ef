"""Statistics of a comparison: means with confidence intervals over seeds, paired differences,
divergence, and the verdict.

Runs with the same seed form pairs, so that initial weights and batches cancel in differences.
About 8 (s / d)^2 pairs find a difference d with a probability of 80 %, where s is the standard
deviation of the differences of single pairs. docs/sweeps.md explains the verdicts.
"""

import math
from collections.abc import Sequence

import numpy as np

from results.metrics import Value
from results.read import Run, Variant

# Prefixes of keys that select an implementation. They change the losses only by rounding errors.
IMPLEMENTATION = (
    "attention.",
    "checkpoint.",
    "compile",
    "deterministic",
    "device",
    "dtype",
    "eval.attention_stats",
    "eval.every",
    "eval.sample.",
    "flops_per_second",
    "plan",
    "tf32",
    "train.micro_batch_size",
    "train.profile",
    "world_size",
)
# Largest rounding error of the training loss at step 1, relative to the loss. It may grow in
# proportion to the step until ROUNDING_STEPS. Later growth has no bound.
FLOAT32_TOLERANCE = 1e-5
LOW_PRECISION_TOLERANCE = 1e-3
ROUNDING_STEPS = 10
MIN_PAIRS = 3  # with two pairs, three times the interval is 27 standard deviations wide


def estimate_mean(values: Sequence[float]) -> Value:
    """Mean with a 95 % confidence interval, which a single value does not have."""
    if not values:
        return Value()
    mean = math.fsum(values) / len(values)
    margin = ci95(values)
    return Value(mean, mean - margin, mean + margin) if len(values) > 1 else Value(mean)


def estimate_median(values: Sequence[float]) -> Value:
    """Median with quartiles, which a single value does not have."""
    if not values:
        return Value()
    low, median, high = np.percentile(values, [25, 50, 75]).tolist()
    return Value(median, low, high) if len(values) > 1 else Value(median)


def ci95(values: Sequence[float]) -> float:
    """Half the width of the 95 % confidence interval of a mean (Student's t). 0 for one value."""
    from scipy.special import stdtrit  # train.py plots without scipy, which takes time to import

    count = len(values)
    if count == 1:
        return 0.0
    return float(stdtrit(count - 1, 0.975) * np.std(values, ddof=1)) / math.sqrt(count)


def find_pairs(variant: Variant, baseline: Variant) -> list[tuple[Run, Run]]:
    """Pair finished runs with the same seed and data. The baseline itself has no pairs."""
    if variant is baseline:
        return []
    others = baseline.by_seed
    return [(run, others[seed]) for seed, run in variant.by_seed.items() if seed in others]


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


def judge(
    variant: Variant, baseline: Variant, differences: list[float], distances: dict[int, float]
) -> str | None:
    """Return the verdict: whether the losses of pairs differ by more than rounding errors.

    differences: of the validation losses. distances: of the training losses, by step.
    None without a pair.
    """
    if not differences or not distances:
        return None
    if not any(differences) and not any(distances.values()):
        return "equal losses"
    difference = estimate_mean(differences).value
    interval = ci95(differences)
    if computes_same_function(variant.config, baseline.config):
        tolerance = _rounding_tolerance(variant, baseline)
        for step, distance in distances.items():
            if step <= ROUNDING_STEPS and distance > tolerance * step:
                return f"differs from step {step}"
        if abs(difference) > tolerance and len(differences) < MIN_PAIRS:
            return f"same for {ROUNDING_STEPS} steps; later: too few seeds"
        # An interval excludes 0 by chance in 5 % of cases, three times its width in less than 2 %.
        if abs(difference) <= max(3 * interval, tolerance):
            return "same up to rounding"
    if len(differences) == 1:
        return "not tested: one pair"
    if abs(difference) > interval:
        return "higher loss" if difference > 0 else "lower loss"
    return "no difference found"


def computes_same_function(config: dict, other: dict) -> bool:
    """Whether two configs differ only in the implementation.

    Implementations draw different dropout masks, and with train.minutes the learning rate depends
    on their speed.
    """
    if config.get("model.dropout") or config.get("train.minutes") is not None:
        return False
    changed = [key for key in config.keys() | other.keys() if config.get(key) != other.get(key)]
    return all(key.startswith(IMPLEMENTATION) for key in changed)


def _rounding_tolerance(variant: Variant, baseline: Variant) -> float:
    """Largest difference of the training losses at step 1 that rounding explains, in nats."""
    runs = variant.finished + baseline.finished
    kinds = {(run.summary.get("dtype"), bool(run.summary.get("tf32"))) for run in runs}
    tolerance = FLOAT32_TOLERANCE if kinds == {("float32", False)} else LOW_PRECISION_TOLERANCE
    return tolerance * max(run.curves["train/loss"].get(1, 0.0) for run in baseline.finished)
