"""Statistics of settings: means with confidence intervals over seeds, paired differences, divergence, speed, memory.

A value is None if the runs do not provide it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from compare.runs.read import Run, Setting

WARMUP_STEPS = 5  # the first steps of a run, which speeds exclude
DIVERGENCE_STEPS = 200  # after more steps, rounding errors alone can make two runs differ
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
    divergence_200: float | None  # largest |train/loss - the first setting's| in the first DIVERGENCE_STEPS steps
    divergence: float | None  # over all steps
    step_ms: float | None  # median and quartiles, without the warm-up
    step_ms_q1: float | None
    step_ms_q3: float | None
    tokens_per_second: float | None  # median
    peak_memory_bytes: int | None  # median over runs
    compile_s: float | None  # median
    score_variance: float | None  # of the attention, mean over layers and heads at the last evaluation, and over seeds
    attention_entropy: float | None
    attention_distance: float | None


def compute_stats(settings: list[Setting]) -> list[SettingStats]:
    """Statistics of each setting. Differences and divergences are relative to the first setting."""
    return [_compute_stats(setting, settings[0]) for setting in settings]


def _compute_stats(setting: Setting, first: Setting) -> SettingStats:
    runs, summaries = setting.finished, [run.summary for run in setting.runs]
    losses, first_losses = average_by_seed(runs, "last_val_loss"), average_by_seed(first.finished, "last_val_loss")
    paired_seeds = {run.seed for run, _ in _find_pairs(setting, first)} & losses.keys() & first_losses.keys()
    differences = [losses[seed] - first_losses[seed] for seed in paired_seeds]
    steps, distances = divergence(setting, first)
    step_ms_q1, step_ms, step_ms_q3 = quartiles(_after_warmup(runs, "step_ms"))
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
        divergence_200=max(distances[steps <= DIVERGENCE_STEPS].tolist(), default=None),
        divergence=max(distances.tolist(), default=None),
        step_ms=step_ms,
        step_ms_q1=step_ms_q1,
        step_ms_q3=step_ms_q3,
        tokens_per_second=quartiles(_after_warmup(runs, "tokens_per_second"))[1],
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


def _peak_memory(run: Run) -> int | None:
    """Peak memory in bytes. A resumed run measures from its restart, so earlier rows of metrics.jsonl also count."""
    logged = run.curves["peak_memory_bytes"][1].tolist()
    return max([*logged, *_known_values([run.summary], "peak_memory_bytes")], default=None)


def _known_values(summaries: list[dict], key: str) -> list:
    return [summary[key] for summary in summaries if summary.get(key) is not None]


def _join_distinct(summaries: list[dict], key: str) -> str | None:
    """The distinct values, in order of appearance: "a, b"; None if there are none."""
    return ", ".join(dict.fromkeys(map(str, _known_values(summaries, key)))) or None
