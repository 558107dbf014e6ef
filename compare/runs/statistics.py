"""The figures of a comparison: a row per setting, with intervals, paired differences and divergences.

A figure is None where the runs do not give it; nothing is guessed.
"""

import math
from dataclasses import dataclass

import numpy as np

from compare.runs.read import Run, Setting

WARM_UP = 5  # the first steps of a run, whose times do not count
EARLY = 200  # steps: after these, rounding alone has driven two runs apart


@dataclass
class Row:
    """A setting's figures, over its finished runs. Losses: nats per token; ci95: half the width of an interval."""

    setting: str
    status: str
    runs: int
    finished: int
    reason: str  # why those that did not finish did not
    kernel: str | None  # what attention resolved to
    impl: str | None
    device: str | None
    device_name: str | None
    dtype: str | None
    vocab_size: str | None
    val_loss: float | None  # the last one, mean over seeds
    val_loss_ci95: float | None
    seeds: int
    best_val_loss: float | None
    val_bpb: float | None  # the last one in bits per byte of text
    difference: float | None  # of val_loss from the first setting, over pairs of the same seed
    difference_ci95: float | None
    pairs: int
    divergence_200: float | None  # largest |train/loss - the first setting's| at a step, in the first 200 steps
    divergence: float | None  # over all steps
    step_ms: float | None  # median and quartiles, without warm-up
    step_ms_q1: float | None
    step_ms_q3: float | None
    tokens_per_second: float | None  # median
    peak_memory_bytes: int | None  # median over runs, since a process's memory is partly chance
    compile_s: float | None  # median


def make_rows(settings: list[Setting]) -> list[Row]:
    """A row per setting; the first setting is the one that the others are held against."""
    return [_make_row(setting, settings[0]) for setting in settings]


def _make_row(setting: Setting, first: Setting) -> Row:
    runs = setting.finished
    losses, first_losses = by_seed(runs, "last_val_loss"), by_seed(first.finished, "last_val_loss")
    differences = [losses[seed] - first_losses[seed] for seed in losses if seed in first_losses]
    if setting is first or not same_text(setting, first):
        differences = []
    apart = divergence(setting, first)
    q1, median, q3 = quartiles(_steady(runs, "step_ms"))
    kernels = [(run.summary.get("attention") or {}) for run in setting.runs]
    return Row(
        setting.label, setting.status, len(setting.runs), len(runs),
        reason=_words(run.summary.get("error") for run in setting.runs if run.status != "finished") or "",
        kernel=_words(kernel.get("resolved") for kernel in kernels),
        impl=_words(kernel.get("impl") for kernel in kernels),
        device=_words(run.summary.get("device") for run in setting.runs),
        device_name=_words(run.summary.get("device_name") for run in setting.runs),
        dtype=_words(run.summary.get("dtype") for run in setting.runs),
        vocab_size=_words(run.summary.get("vocab_size") for run in setting.runs),
        val_loss=mean(losses.values()), val_loss_ci95=half_width(losses.values()), seeds=len(losses),
        best_val_loss=mean(by_seed(runs, "best_val_loss").values()),
        val_bpb=mean(by_seed(runs, "last_val_bpb").values()),
        difference=mean(differences), difference_ci95=half_width(differences), pairs=len(differences),
        divergence_200=max((value for step, value in apart.items() if step <= EARLY), default=None),
        divergence=max(apart.values(), default=None),
        step_ms=median, step_ms_q1=q1, step_ms_q3=q3,
        tokens_per_second=quartiles(_steady(runs, "tokens_per_second"))[1],
        peak_memory_bytes=_whole(quartiles([peak for run in runs if (peak := _peak(run)) is not None])[1]),
        compile_s=quartiles(_known(runs, "compile_s"))[1],
    )  # fmt: skip


def by_seed(runs: list[Run], key: str) -> dict[int, float]:
    """{seed: value in summary.json}; runs of the same seed are one draw, not several, and give their mean."""
    seeds = {run.seed: [] for run in runs if run.summary.get(key) is not None}
    for run in runs:
        if run.seed in seeds and run.summary.get(key) is not None:
            seeds[run.seed].append(run.summary[key])
    return {seed: mean(values) for seed, values in seeds.items()}


def divergence(setting: Setting, first: Setting) -> dict[int, float]:
    """{step: largest |difference of training losses| over pairs of the same seed}; empty for the first itself."""
    apart: dict[int, float] = {}
    if setting is first or not same_text(setting, first):
        return apart
    for a in setting.finished:
        for b in first.finished:
            if a.seed == b.seed:
                mine, its = a.curve("train/loss"), b.curve("train/loss")
                for step in mine.keys() & its.keys():
                    apart[step] = max(apart.get(step, 0.0), abs(mine[step] - its[step]))
    return dict(sorted(apart.items()))


def same_text(a: Setting, b: Setting) -> bool:
    """Whether both were trained on the same tokens: losses per token of others do not compare."""
    return {run.summary.get("data") for run in a.finished} == {run.summary.get("data") for run in b.finished}


def mean(values) -> float | None:
    values = list(values)
    return math.fsum(values) / len(values) if values else None


def half_width(values) -> float | None:
    """Half the width of the 95 % interval of a mean (Student's t, n - 1 degrees of freedom); None below two values."""
    values = list(values)
    if len(values) < 2:
        return None
    return student_t(len(values) - 1) * float(np.std(values, ddof=1)) / math.sqrt(len(values))


def student_t(df: int) -> float:
    """The t that a Student variable of `df` degrees of freedom stays within (-t, t) of with probability 0.95.

    By bisection on the angle atan(t / sqrt(df)) of the finite sums of Abramowitz & Stegun 26.7.3 and 26.7.4.
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _t_within(angle, df) < 0.95 else (low, angle)
    return math.sqrt(df) * math.tan(low)


def _t_within(angle: float, df: int) -> float:
    """P(|t| < sqrt(df) tan(angle))."""
    odd = df % 2
    term, total = math.cos(angle) ** odd, 0.0
    for j in range(odd, df - 1, 2):
        total += term
        term *= (j + 1) / (j + 2) * math.cos(angle) ** 2
    return 2 / math.pi * (angle + math.sin(angle) * total) if odd else math.sin(angle) * total


def quartiles(values: list[float]) -> tuple[float | None, float | None, float | None]:
    """Lower quartile, median, upper quartile, with linear interpolation; None where there are no values."""
    if not values:
        return None, None, None
    q1, median, q3 = np.percentile(values, [25, 50, 75]).tolist()
    return q1, median, q3


def _steady(runs: list[Run], key: str) -> list[float]:
    """A metric's values at all steps of all runs, without each one's warm-up."""
    return [value for run in runs for step, value in run.curve(key).items() if step > WARM_UP]


def _peak(run: Run) -> int | None:
    """Peak memory in bytes; a continued run starts counting afresh, so what it logged before counts as well."""
    return max([*run.curve("peak_memory_bytes").values(), *_known([run], "peak_memory_bytes")], default=None)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _known(runs: list[Run], key: str) -> list[float]:
    return [run.summary[key] for run in runs if run.summary.get(key) is not None]


def _words(values) -> str | None:
    """The different ones among values, in order of appearance, as text."""
    return ", ".join(dict.fromkeys(str(value) for value in values if value is not None)) or None
