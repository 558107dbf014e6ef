"""Verdicts of a comparison: whether losses differ by more than rounding errors."""

import pytest
from comparison_helpers import KERNEL, LR, compare_rows, write_run

from results.statistics import SettingStats

LOSSES = [4.0 - step / 10 for step in range(12)]
NOISE = [0.010, -0.011, 0.0005]  # differences of the validation losses, by seed
EQUAL = [0.0, 0.0, 0.0]
NOT_FOUND = "no difference found; detectable: 0.034"


def compare_two(
    folder, changes: dict, differences: list[float], first=0.0, second=0.0, last=0.0, **facts
) -> SettingStats:
    """Compare a setting with three seeds and another one.

    changes: of the config of the other setting. model.dropout and train.minutes change in both.
    differences: of the validation losses of the other setting's seeds.
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
    _, row = compare_rows(runs)
    return row


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
    ],
)
def test_verdict_on_another_implementation(tmp_path, differences, distances, verdict):
    assert compare_two(tmp_path, KERNEL, differences, **distances).verdict == verdict


@pytest.mark.parametrize(
    ("dtype", "verdict"),
    [("float32", "differs from step 1"), ("bfloat16", "same up to rounding")],
)
def test_low_precision_may_differ_more(tmp_path, dtype, verdict):
    row = compare_two(tmp_path, KERNEL, NOISE, first=1e-3, second=2e-3, dtype=dtype)
    assert row.verdict == verdict


def test_tf32_may_differ_as_low_precision(tmp_path):
    row = compare_two(tmp_path, KERNEL, NOISE, first=1e-3, second=2e-3, tf32=True)
    assert row.verdict == "same up to rounding"


@pytest.mark.parametrize("changes", [{"model.dropout": 0.1}, {"train.minutes": 1.0}])
def test_implementations_differ_with_dropout_and_with_a_time_limit(tmp_path, changes):
    row = compare_two(tmp_path, KERNEL | changes, NOISE, first=1e-3)
    assert row.verdict == NOT_FOUND


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        pytest.param(NOISE, NOT_FOUND, id="noise"),
        pytest.param(
            [0.009, 0.003, 0.005],  # the interval is 0.0076
            "no difference found; detectable: 0.01",
            id="mean within the interval",
        ),
        pytest.param([-0.010, -0.011, -0.0105], "lower loss", id="lower"),
        pytest.param([0.010, 0.011, 0.0105], "higher loss", id="higher"),
        pytest.param([-0.010], "not tested: one pair", id="one pair"),
    ],
)
def test_verdict_on_another_training(tmp_path, differences, verdict):
    assert compare_two(tmp_path, LR, differences, second=2e-3).verdict == verdict


def test_first_setting_has_no_verdict(tmp_path):
    assert compare_rows([write_run(tmp_path / "a")])[0].verdict is None


def test_setting_without_a_pair_has_no_verdict(tmp_path):
    runs = write_run(tmp_path / "a", 1), write_run(tmp_path / "b", 2, changes=LR)
    assert compare_rows(list(runs))[1].verdict is None


def test_divergence_at_step_1_is_known(tmp_path):
    row = compare_two(tmp_path, KERNEL, NOISE, first=3e-7, last=0.3)
    assert row.first_divergence == pytest.approx(3e-7)
    assert row.divergence == pytest.approx(0.3)
