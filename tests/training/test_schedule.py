"""Learning-rate schedules."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.schedule import ScheduleConfig, lr_scale


def nanogpt_lr(iteration, warmup=100, decay=2000, peak=1e-3, floor=1e-4):
    """nanoGPT's schedule, from its description: linear warmup, cosine decay, minimum."""
    if iteration < warmup:
        return peak * (iteration + 1) / (warmup + 1)
    return floor + 0.5 * (1 + math.cos(math.pi * (iteration - warmup) / (decay - warmup))) * (
        peak - floor
    )


@given(iteration=st.integers(0, 1999))
def test_cosine_equals_the_schedule_of_nanogpt(iteration):
    config = ScheduleConfig("cosine", warmup_steps=100, final_fraction=0.1, decay_fraction=None)
    fraction = lr_scale(config, iteration, 2000, iteration / 2000)
    assert 1e-3 * fraction == pytest.approx(nanogpt_lr(iteration))


def test_linear_schedule_decays_after_the_warmup_and_wsd_first_stays_constant():
    linear = ScheduleConfig("linear", warmup_steps=10, final_fraction=0.2, decay_fraction=None)
    wsd = ScheduleConfig("wsd", warmup_steps=10, final_fraction=0.0, decay_fraction=0.5)
    constant_then_linear = [1.0] * 50 + [1 - i / 50 for i in range(50)]
    for config, expected in (
        (linear, [1 - 0.8 * i / 100 for i in range(100)]),
        (wsd, constant_then_linear),
    ):
        fractions = [lr_scale(config, i, 110, i / 110) for i in range(110)]
        assert fractions == pytest.approx([(i + 1) / 11 for i in range(10)] + expected), config.name


@settings(max_examples=50)
@given(
    name=st.sampled_from(["cosine", "linear", "wsd"]), warmup=st.integers(0, 50), steps=st.none() | st.integers(1, 100),
    final=st.floats(0, 1), decay=st.floats(0, 1),
)  # fmt: skip
def test_schedules_stay_between_final_fraction_and_peak(name, warmup, steps, final, decay):
    config = ScheduleConfig(name, warmup, final, decay)
    for i in range(steps or 100):
        fraction = lr_scale(config, i, steps, i / (steps or 100))
        assert (0 if i < warmup else final) - 1e-9 <= fraction <= 1 + 1e-9
