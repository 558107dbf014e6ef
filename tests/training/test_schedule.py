"""Learning-rate schedules."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from common.settings import check
from training.schedule import SCHEDULES, ScheduleConfig, lr_scale


def nanogpt_lr(iteration, warmup=100, decay=2000, peak=1e-3, floor=1e-4):
    """nanoGPT's schedule, from its description: linear warmup, cosine decay, minimum."""
    if iteration < warmup:
        return peak * (iteration + 1) / (warmup + 1)
    coefficient = 0.5 * (1 + math.cos(math.pi * (iteration - warmup) / (decay - warmup)))
    return floor + coefficient * (peak - floor)


@given(iteration=st.integers(0, 1999))
def test_cosine_equals_the_schedule_of_nanogpt(iteration):
    config = ScheduleConfig("cosine", warmup_steps=100, final_fraction=0.1)
    fraction = lr_scale(config, iteration, iteration / 2000, 100 / 2000)
    assert 1e-3 * fraction == pytest.approx(nanogpt_lr(iteration))


WARMUP = [(i + 1) / 11 for i in range(10)]
FALLS_TO_20_PERCENT = [1 - 0.8 * i / 100 for i in range(100)]
CONSTANT_THEN_FALLS = [1.0] * 50 + [1 - i / 50 for i in range(50)]


@pytest.mark.parametrize(
    ("config", "timed"),
    [
        (ScheduleConfig("linear", 10, final_fraction=0.2), FALLS_TO_20_PERCENT),
        (ScheduleConfig("wsd", 10, final_fraction=0.0, decay_fraction=0.5), CONSTANT_THEN_FALLS),
        (ScheduleConfig("wsd", 10, final_fraction=0.0, decay_fraction=0.0), [1.0] * 100),
    ],
    ids=["linear", "wsd", "wsd without decay"],
)
def test_schedule_follows_its_warmup(config, timed):
    fractions = [lr_scale(config, i, i / 110, 10 / 110) for i in range(110)]
    assert fractions == pytest.approx(WARMUP + timed)


@settings(max_examples=50)
@given(
    name=st.sampled_from(list(SCHEDULES)),
    warmup=st.integers(0, 50),
    steps=st.integers(1, 100),
    final=st.floats(0, 1),
    decay=st.floats(0, 1),
)
def test_schedules_stay_between_final_fraction_and_peak(name, warmup, steps, final, decay):
    config = ScheduleConfig(name, warmup, final, decay)
    for i in range(steps):
        fraction = lr_scale(config, i, i / steps, warmup / steps)
        lowest = 0 if i < warmup else final
        assert lowest - 1e-9 <= fraction <= 1 + 1e-9


def test_unknown_schedule_is_refused():
    with pytest.raises(UserError, match="name=step is unknown; set one of cosine, linear, wsd"):
        check(ScheduleConfig("step"))
