"""Statistics of settings: means with confidence intervals over seeds, paired differences,
divergence, speed and memory.

Runs with the same seed form pairs, so that initial weights and batches cancel in differences.
A value is None if the runs do not provide it. docs/sweeps.md explains the verdicts.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from results.estimates import ci95, detectable_difference, mean, quartiles, seeds_needed
from results.read import Run, Setting
from results.speedup import list_lengths, measure_speedups

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
# Fields of SettingStats that have the name of their key in summary.json: texts, and numbers to
# average over seeds.
TEXTS = ("device", "device_name", "dtype", "data")
MEANS = (
    "best_val_loss",
    "kv_cache_bytes_per_token",
    "score_variance",
    "attention_entropy",
    "attention_distance",
)


@dataclass
class SettingStats:
    """Statistics of a setting's finished runs: a row of the table, and of comparison.csv.

    *_ci95 is half the width of a 95 % confidence interval. *_q1 and *_q3 are quartiles. Losses are
    in nats per token.
    """

    setting: str
    status: str  # "2 finished, 1 failed"
    reason: str  # why runs did not finish
    kernel: str | None  # the attention kernel that ran: "flash (FA3)"
    device: str | None
    device_name: str | None
    dtype: str | None
    data: str | None  # folder of the prepared data
    vocab_size: int | None
    # Validation losses are those of the last evaluation, means over seeds.
    val_loss: float | None
    val_loss_ci95: float | None
    seeds: int  # number of finished runs
    best_val_loss: float | None
    val_bpb: float | None  # bits per byte
    # val_loss minus the first setting's, mean over pairs of runs with the same seed
    difference: float | None
    difference_ci95: float | None
    pairs: int
    verdict: str | None  # on the difference from the first setting
    # true difference that this number of pairs finds with a probability of POWER
    detectable: float | None
    # number of pairs that find the user's difference with a probability of POWER
    seeds_needed: int | None
    # at equal loss, relative to the first setting (speedup.py)
    speedup: float | None
    speedup_low: float | None
    speedup_high: float | None
    # as if all steps took the same time
    speedup_per_step: float | None
    speedup_per_step_low: float | None
    speedup_per_step_high: float | None
    speedup_problem: str  # why a speedup is missing, and what to do
    # largest |train/loss - the first setting's train/loss|, at step 1 and over all steps
    first_divergence: float | None
    divergence: float | None
    step_ms: float | None  # median, without the warm-up
    step_ms_q1: float | None
    step_ms_q3: float | None
    tokens_per_second: float | None  # median
    training_flops: float | None  # of all steps of a run, mean over runs
    peak_memory_bytes: int | None  # median over runs
    peak_memory_bytes_q1: float | None
    peak_memory_bytes_q3: float | None
    sample_tokens_per_second: float | None  # of the samples of evaluations, median
    kv_cache_bytes_per_token: float | None
    # of attention at the last evaluation, means over layers, heads and seeds
    score_variance: float | None
    attention_entropy: float | None
    attention_distance: float | None


def compute_stats(
    settings: list[Setting], target_difference: float | None = None
) -> list[SettingStats]:
    """Compute the statistics of each setting, compared with the first setting.

    target_difference: nats per token, for the number of seeds that find this difference.
    """
    first = settings[0]
    lengths = list_lengths(settings)
    return [_compute_stats(setting, first, lengths, target_difference) for setting in settings]


def _compute_stats(
    setting: Setting,
    first: Setting,
    lengths: dict[int, Setting],
    target_difference: float | None,
) -> SettingStats:
    runs = setting.finished
    summaries = [run.summary for run in setting.runs]
    texts = {key: _join_distinct(summary.get(key) for summary in summaries) for key in TEXTS}
    means = {key: mean(_known_values(runs, key)) for key in MEANS}
    losses = _known_values(runs, "last_val_loss")
    peaks = _known_values(runs, "peak_memory_bytes")
    peak_q1, peak, peak_q3 = quartiles(peaks)
    step_ms_q1, step_ms, step_ms_q3 = quartiles(setting.after_warmup("step_ms"))

    pairs = find_pairs(setting, first)
    losses_of_pairs = [_known_values(pair, "last_val_loss") for pair in pairs]
    differences = [pair[0] - pair[1] for pair in losses_of_pairs if len(pair) == 2]
    distances = divergence(pairs)
    detectable = None
    needed = None
    if len(differences) > 1:
        std = float(np.std(differences, ddof=1))
        detectable = detectable_difference(std, len(differences))
        if target_difference is not None:
            needed = seeds_needed(std, target_difference)
    speedup, per_step, problem = measure_speedups(setting, first, lengths)
    needs_speedup = pairs and not _computes_same_function(setting.config, first.config)

    return SettingStats(
        setting=setting.label,
        status=setting.status,
        reason=_join_distinct(summary.get("error") for summary in summaries) or "",
        kernel=_join_distinct(map(_kernel, summaries)),
        val_loss=mean(losses),
        val_loss_ci95=ci95(losses),
        seeds=len(losses),
        val_bpb=mean(_known_values(runs, "last_val_bpb")),
        difference=mean(differences),
        difference_ci95=ci95(differences),
        pairs=len(differences),
        verdict=_judge(setting, first, differences, distances, detectable),
        detectable=detectable,
        seeds_needed=needed,
        speedup=speedup.value,
        speedup_low=speedup.low,
        speedup_high=speedup.high,
        speedup_per_step=per_step.value,
        speedup_per_step_low=per_step.low,
        speedup_per_step_high=per_step.high,
        speedup_problem=problem if needs_speedup else "",
        first_divergence=distances.get(1),
        divergence=max(distances.values(), default=None),
        step_ms=step_ms,
        step_ms_q1=step_ms_q1,
        step_ms_q3=step_ms_q3,
        tokens_per_second=quartiles(setting.after_warmup("tokens_per_second"))[1],
        sample_tokens_per_second=quartiles(setting.after_warmup("sample_tokens_per_second"))[1],
        training_flops=_training_flops(setting),
        peak_memory_bytes=None if peak is None else round(peak),
        peak_memory_bytes_q1=peak_q1 if len(peaks) > 1 else None,
        peak_memory_bytes_q3=peak_q3 if len(peaks) > 1 else None,
        vocab_size=next(iter(_known_values(setting.runs, "vocab_size")), None),
        **texts,
        **means,
    )


def find_pairs(setting: Setting, first: Setting) -> list[tuple[Run, Run]]:
    """Pair finished runs with the same seed and data. The first setting itself has no pairs."""
    if setting is first:
        return []
    others = {(run.seed, run.data): run for run in first.finished}
    runs = [run for run in setting.finished if (run.seed, run.data) in others]
    return [(run, others[run.seed, run.data]) for run in runs]


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


def _judge(
    setting: Setting,
    first: Setting,
    differences: list[float],
    distances: dict[int, float],
    detectable: float | None,
) -> str | None:
    """Return the verdict: whether the losses of pairs differ by more than rounding errors.

    differences: of the validation losses. distances: of the training losses, by step.
    None without a pair.
    """
    if not differences or not distances:
        return None
    if not any(differences) and not any(distances.values()):
        return "equal losses"
    difference = mean(differences)
    interval = ci95(differences)
    if _computes_same_function(setting.config, first.config):
        tolerance = _rounding_tolerance(setting, first)
        for step, distance in distances.items():
            if step <= ROUNDING_STEPS and distance > tolerance * step:
                return f"differs from step {step}"
        if abs(difference) > tolerance and len(differences) < MIN_PAIRS:
            return f"same for {ROUNDING_STEPS} steps; later: too few seeds"
        # An interval excludes 0 by chance in 5 % of cases, three times its width in less than 2 %.
        if abs(difference) <= max(3 * (interval or 0), tolerance):
            return "same up to rounding"
    if interval is None:
        return "not tested: one pair"
    if abs(difference) > interval:
        return "higher loss" if difference > 0 else "lower loss"
    return f"no difference found; detectable: {detectable:.2g}"


def _computes_same_function(config: dict, other: dict) -> bool:
    """Whether two configs differ only in the implementation.

    Implementations draw different dropout masks, and with train.minutes the learning rate depends
    on their speed.
    """
    if config.get("model.dropout") or config.get("train.minutes") is not None:
        return False
    changed = [key for key in config.keys() | other.keys() if config.get(key) != other.get(key)]
    return all(key.startswith(IMPLEMENTATION) for key in changed)


def _rounding_tolerance(setting: Setting, first: Setting) -> float:
    """Largest difference of the training losses at step 1 that rounding explains, in nats."""
    runs = setting.finished + first.finished
    uses_tf32 = any(run.summary.get("tf32") for run in runs)
    is_float32 = all(run.summary.get("dtype") == "float32" for run in runs) and not uses_tf32
    scale = max(run.curves["train/loss"].get(1, 0.0) for run in first.finished)
    return scale * (FLOAT32_TOLERANCE if is_float32 else LOW_PRECISION_TOLERANCE)


def _known_values(runs: Iterable[Run], key: str) -> list[float]:
    """Values of a key of summary.json, from the runs that have it."""
    return [run.summary[key] for run in runs if run.summary.get(key) is not None]


def _training_flops(setting: Setting) -> float | None:
    """FLOPs of all steps of a run. With train.minutes, runs differ: mean over runs."""
    factors = [
        mean(_known_values(setting.finished, "step")),
        mean(_known_values(setting.finished, "flops_per_token")),
        setting.config.get("train.batch_size"),
        setting.config.get("model.block_size"),
    ]
    return None if None in factors else math.prod(factors)


def _kernel(summary: dict) -> str | None:
    """The attention kernel that a run used: "math", "flash (FA3)"."""
    attention = summary.get("attention") or {}
    kernel = attention.get("resolved")
    package = attention.get("flash_package")
    return f"{kernel} ({package})" if package else kernel


def _join_distinct(values: Iterable[Any]) -> str | None:
    """Join the distinct known values: "a, b". None if there are none."""
    return ", ".join(map(str, distinct(values))) or None


def distinct(values: Iterable[Any]) -> list[Any]:
    """The distinct known values, in order of appearance."""
    return [value for value in dict.fromkeys(values) if value is not None]
