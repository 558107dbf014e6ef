"""Statistics of settings: means with confidence intervals over seeds, paired differences, divergence, speed, memory.

Runs with the same seed form pairs, so that initial weights and batches cancel in differences. A value is None if the
runs do not provide it. docs/sweeps.md explains the verdicts.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from comparison import MAX_SPREAD
from comparison.runs.read import Run, Setting

WARMUP_STEPS = 5  # step times exclude the first steps of a run
POWER = 0.8  # probability that a test finds a true difference of the size `detectable`
# Prefixes of keys that select an implementation. They change the losses only by rounding errors.
IMPLEMENTATION = (
    "attention.", "checkpoint.", "compile", "deterministic", "device", "dtype", "eval.attention_stats", "eval.every",
    "eval.sample.", "flops_per_second", "plan", "tf32", "train.micro_batch_size", "train.profile", "world_size",
)  # fmt: skip
# Largest rounding error of the training loss at step 1, relative to the loss. It may grow in proportion to the step
# until ROUNDING_STEPS. Later growth has no bound.
FLOAT32_TOLERANCE, LOW_PRECISION_TOLERANCE = 1e-5, 1e-3
ROUNDING_STEPS = 10
MIN_PAIRS = 3  # with two pairs, three times the interval is 27 standard deviations wide
# Student's t of two-sided 95 % intervals, for df = 1 to 10. For larger df, the series has the coefficients of 1/df^0,
# 1/df^1, ... DETECTABLE_T is the true mean, in standard errors, that such intervals find with a probability of POWER.
STUDENT_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)
STUDENT_T_SERIES = (1.95996, 2.37227, 2.82250, 2.55585)
DETECTABLE_T = (16.3485, 5.6536, 4.2558, 3.7610, 3.5139, 3.3669, 3.2697, 3.2009, 3.1497, 3.1099)
DETECTABLE_T_SERIES = (2.80159, 2.69020, 3.57351, 3.43901)
# Fields of SettingStats that have the name of their key in summary.json: texts, and numbers to average over seeds.
TEXTS = ("device", "device_name", "dtype", "data", "vocab_size")
MEANS = ("best_val_loss", "score_variance", "attention_entropy", "attention_distance")


@dataclass
class SettingStats:
    """Statistics of a setting's finished runs. *_ci95 is half the width of a 95 % interval. Losses: nats per token."""

    setting: str
    status: str  # "2 finished, 1 failed"
    finished: int
    reason: str  # why runs did not finish
    kernel: str | None  # the attention kernel that ran: "flash (FA3)"
    device: str | None
    device_name: str | None
    dtype: str | None
    data: str | None  # folder of the prepared data
    vocab_size: str | None
    val_loss: float | None  # of the last evaluation, mean over seeds
    val_loss_ci95: float | None
    seeds: int
    best_val_loss: float | None
    val_bpb: float | None  # of the last evaluation, in bits per byte
    difference: (
        float | None
    )  # val_loss minus the first setting's, mean over pairs of runs with the same seed
    difference_ci95: float | None
    pairs: int
    verdict: str | None  # on the difference from the first setting
    detectable: (
        float | None
    )  # true difference that this number of pairs finds with a probability of POWER
    seeds_needed: (
        int | None
    )  # number of pairs that find the user's difference with a probability of POWER
    first_divergence: (
        float | None
    )  # largest |train/loss - the first setting's train/loss| at step 1
    divergence: float | None  # the same, over all steps
    step_ms: float | None  # median, without the warm-up
    step_ms_q1: float | None
    step_ms_q3: float | None
    tokens_per_second: float | None  # median
    training_flops: float | None  # of all steps of a run, mean over runs
    peak_memory_bytes: int | None  # median over runs
    score_variance: (
        float | None
    )  # of attention at the last evaluation, mean over layers, heads and seeds
    attention_entropy: float | None
    attention_distance: float | None

    @property
    def has_noisy_steps(self) -> bool:
        """Whether step times vary so much that they measure how busy the machine was."""
        return self.step_ms is not None and self.step_ms_q3 > MAX_SPREAD * self.step_ms_q1


def compute_stats(
    settings: list[Setting], target_difference: float | None = None
) -> list[SettingStats]:
    """Compute the statistics of each setting, with differences and divergences from the first setting."""
    return [_compute_stats(setting, settings[0], target_difference) for setting in settings]


def _compute_stats(
    setting: Setting, first: Setting, target_difference: float | None
) -> SettingStats:
    runs, summaries = setting.finished, [run.summary for run in setting.runs]
    losses, first_losses = (
        get_by_seed(runs, "last_val_loss"),
        get_by_seed(first.finished, "last_val_loss"),
    )
    paired_seeds = (
        {run.seed for run, _ in _find_pairs(setting, first)} & losses.keys() & first_losses.keys()
    )
    differences = [losses[seed] - first_losses[seed] for seed in paired_seeds]
    std = float(np.std(differences, ddof=1)) if len(differences) > 1 else None
    detectable = None if std is None else detectable_difference(std, len(differences))
    steps, distances = divergence(setting, first)
    step_ms_q1, step_ms, step_ms_q3 = quartiles(_after_warmup(runs, "step_ms"))
    peaks = [*get_by_seed(runs, "peak_memory_bytes").values()]
    kernels = [summary.get("attention") or {} for summary in summaries]
    kernel, package = (
        _join_distinct(kernel.get(key) for kernel in kernels)
        for key in ("resolved", "flash_package")
    )
    texts = {key: _join_distinct(summary.get(key) for summary in summaries) for key in TEXTS}
    means = {key: mean(get_by_seed(runs, key).values()) for key in MEANS}
    return SettingStats(
        setting=setting.label,
        status=setting.status,
        finished=len(runs),
        reason=_join_distinct(
            run.summary.get("error") for run in setting.runs if run.status != "finished"
        )
        or "",
        kernel=f"{kernel} ({package})" if package else kernel,
        val_loss=mean(losses.values()),
        val_loss_ci95=ci95(losses.values()),
        seeds=len(losses),
        val_bpb=mean(get_by_seed(runs, "last_val_bpb").values()),
        difference=mean(differences),
        difference_ci95=ci95(differences),
        pairs=len(differences),
        verdict=_judge(setting, first, differences, detectable),
        detectable=detectable,
        seeds_needed=None
        if None in (std, target_difference)
        else seeds_needed(std, target_difference),
        first_divergence=max(distances[steps == 1].tolist(), default=None),
        divergence=max(distances.tolist(), default=None),
        step_ms=step_ms,
        step_ms_q1=step_ms_q1,
        step_ms_q3=step_ms_q3,
        tokens_per_second=quartiles(_after_warmup(runs, "tokens_per_second"))[1],
        training_flops=mean(filter(None, map(_training_flops, runs))),
        peak_memory_bytes=round(quartiles(peaks)[1]) if peaks else None,
        **texts,
        **means,
    )


def get_by_seed(runs: list[Run], key: str) -> dict[int, float]:
    """Get a value of summary.json by seed, from the runs that have it."""
    return {run.seed: run.summary[key] for run in runs if run.summary.get(key) is not None}


def divergence(setting: Setting, first: Setting) -> tuple[np.ndarray, np.ndarray]:
    """Compute the largest |difference of training losses| over pairs of runs. Returns (steps, distances)."""
    all_steps, all_distances = [np.array([], int)], [np.array([])]
    for run, other in _find_pairs(setting, first):
        (steps, losses), (other_steps, other_losses) = (
            run.curves["train/loss"],
            other.curves["train/loss"],
        )
        common_steps, indices, other_indices = np.intersect1d(
            steps, other_steps, return_indices=True
        )
        all_steps.append(common_steps)
        all_distances.append(np.abs(losses[indices] - other_losses[other_indices]))
    steps, indices = np.unique(np.concatenate(all_steps), return_inverse=True)
    distances = np.zeros(len(steps))
    np.maximum.at(distances, indices, np.concatenate(all_distances))
    return steps, distances


def _judge(
    setting: Setting, first: Setting, differences: list[float], detectable: float | None
) -> str | None:
    """Return the verdict: whether the losses of pairs differ by more than rounding errors. None without a pair."""
    steps, distances = divergence(setting, first)
    if not differences or not len(steps):
        return None
    if not distances.any() and not any(differences):
        return "equal losses"
    difference, interval = abs(mean(differences)), ci95(differences)
    if _computes_same_function(setting, first):
        scale = max(
            run.curves["train/loss"][1][0]
            for run in first.finished
            if len(run.curves["train/loss"][1])
        )
        summaries = [run.summary for run in (*setting.finished, *first.finished)]
        is_float32 = all(
            summary.get("dtype") == "float32" and not summary.get("tf32") for summary in summaries
        )
        tolerance = scale * (FLOAT32_TOLERANCE if is_float32 else LOW_PRECISION_TOLERANCE)
        outside = steps[(steps <= ROUNDING_STEPS) & (distances > tolerance * steps)]
        if len(outside):
            return f"differs from step {outside[0]}"
        if difference > tolerance and len(differences) < MIN_PAIRS:
            return f"same for {ROUNDING_STEPS} steps; later: too few seeds"
        # An interval excludes 0 by chance in 5 % of cases, three times its width in less than 2 %.
        if difference <= max(3 * (interval or 0), tolerance):
            return "same up to rounding"
    if interval is None:
        return "not tested: one pair"
    if difference > interval:
        return "higher loss" if mean(differences) > 0 else "lower loss"
    return f"no difference found; detectable: {detectable:.2g}"


def _computes_same_function(setting: Setting, first: Setting) -> bool:
    """Whether the configs differ only in the implementation.

    Implementations draw different dropout masks, and with train.minutes the learning rate depends on their speed.
    """
    config, other = setting.config, first.config
    changed = [key for key in config.keys() | other.keys() if config.get(key) != other.get(key)]
    if config.get("model.dropout") or config.get("train.minutes") is not None:
        return False
    return all(key.startswith(IMPLEMENTATION) for key in changed)


def detectable_difference(std: float, pairs: int) -> float:
    """Compute the true difference that a paired t-test finds with a probability of POWER."""
    return look_up(pairs - 1, DETECTABLE_T, DETECTABLE_T_SERIES) * std / math.sqrt(pairs)


def seeds_needed(std: float, difference: float) -> int:
    """Compute the number of pairs that find `difference` with a probability of POWER."""
    pairs = max(
        2, math.floor((DETECTABLE_T_SERIES[0] * std / difference) ** 2)
    )  # too few: for df = infinity
    while detectable_difference(std, pairs) > difference:
        pairs += 1
    return pairs


def evaluations(setting: Setting) -> tuple[np.ndarray, np.ndarray]:
    """Collect validation losses at the S steps that all finished runs evaluated. Returns (S,) and (runs, S)."""
    curves = [run.curves["val/loss"] for run in setting.finished]
    common_steps = (
        reduce(np.intersect1d, [steps for steps, _ in curves]) if curves else np.array([], int)
    )
    losses = [losses[np.searchsorted(steps, common_steps)] for steps, losses in curves]
    return common_steps, np.array(losses).reshape(len(curves), len(common_steps))


def _find_pairs(setting: Setting, first: Setting) -> list[tuple[Run, Run]]:
    """Pair finished runs with the same seed that trained on the same tokens. `first` itself has no pairs."""
    if setting is first:
        return []
    pairs = [
        (run, other)
        for run in setting.finished
        for other in first.finished
        if run.seed == other.seed
    ]
    return [
        (run, other) for run, other in pairs if run.summary.get("data") == other.summary.get("data")
    ]


def mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return math.fsum(values) / len(values) if values else None


def ci95(values: Iterable[float]) -> float | None:
    """Half the width of the 95 % confidence interval of a mean (Student's t). None for fewer than two values."""
    values = list(values)
    if len(values) < 2:
        return None
    t = look_up(len(values) - 1, STUDENT_T, STUDENT_T_SERIES)
    return t * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def look_up(df: int, table: tuple[float, ...], series: tuple[float, ...]) -> float:
    """Look up a quantile for `df` degrees of freedom, in the table or from the series in 1/df."""
    return (
        table[df - 1]
        if df <= len(table)
        else sum(factor / df**power for power, factor in enumerate(series))
    )


def quartiles(values: Sequence[float] | np.ndarray) -> tuple[float | None, ...]:
    """Lower quartile, median and upper quartile, with linear interpolation. All are None if there are no values."""
    return (
        tuple(np.percentile(values, [25, 50, 75]).tolist()) if len(values) else (None, None, None)
    )


def _after_warmup(runs: list[Run], key: str) -> np.ndarray:
    """Values of a metric at all steps of all runs, without the warm-up of each run."""
    curves = [run.curves[key] for run in runs]
    return np.concatenate(
        [np.array([]), *(values[steps > WARMUP_STEPS] for steps, values in curves)]
    )


def _training_flops(run: Run) -> float | None:
    keys = ("step", "train.batch_size", "model.block_size", "flops_per_token")
    factors = [(run.config | run.summary).get(key) for key in keys]
    return None if None in factors else math.prod(factors)


def _join_distinct(values: Iterable) -> str | None:
    """Join the distinct known values, in order of appearance: "a, b". None if there are none."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None)) or None
