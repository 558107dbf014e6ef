"""Speedup at equal loss: how much longer the first setting trains until it has a setting's loss.

    steps of the first setting with this loss     step time of the first setting
    -----------------------------------------  x  ------------------------------
              steps of the setting                    step time of the setting

The first setting must have finished with several values of train.steps. Each of these runs has a
complete learning-rate schedule. The logarithm of their steps is interpolated over their losses, and
not extrapolated: a loss outside of theirs has a bound instead of a speedup.

The interval comes from a jackknife over the seeds (Efron, "The Jackknife, the Bootstrap and Other
Resampling Plans", 1982). Effects of the initial weights and batches that runs share cancel.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log

import numpy as np
from scipy.interpolate import PchipInterpolator

from common.console import PYTHON
from results.estimates import ci95, quartiles
from results.read import Run, Setting

# The settings in which two lengths of one setting may differ.
LENGTH_KEYS = ("train.steps", "eval.every", "checkpoint.")
SUGGESTED_LENGTHS = (0.8, 1.25)  # relative to the first setting's train.steps
LOSS = "last_val_loss"
MAX_SPREAD = 1.5  # upper / lower quartile of step times; a larger ratio means a busy machine


@dataclass
class Speedup:
    """A speedup with its 95 % interval, which is unknown for a single seed.

    With one bound and no value, the loss is outside of the first setting's losses. Without any, the
    speedup is unknown.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None


def list_lengths(settings: list[Setting]) -> dict[int, Setting]:
    """The first setting, and the settings that differ from it in length only, by train.steps."""
    first = _without_length(settings[0].config)
    lengths = {}
    for setting in settings:
        steps = setting.config.get("train.steps")
        if steps is not None and _without_length(setting.config) == first:
            lengths.setdefault(steps, setting)
    return dict(sorted(lengths.items()))


def _without_length(config: dict) -> dict:
    return {key: value for key, value in config.items() if not key.startswith(LENGTH_KEYS)}


def measure_speedups(
    setting: Setting, first: Setting, lengths: dict[int, Setting]
) -> tuple[Speedup, Speedup, str]:
    """Compare a setting with the lengths of the first setting, which have no speedups themselves.

    lengths: from list_lengths.
    Returns the speedup, the speedup as if all steps took equally long, and why one is missing.
    """
    unknown = Speedup()
    steps = setting.config.get("train.steps")
    if None in (steps, first.config.get("train.steps")) or setting in lengths.values():
        return unknown, unknown, ""
    runs = _runs_by_seed(setting)
    first_runs = _runs_by_seed(first)
    seeds = [seed for seed in runs if seed in first_runs]
    losses = np.array([runs[seed].summary[LOSS] for seed in seeds])
    losses_of_lengths = {}
    for length, other in lengths.items():
        others = _runs_by_seed(other)
        if all(seed in others for seed in seeds):
            losses_of_lengths[length] = [others[seed].summary[LOSS] for seed in seeds]
    if not seeds or len(losses_of_lengths) < 2:
        return unknown, unknown, _suggest_lengths(first)
    curves = np.array(list(losses_of_lengths.values())).T  # (S, K)
    if not _all_fall(curves):
        problem = "no speedup: longer runs of the first setting do not clearly have lower losses"
        return unknown, unknown, problem
    data = (list(losses_of_lengths), curves, losses, steps)
    per_step = estimate_speedup(*data, np.zeros(len(seeds)))
    if len({run.summary.get("device_name") for run in [*setting.finished, *first.finished]}) > 1:
        return unknown, per_step, "no speedup, except per step: the devices differ"
    if _is_noisy(setting) or _is_noisy(first):
        return unknown, per_step, "no speedup, except per step: step times vary, or are missing"
    ratios = [_median_step(first_runs[seed]) / _median_step(runs[seed]) for seed in seeds]
    return estimate_speedup(*data, np.log(ratios)), per_step, ""


def estimate_speedup(
    lengths: list[int],
    curves: np.ndarray,
    losses: np.ndarray,
    steps: int,
    log_time_ratios: np.ndarray,
) -> Speedup:
    """Estimate a speedup and its interval from the losses of S seeds.

    lengths (K): steps of the first setting, in ascending order; K is at least 2.
    curves (S, K): its losses, for which _all_fall is true.
    losses (S): of the other setting, after `steps` steps.
    log_time_ratios (S): logarithm of the first setting's step time divided by the other's.
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
        largest = losses.mean() + _margin(losses - curves[:, -1])
        return Speedup(low=exp(log_steps(curve, largest) + log_ratio - _margin(log_time_ratios)))
    if losses.mean() > curve[0]:
        smallest = losses.mean() - _margin(losses - curves[:, 0])
        return Speedup(high=exp(log_steps(curve, smallest) + log_ratio + _margin(log_time_ratios)))
    estimate = log_steps(curve, losses.mean()) + log_ratio
    if S == 1:
        return Speedup(exp(estimate))
    pseudo_values = []
    for seed in range(S):
        others = np.arange(S) != seed
        without = log_steps(curves[others].mean(axis=0), losses[others].mean())
        without += log_time_ratios[others].mean() - log(steps)
        pseudo_values.append(S * estimate - (S - 1) * without)
    margin = _margin(pseudo_values)
    return Speedup(exp(estimate), exp(estimate - margin), exp(estimate + margin))


def _margin(values: Sequence[float]) -> float:
    """Half the width of the 95 % confidence interval of a mean, or 0 for a single value."""
    return ci95(values) or 0.0


def _all_fall(curves: np.ndarray) -> bool:
    """Whether the mean of curves (S, K) over the seeds falls, also without any one of them."""
    if len(curves) > 1:
        curves = curves.sum(axis=0) - curves
    return bool(np.all(np.diff(curves, axis=1) < 0))


def _suggest_lengths(first: Setting) -> str:
    """The command that trains the first setting with fewer and with more steps."""
    run = first.runs[0]
    replaced = ("seed=", "name=", "wandb.group=", "train.steps=")
    words = shlex.split(run.summary.get("command") or "")[2:]
    words = [word for word in words if not word.startswith(replaced)]
    seeds = ",".join(str(run.seed) for run in first.runs)
    steps = first.config["train.steps"]
    lengths = ",".join(str(round(ratio * steps)) for ratio in SUGGESTED_LENGTHS)
    sweep = "lengths" if run.swept is None else run.folder.resolve().parent.name
    words += [f"seed={seeds}", f"train.steps={lengths}", f"name={sweep}"]
    return (
        "for a speedup at equal loss, train the first setting with other train.steps, and compare "
        f"these runs, too: {PYTHON} train.py -m {shlex.join(words)}"
    )


def _runs_by_seed(setting: Setting) -> dict[tuple, Run]:
    """Finished runs by seed and data, without those that ended before train.steps."""
    steps = setting.config["train.steps"]
    runs = [run for run in setting.finished if run.summary.get("step") == steps]
    return {(run.seed, run.data): run for run in runs if run.summary.get(LOSS) is not None}


def _median_step(run: Run) -> float:
    return float(np.median(run.after_warmup("step_ms")))


def _is_noisy(setting: Setting) -> bool:
    """Whether the step times vary so much that they cannot be compared."""
    q1, _, q3 = quartiles(setting.after_warmup("step_ms"))
    return q1 is None or q3 > MAX_SPREAD * q1
