"""Statistics of a comparison, checked with numpy, hand calculations and published tables."""

import math

import numpy as np
import pytest

from comparison.runs.statistics import (
    STUDENT_T,
    STUDENT_T_SERIES,
    ci95,
    detectable_difference,
    look_up,
    mean,
    seeds_needed,
)


def test_student_t_matches_published_tables():
    table = {
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
    for df, t in table.items():
        assert look_up(df, STUDENT_T, STUDENT_T_SERIES) == pytest.approx(t, abs=5e-4)
    assert look_up(100_000, STUDENT_T, STUDENT_T_SERIES) == pytest.approx(1.95996, abs=1e-4)


@pytest.mark.parametrize("pairs", [2, 3, 5, 10])
def test_intervals_and_detectable_difference_hold_in_simulated_sweeps(pairs):
    """Of 2000 sweeps, 95 % have an interval around the true difference, and 80 % find one of the detectable size."""
    deviation = 0.02
    true = detectable_difference(deviation, pairs)
    draws = np.random.default_rng(pairs).normal(true, deviation, size=(2000, pairs)).tolist()
    results = [(mean(draw), ci95(draw)) for draw in draws]
    covering = sum(abs(difference - true) <= interval for difference, interval in results)
    finding = sum(abs(difference) > interval for difference, interval in results)
    assert covering == pytest.approx(0.95 * 2000, abs=4 * math.sqrt(2000 * 0.95 * 0.05))
    assert finding == pytest.approx(0.80 * 2000, abs=4 * math.sqrt(2000 * 0.80 * 0.20))


def test_detectable_difference_matches_published_tables():
    # The effect sizes for a power of 0.8 in a two-sided paired t-test at 5 %.
    for pairs, effect in ((3, 3.264), (5, 1.682), (10, 0.996), (34, 0.495), (200, 0.199)):
        assert detectable_difference(1.0, pairs) == pytest.approx(effect, abs=2e-3)
        assert seeds_needed(1.0, effect * 1.001) == pairs
        assert seeds_needed(1.0, effect * 0.99) > pairs
    assert detectable_difference(0.0, 3) == 0 and seeds_needed(0.0, 0.1) == 2
