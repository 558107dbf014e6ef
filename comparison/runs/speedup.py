"""Speedup at equal loss: how much longer the first setting trains until it has a setting's loss.

    steps of the first setting with this loss     step time of the first setting
    -----------------------------------------  x  ------------------------------
              steps of the setting                    step time of the setting

The first setting must have finished with several values of train.steps. Each of these runs has a
complete learning-rate schedule. The logarithm of their steps is interpolated over their losses.
Nothing is extrapolated.

The interval comes from a jackknife over the seeds (Efron, "The Jackknife, the Bootstrap and Other
Resampling Plans", 1982). Effects of the initial weights and batches that runs share cancel.
"""

import shlex
import statistics
from dataclasses import dataclass
from math import exp, log

import numpy as np
from scipy.interpolate import PchipInterpolator

from common.console import PYTHON
from comparison.runs.estimates import ci95, quartiles
from comparison.runs.read import Run, Setting

# The settings in which two lengths of one setting may differ.
LENGTH_KEYS = ("train.steps", "eval.every", "checkpoint.")
SUGGESTED_LENGTHS = (0.8, 1.25)  # relative to the first setting's train.steps
MAX_SPREAD = 1.5  # upper / lower quartile of step times; a larger ratio means a busy machine


@dataclass
class Speedup:
    """A speedup with its 95 % interval, which is unknown for a single seed.

    Without a value, the loss is outside of the first setting's losses: the speedup is above `low`,
    or below `high`.
    """

    value: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass
class Speedups:
    """The speedups of a setting."""

    in_time: Speedup | None = None
    per_step: Speedup | None = None  # as if all steps took the same time
    problem: str = ""  # why a speedup is missing, and what to do


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


def measure_speedups(setting: Setting, first: Setting, lengths: dict[int, Setting]) -> Speedups:
    """Compare a setting with the lengths of the first setting, which have no speedups themselves.

    lengths: from list_lengths.
    """
    steps = setting.config.get("train.steps")
    has_length = steps is not None and first in lengths.values()
    if not has_length or setting in lengths.values():
        return Speedups()
    if len(lengths) == 1:
        return Speedups(problem=_suggest_lengths(first))
    runs = _runs_by_seed(setting)
    runs_of_lengths = [_runs_by_seed(length) for length in lengths.values()]
    seeds = [seed for seed in runs if all(seed in others for others in runs_of_lengths)]
    if not seeds:
        return Speedups(problem="no speedup: no seed has finished with all lengths")
    losses = np.array([_last_loss(runs[seed]) for seed in seeds])
    curves = np.array([[_last_loss(others[seed]) for others in runs_of_lengths] for seed in seeds])
    if not _all_fall(curves):
        problem = "no speedup: longer runs of the first setting do not clearly have lower losses"
        return Speedups(problem=problem)
    per_step = estimate_speedup(list(lengths), curves, losses, steps, np.zeros(len(seeds)))
    if _is_noisy(setting) or _is_noisy(first):
        problem = "no speedup, except per step: step times vary, because the machine was busy"
        return Speedups(per_step=per_step, problem=problem)
    first_runs = _runs_by_seed(first)
    ratios = [_median_step(first_runs[seed]) / _median_step(runs[seed]) for seed in seeds]
    in_time = estimate_speedup(list(lengths), curves, losses, steps, np.log(ratios))
    return Speedups(in_time, per_step)


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

    def log_speedup(seeds: list[int]) -> float:
        curve = curves[seeds].mean(axis=0)
        log_steps = PchipInterpolator(curve[::-1], log_lengths[::-1])(losses[seeds].mean())
        return float(log_steps - log(steps) + log_time_ratios[seeds].mean())

    seeds = list(range(S))
    estimate = log_speedup(seeds)
    margin = 0.0
    if S > 1:
        leave_one_out = [log_speedup(seeds[:seed] + seeds[seed + 1 :]) for seed in seeds]
        pseudo_values = [S * estimate - (S - 1) * value for value in leave_one_out]
        margin = ci95(pseudo_values)
    curve = curves.mean(axis=0)
    lowest, *_, highest = log_lengths - log(steps) + log_time_ratios.mean()
    if losses.mean() < curve[-1]:
        return Speedup(low=exp(min(highest, estimate - margin)))
    if losses.mean() > curve[0]:
        return Speedup(high=exp(max(lowest, estimate + margin)))
    if S == 1:
        return Speedup(exp(estimate))
    return Speedup(exp(estimate), exp(estimate - margin), exp(estimate + margin))


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
    steps = first.config["train.steps"]
    seeds = ",".join(str(run.seed) for run in first.runs)
    lengths = ",".join(str(round(ratio * steps)) for ratio in SUGGESTED_LENGTHS)
    words += [f"seed={seeds}", f"train.steps={lengths}"]
    if run.swept is None:
        words.append("name=lengths")
        advice = "then add sweeps/lengths to the comparison"
    else:
        words.append(f"name={run.folder.resolve().parent.name}")
        advice = "which extends this sweep"
    command = f"{PYTHON} train.py -m {shlex.join(words)}"
    need = "for a speedup at equal loss, train the first setting with other train.steps"
    return f"{need}: {command}, {advice}"


def _runs_by_seed(setting: Setting) -> dict[tuple, Run]:
    """Finished runs with a loss, by seed and data."""
    runs = [run for run in setting.finished if run.summary.get("last_val_loss") is not None]
    return {(run.seed, run.data): run for run in runs}


def _last_loss(run: Run) -> float:
    return run.summary["last_val_loss"]


def _median_step(run: Run) -> float:
    return statistics.median(run.after_warmup("step_ms"))


def _is_noisy(setting: Setting) -> bool:
    """Whether the step times vary so much that they cannot be compared."""
    times = [time for run in setting.finished for time in run.after_warmup("step_ms")]
    q1, _, q3 = quartiles(times)
    return q1 is None or q3 > MAX_SPREAD * q1
