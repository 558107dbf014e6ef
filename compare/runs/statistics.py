"""Statistics of settings: means with confidence intervals over seeds, paired differences, divergence, speed, memory.

A value is None if the runs do not provide it. docs/sweeps.md explains the verdicts.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np

from compare import MAX_SPREAD
from compare.runs.read import Run, Setting

WARMUP_STEPS = 5  # the first steps of a run, which speeds exclude
DIVERGENCE_STEPS = 200  # after more steps, rounding errors alone can make two runs differ
POWER = 0.8  # probability of finding a difference of the size `detectable`
NORMAL_Z = 1.95996 + 0.84162  # quantiles for two-sided 95 % intervals and for POWER, with many seeds
# Keys (or starts of keys) that select how losses are computed, but not what they are, beyond rounding errors.
IMPLEMENTATION = (
    "attention.", "checkpoint.", "compile", "deterministic", "device", "dtype", "eval.attention_stats", "eval.every",
    "eval.sample.",
    "flops_per_second", "plan", "tf32", "train.micro_batch_size", "train.profile", "world_size",
)  # fmt: skip
# Rounding error of the training loss at step 1, relative to the loss. It may grow in proportion to the step until
# ROUNDING_STEPS; later growth has no bound.
FLOAT32_TOLERANCE, LOW_PRECISION_TOLERANCE = 1e-5, 1e-3
ROUNDING_STEPS = 10
MIN_PAIRS = 3  # with two pairs, three times the interval is 27 standard deviations wide
MAX_EXACT_PAIRS = 1000  # with more pairs, the normal distribution is exact enough
# Student's t for two-sided 95 % intervals, for 1, 2, ..., 10 degrees of freedom.
STUDENT_T = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


@dataclass
class SettingStats:
    """Statistics of a setting over its finished runs. Losses: nats per token; ci95: half the width of an interval."""

    setting: str
    status: str
    runs: int
    finished: int
    reason: str  # why runs did not finish
    kernel: str | None  # the attention kernel that ran
    impl: str | None
    device: str | None
    device_name: str | None
    dtype: str | None
    vocab_size: str | None
    val_loss: float | None  # of the last evaluation, mean over seeds
    val_loss_ci95: float | None
    seeds: int
    best_val_loss: float | None
    val_bpb: float | None  # of the last evaluation, in bits per byte
    difference: float | None  # val_loss minus the first setting's, mean over pairs of runs with the same seed
    difference_ci95: float | None
    pairs: int
    verdict: str | None  # on the difference from the first setting
    detectable: float | None  # true difference that as many pairs find (ci95 excludes 0) with a probability of POWER
    target_difference: float | None  # set by the user
    seeds_needed: int | None  # pairs that find target_difference with a probability of POWER
    first_divergence: float | None  # largest |train/loss - the first setting's| at step 1, with the same weights
    divergence_200: float | None  # largest |train/loss - the first setting's| in the first DIVERGENCE_STEPS steps
    divergence: float | None  # over all steps
    step_ms: float | None  # median and quartiles, without the warm-up
    step_ms_q1: float | None
    step_ms_q3: float | None
    tokens_per_second: float | None  # median
    training_flops: float | None  # of all steps of a run, mean over runs
    device_seconds_per_million_tokens: float | None  # CPU: seconds x threads x processes; GPU: seconds x GPUs
    common_loss: float | None  # the lowest validation loss that all settings reach, in the mean over runs
    seconds_to_common_loss: float | None  # training time until then, without evaluations and checkpoints
    peak_memory_bytes: int | None  # median over runs
    compile_s: float | None  # median
    score_variance: float | None  # of the attention, mean over layers and heads at the last evaluation, and over seeds
    attention_entropy: float | None
    attention_distance: float | None

    @property
    def has_noisy_steps(self) -> bool:
        """Whether step times vary so much that they measure how busy the machine was."""
        return self.step_ms is not None and self.step_ms_q3 > MAX_SPREAD * self.step_ms_q1


def compute_stats(settings: list[Setting], target_difference: float | None = None) -> list[SettingStats]:
    """Statistics of each setting. Differences and divergences are relative to the first setting."""
    common_loss, seconds = _times_to_common_loss(settings)
    return [
        _compute_stats(setting, settings[0], target_difference, common_loss, time)
        for setting, time in zip(settings, seconds, strict=True)
    ]


def _compute_stats(
    setting: Setting, first: Setting, target_difference: float | None, common_loss: float | None, time: float | None
) -> SettingStats:
    runs, summaries = setting.finished, [run.summary for run in setting.runs]
    losses, first_losses = average_by_seed(runs, "last_val_loss"), average_by_seed(first.finished, "last_val_loss")
    paired_seeds = {run.seed for run, _ in _find_pairs(setting, first)} & losses.keys() & first_losses.keys()
    differences = [losses[seed] - first_losses[seed] for seed in paired_seeds]
    deviation = float(np.std(differences, ddof=1)) if len(differences) > 1 else None
    detectable = None if deviation is None else detectable_difference(deviation, len(differences))
    steps, distances = divergence(setting, first)
    step_ms_q1, step_ms, step_ms_q3 = quartiles(_after_warmup(runs, "step_ms"))
    speed = quartiles(_after_warmup(runs, "tokens_per_second"))[1]
    devices = quartiles([count for run in runs if (count := _count_devices(run.summary)) is not None])[1]
    peaks = [peak for run in runs if (peak := _peak_memory(run)) is not None]
    kernels = [summary.get("attention") or {} for summary in summaries]
    return SettingStats(
        setting=setting.label,
        status=setting.status,
        runs=len(setting.runs),
        finished=len(runs),
        reason=_join_distinct([run.summary for run in setting.runs if run.status != "finished"], "error") or "",
        kernel=_join_distinct(kernels, "resolved"),
        impl=_join_distinct(kernels, "impl"),
        device=_join_distinct(summaries, "device"),
        device_name=_join_distinct(summaries, "device_name"),
        dtype=_join_distinct(summaries, "dtype"),
        vocab_size=_join_distinct(summaries, "vocab_size"),
        val_loss=mean(losses.values()),
        val_loss_ci95=ci95(losses.values()),
        seeds=len(losses),
        best_val_loss=mean(average_by_seed(runs, "best_val_loss").values()),
        val_bpb=mean(average_by_seed(runs, "last_val_bpb").values()),
        difference=mean(differences),
        difference_ci95=ci95(differences),
        pairs=len(differences),
        verdict=_judge(setting, first, differences, detectable),
        detectable=detectable,
        target_difference=target_difference,
        seeds_needed=None if None in (deviation, target_difference) else seeds_needed(deviation, target_difference),
        first_divergence=max(distances[steps == 1].tolist(), default=None),
        divergence_200=max(distances[steps <= DIVERGENCE_STEPS].tolist(), default=None),
        divergence=max(distances.tolist(), default=None),
        step_ms=step_ms,
        step_ms_q1=step_ms_q1,
        step_ms_q3=step_ms_q3,
        tokens_per_second=speed,
        training_flops=mean([flops for run in runs if (flops := _training_flops(run)) is not None]),
        device_seconds_per_million_tokens=1e6 * devices / speed if devices and speed else None,
        common_loss=common_loss,
        seconds_to_common_loss=time,
        peak_memory_bytes=round(quartiles(peaks)[1]) if peaks else None,
        compile_s=quartiles(_known_values([run.summary for run in runs], "compile_s"))[1],
        score_variance=mean(average_by_seed(runs, "score_variance").values()),
        attention_entropy=mean(average_by_seed(runs, "attention_entropy").values()),
        attention_distance=mean(average_by_seed(runs, "attention_distance").values()),
    )


def average_by_seed(runs: list[Run], key: str) -> dict[int, float]:
    """{seed: value of `key` in summary.json}. Runs with the same seed are one sample, their mean."""
    values: dict[int, list[float]] = {}
    for run in runs:
        if run.summary.get(key) is not None:
            values.setdefault(run.seed, []).append(run.summary[key])
    return {seed: mean(samples) for seed, samples in values.items()}


def divergence(setting: Setting, first: Setting) -> tuple[np.ndarray, np.ndarray]:
    """(steps, largest |difference of training losses| over pairs of runs). Empty for `first`."""
    all_steps, all_distances = [np.array([], int)], [np.array([])]
    for run, other in _find_pairs(setting, first):
        (steps, losses), (other_steps, other_losses) = run.curves["train/loss"], other.curves["train/loss"]
        common_steps, places, other_places = np.intersect1d(steps, other_steps, return_indices=True)
        all_steps.append(common_steps)
        all_distances.append(np.abs(losses[places] - other_losses[other_places]))
    steps, places = np.unique(np.concatenate(all_steps), return_inverse=True)
    distances = np.zeros(len(steps))
    np.maximum.at(distances, places, np.concatenate(all_distances))
    return steps, distances


def _judge(setting: Setting, first: Setting, differences: list[float], detectable: float | None) -> str | None:
    """Verdict: whether the validation losses of pairs differ, or only by rounding errors. None without a pair."""
    steps, distances = divergence(setting, first)
    if not differences or not len(steps):
        return None
    if not distances.any() and not any(differences):
        return "equal losses"
    difference, interval = abs(mean(differences)), ci95(differences)
    if _computes_same_function(setting, first):
        scale = max(run.curves["train/loss"][1][0] for run in first.finished if len(run.curves["train/loss"][1]))
        tolerance = scale * max(rounding_tolerance(run.summary) for run in (*setting.finished, *first.finished))
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


def rounding_tolerance(summary: dict) -> float:
    """Largest rounding error of a run's training loss at step 1, relative to the loss. It grows with the step."""
    is_float32 = summary.get("dtype") == "float32" and not summary.get("tf32")
    return FLOAT32_TOLERANCE if is_float32 else LOW_PRECISION_TOLERANCE


def _computes_same_function(setting: Setting, first: Setting) -> bool:
    """Whether the configs differ only in the implementation.

    Dropout differs between implementations, and with train.minutes the learning rate depends on their speed.
    """
    config, other = setting.config, first.config
    changed = [key for key in config.keys() | other.keys() if config.get(key) != other.get(key)]
    if config.get("model.dropout") or config.get("train.minutes") is not None:
        return False
    return all(key.startswith(IMPLEMENTATION) for key in changed)


def detectable_difference(deviation: float, pairs: int) -> float:
    """The difference that a paired t-test finds with a probability of POWER. deviation: of the pairs' differences."""
    return _detectable_t(pairs - 1) * deviation / math.sqrt(pairs)


def seeds_needed(deviation: float, difference: float) -> int:
    """The number of pairs that find `difference` with a probability of POWER."""
    pairs = max(2, math.floor((NORMAL_Z * deviation / difference) ** 2))  # Student's t needs more than the normal
    while pairs < MAX_EXACT_PAIRS and detectable_difference(deviation, pairs) > difference:
        pairs += 1
    return pairs


@lru_cache
def _detectable_t(df: int) -> float:
    """The true mean / standard error for which |t| exceeds student_t(df) with a probability of POWER.

    t is (z + mean) / s, with a normal z and s^2 = chi^2 / df. The sum is the integral over s of P(|z + mean| > t s).
    """
    s = np.linspace(0, 1 + 9 / math.sqrt(df), 2001)[1:]
    density = np.exp((df - 1) * np.log(s) - df * (s**2 - 1) / 2)
    erf = np.vectorize(math.erf)
    low, high = 0.0, 100.0
    for _ in range(40):
        middle = (low + high) / 2
        tails = [1 + erf((sign * middle - student_t(df) * s) / math.sqrt(2)) for sign in (1, -1)]
        power = (density * (tails[0] + tails[1]) / 2).sum() / density.sum()
        low, high = (middle, high) if power < POWER else (low, middle)
    return high


def evaluations(setting: Setting) -> tuple[np.ndarray, np.ndarray]:
    """(steps, validation losses (runs, steps)) at the steps that all finished runs evaluated."""
    curves = [run.curves["val/loss"] for run in setting.finished]
    steps = reduce(np.intersect1d, [steps for steps, _ in curves]) if curves else np.array([], int)
    losses = [losses[np.searchsorted(known, steps)] for known, losses in curves]
    return steps, np.array(losses).reshape(len(curves), len(steps))


def _times_to_common_loss(settings: list[Setting]) -> tuple[float | None, list[float | None]]:
    """(the lowest loss that all finished settings reach, training seconds of each setting until then).

    Between evaluations, losses are interpolated. None if fewer than two settings have losses on the same data.
    """
    curves = []
    for setting in settings:
        steps, losses = evaluations(setting)
        timed = [run.curves["step_ms"] for run in setting.finished]
        totals = [np.append(0, np.cumsum(ms))[np.searchsorted(known, steps, "right")] for known, ms in timed]
        curves.append((np.mean(totals, axis=0) / 1000, np.mean(losses, axis=0)) if len(steps) else None)
    known = [losses for _, losses in filter(None, curves)]
    if len(known) < 2 or len({run.summary.get("data") for setting in settings for run in setting.finished}) > 1:
        return None, [None] * len(settings)
    common_loss = max(losses.min() for losses in known)
    return float(common_loss), [curve and _time_to_loss(*curve, common_loss) for curve in curves]


def _time_to_loss(seconds: np.ndarray, losses: np.ndarray, loss: float) -> float:
    """The time when a curve reaches `loss` first, interpolated. It must reach it."""
    index = int(np.argmax(losses <= loss))
    before = slice(max(0, index - 1), index + 1)
    return float(np.interp(-loss, -losses[before], seconds[before]))


def _find_pairs(setting: Setting, first: Setting) -> list[tuple[Run, Run]]:
    """Finished runs of both settings with the same seed, trained on the same tokens. None for `first` itself."""
    if setting is first:
        return []
    pairs = [(run, other) for run in setting.finished for other in first.finished if run.seed == other.seed]
    return [(run, other) for run, other in pairs if run.summary.get("data") == other.summary.get("data")]


def mean(values: Iterable[float]) -> float | None:
    values = list(values)
    return math.fsum(values) / len(values) if values else None


def ci95(values: Iterable[float]) -> float | None:
    """Half the width of the 95 % confidence interval of a mean (Student's t); None for fewer than two values."""
    values = list(values)
    if len(values) < 2:
        return None
    return student_t(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def student_t(df: int) -> float:
    """Student's t for a two-sided 95 % interval with `df` degrees of freedom, to 4 digits."""
    if df <= len(STUDENT_T):
        return STUDENT_T[df - 1]
    return 1.95996 + 2.37227 / df + 2.82250 / df**2 + 2.55585 / df**3  # expansion around the normal quantile


def quartiles(values: Sequence[float] | np.ndarray) -> tuple[float | None, float | None, float | None]:
    """Lower quartile, median, upper quartile, with linear interpolation; None if there are no values."""
    if len(values) == 0:
        return None, None, None
    q1, median, q3 = np.percentile(values, [25, 50, 75]).tolist()
    return q1, median, q3


def _after_warmup(runs: list[Run], key: str) -> np.ndarray:
    """Values of a metric at all steps of all runs, without the warm-up of each run."""
    curves = [run.curves[key] for run in runs]
    return np.concatenate([np.array([]), *(values[steps > WARMUP_STEPS] for steps, values in curves)])


def _count_devices(summary: dict) -> int | None:
    """Cores or GPUs of a run. On a CPU, a process uses one core per thread."""
    per_process = summary.get("threads") if summary.get("device") == "cpu" else 1
    return None if per_process is None else per_process * summary.get("world_size", 1)


def _training_flops(run: Run) -> float | None:
    """FLOPs of all steps of a run. None: its summary does not have them."""
    steps, flops = run.summary.get("step"), run.summary.get("flops_per_token")
    if not steps or flops is None:
        return None
    return steps * run.config["train.batch_size"] * run.config["model.block_size"] * flops


def _peak_memory(run: Run) -> int | None:
    """Peak memory in bytes. A resumed run measures from its restart, so earlier rows of metrics.jsonl also count."""
    logged = run.curves["peak_memory_bytes"][1].tolist()
    return max([*logged, *_known_values([run.summary], "peak_memory_bytes")], default=None)


def _known_values(summaries: list[dict], key: str) -> list:
    return [summary[key] for summary in summaries if summary.get(key) is not None]


def _join_distinct(summaries: list[dict], key: str) -> str | None:
    """The distinct values, in order of appearance: "a, b"; None if there are none."""
    return ", ".join(dict.fromkeys(map(str, _known_values(summaries, key)))) or None
