"""Speedup at equal loss: how much longer the baseline trains until it has a variant's loss.

    steps of the baseline with this loss     step time of the baseline
    ------------------------------------  x  -------------------------
            steps of the variant             step time of the variant

The baseline must have finished with several values of train.steps. Each of these runs has a
complete learning-rate schedule. The logarithm of their steps is interpolated over their losses, and
not extrapolated: a loss outside of theirs has a bound instead of a speedup.

The interval comes from a jackknife over the seeds (Efron, "The Jackknife, the Bootstrap and Other
Resampling Plans", 1982). Effects of the initial weights and batches that runs share cancel.
"""

from math import exp, log

import numpy as np
from scipy.interpolate import PchipInterpolator

from results.metrics import Value
from results.read import Run, Variant
from results.statistics import ci95, estimate_median
from training.run_folder import summary_key

# The settings in which two lengths of one variant may differ.
LENGTH_KEYS = ("train.steps", "eval.every", "checkpoint.")
LOSS = summary_key("val/loss")
MAX_SPREAD = 1.5  # upper / lower quartile of step times; a larger ratio means a busy machine


def list_lengths(variants: list[Variant]) -> dict[int, Variant]:
    """The baseline, and the variants that differ from it in length only, by train.steps."""
    baseline = _without_length(variants[0].config)
    lengths = {
        variant.config["train.steps"]: variant
        for variant in reversed(variants)  # the first one of a length remains
        if _without_length(variant.config) == baseline and variant.config["train.steps"]
    }
    return dict(sorted(lengths.items()))


def _without_length(config: dict) -> dict:
    return {key: value for key, value in config.items() if not key.startswith(LENGTH_KEYS)}


def measure_speedups(
    variant: Variant, baseline: Variant, lengths: dict[int, Variant]
) -> tuple[Value, Value, str | None]:
    """Compare a variant with the lengths of the baseline, which have no speedups themselves.

    lengths: from list_lengths.
    Returns the speedup, the speedup as if all steps took equally long, and why one is missing.
    """
    steps = variant.config["train.steps"]
    if None in (steps, baseline.config["train.steps"]) or variant in lengths.values():
        return Value(), Value(), None
    runs = _complete_runs(variant)
    baseline_runs = _complete_runs(baseline)
    seeds = [seed for seed in runs if seed in baseline_runs]
    losses_of_lengths = {}
    for length, other in lengths.items():
        others = _complete_runs(other)
        if all(seed in others for seed in seeds):
            losses_of_lengths[length] = [others[seed].summary[LOSS] for seed in seeds]
    if not seeds or len(losses_of_lengths) < 2:
        return Value(), Value(), None
    curves = np.array(list(losses_of_lengths.values())).T  # (S, K)
    if not _all_fall(curves):
        problem = "no speedup: longer runs of the baseline do not clearly have lower losses"
        return Value(), Value(), problem
    losses = np.array([runs[seed].summary[LOSS] for seed in seeds])
    data = (list(losses_of_lengths), curves, losses, steps)
    per_step = estimate_speedup(*data, np.zeros(len(seeds)))
    if len({run.summary.get("device_name") for run in variant.finished + baseline.finished}) > 1:
        return Value(), per_step, "no speedup, except per step: the devices differ"
    if _is_noisy(variant) or _is_noisy(baseline):
        return Value(), per_step, "no speedup, except per step: step times vary, or are missing"
    ratios = [_median_step(baseline_runs[seed]) / _median_step(runs[seed]) for seed in seeds]
    return estimate_speedup(*data, np.log(ratios)), per_step, None


def estimate_speedup(
    lengths: list[int],
    curves: np.ndarray,
    losses: np.ndarray,
    steps: int,
    log_time_ratios: np.ndarray,
) -> Value:
    """Estimate a speedup from the losses of S seeds. A single seed has no interval.

    lengths (K): steps of the baseline, in ascending order; K is at least 2.
    curves (S, K): its losses, for which _all_fall is true.
    losses (S): of the variant, after `steps` steps.
    log_time_ratios (S): logarithm of the baseline's step time divided by the variant's.
    """
    S = len(losses)
    log_lengths = np.log(lengths)
    curve = curves.mean(axis=0)
    log_ratio = log_time_ratios.mean() - log(steps)

    def log_steps(curve: np.ndarray, loss: float) -> float:
        """The logarithm of the steps with this loss, within the trained lengths."""
        loss = np.clip(loss, curve[-1], curve[0])
        return float(PchipInterpolator(curve[::-1], log_lengths[::-1])(loss))

    if losses.mean() < curve[-1]:
        largest = losses.mean() + ci95(losses - curves[:, -1])
        return Value(low=exp(log_steps(curve, largest) + log_ratio - ci95(log_time_ratios)))
    if losses.mean() > curve[0]:
        smallest = losses.mean() - ci95(losses - curves[:, 0])
        return Value(high=exp(log_steps(curve, smallest) + log_ratio + ci95(log_time_ratios)))
    estimate = log_steps(curve, losses.mean()) + log_ratio
    if S == 1:
        return Value(exp(estimate))
    pseudo_values = []
    for seed in range(S):
        others = np.arange(S) != seed
        without = log_steps(curves[others].mean(axis=0), losses[others].mean())
        without += log_time_ratios[others].mean() - log(steps)
        pseudo_values.append(S * estimate - (S - 1) * without)
    margin = ci95(pseudo_values)
    return Value(exp(estimate), exp(estimate - margin), exp(estimate + margin))


def _all_fall(curves: np.ndarray) -> bool:
    """Whether the mean of curves (S, K) over the seeds falls, also without any one of them."""
    if len(curves) > 1:
        curves = curves.sum(axis=0) - curves
    return bool(np.all(np.diff(curves, axis=1) < 0))


def _complete_runs(variant: Variant) -> dict[tuple, Run]:
    """Finished runs by seed and data, without those that ended before train.steps."""
    steps = variant.config["train.steps"]
    return {seed: run for seed, run in variant.by_seed.items() if run.summary.get("step") == steps}


def _median_step(run: Run) -> float:
    return float(np.median(Variant([run]).after_warmup("step_ms")))


def _is_noisy(variant: Variant) -> bool:
    """Whether the step times vary so much that they cannot be compared."""
    times = estimate_median(variant.after_warmup("step_ms"))
    return times.low is None or times.high > MAX_SPREAD * times.low
