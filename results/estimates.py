"""Confidence intervals, detectable differences and quartiles of a list of numbers."""

import bisect
import math
from collections.abc import Sequence

import numpy as np
from scipy import special, stats

POWER = 0.8  # probability that a test finds a true difference of the size `detectable_difference`
MAX_SEEDS = 10**12  # largest result of seeds_needed


def ci95(values: Sequence[float]) -> float | None:
    """Half the width of the 95 % confidence interval of a mean (Student's t).

    None for fewer than two values.
    """
    if len(values) < 2:
        return None
    return _critical_t(len(values)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def detectable_difference(std: float, pairs: int) -> float:
    """Compute the true difference that a paired t-test at 5 % finds with a probability of POWER.

    std: standard deviation of the differences of single pairs.
    """
    # For this true mean, in standard errors, the t statistic stays below its critical value with
    # a probability of 1 - POWER. The statistic has a noncentral t distribution.
    true_mean = special.nctdtrinc(pairs - 1, 1 - POWER, _critical_t(pairs))
    return float(true_mean) * std / math.sqrt(pairs)


def seeds_needed(std: float, difference: float) -> int:
    """Compute the smallest number of pairs that find `difference` with a probability of POWER."""
    # bisect searches in ascending values, and the detectable difference falls with the pairs.
    candidates = range(2, MAX_SEEDS)
    index = bisect.bisect_left(
        candidates, -difference, key=lambda pairs: -detectable_difference(std, pairs)
    )
    return candidates.start + index


def _critical_t(count: int) -> float:
    """Student's t of a two-sided 95 % interval for the mean of `count` values."""
    return float(stats.t.ppf(0.975, count - 1))


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def quartiles(values: Sequence[float]) -> tuple[float | None, ...]:
    """Lower quartile, median and upper quartile. All are None if there are no values."""
    if not values:
        return None, None, None
    return tuple(np.percentile(values, [25, 50, 75]).tolist())
