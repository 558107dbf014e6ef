"""Rows of attention.csv, their ranking, and the recommendation of the fastest backends.

The first backend of the rows is the baseline. The other backends are compared with it.
"""

import statistics
from dataclasses import dataclass

from attention_bench.config import CAUSAL
from common.console import format_number
from model.config import ATTENTION_TYPES

FINISHED = "finished"
REFUSED = "refused"
OUT_OF_MEMORY = "out of memory"
TIME_LIMIT = "time limit"
FAILED = "failed"
NO_ATTENTION = "none"  # the row of phase step whose layers compute no attention
NOT_RANKED = {*ATTENTION_TYPES, NO_ATTENTION}  # rows that do not compute softmax attention
MAX_SPREAD = 1.5  # upper / lower quartile of times; a larger ratio means that the machine was busy
MAX_TIE_RATIO = 1.1  # two backends count as equally fast up to this ratio of their medians


@dataclass(kw_only=True)
class Timing:
    """A row of attention.csv: the measurements of one backend, phase, mask, dtype and T.

    Unknown values are None.
    """

    backend: str  # as requested
    resolved: str | None = None  # the kernel that ran
    status: str  # FINISHED, REFUSED, OUT_OF_MEMORY, TIME_LIMIT or FAILED
    reason: str | None = None  # why the row is not finished
    phase: str
    mask: str
    device: str
    dtype: str
    B: int
    T: int  # number of keys
    H: int
    G: int
    D: int
    Dv: int
    ms_median: float | None = None  # milliseconds of a call, without compilation
    ms_q1: float | None = None
    ms_q3: float | None = None
    flops_per_second: float | None = None
    # of a call, besides its inputs; in phase step, besides model and optimizer
    peak_memory_bytes: int | None = None
    error_y: float | None = None  # largest absolute difference from the float64 reference
    error_gradients: float | None = None  # the same, of dq, dk and dv
    # seconds of the first call, which loads libraries, and compiles what needs it
    first_call_s: float | None = None

    @property
    def is_finished(self) -> bool:
        return self.status == FINISHED

    @property
    def is_noisy(self) -> bool:
        """Whether the times vary so much that the row cannot be ranked."""
        return self.is_finished and self.ms_q3 > MAX_SPREAD * self.ms_q1

    @property
    def problem(self) -> str | None:
        """Why the row is not ranked."""
        if not self.is_finished:
            return self.status
        return "times vary" if self.is_noisy else None

    @property
    def title(self) -> str:
        return self.phase if self.mask == CAUSAL else f"{self.phase}, {self.mask}"

    def format_ms(self) -> str:
        """Milliseconds: "12.3 (11.9-13.0)". A row that is not finished has its status."""
        if not self.is_finished:
            return self.status
        q1 = format_number(self.ms_q1)
        return f"{format_number(self.ms_median)} ({q1}-{format_number(self.ms_q3)})"


def group_rows(rows: list[Timing], *columns: str) -> dict[tuple, list[Timing]]:
    """Group rows by the values of some columns, in order of appearance."""
    groups: dict[tuple, list[Timing]] = {}
    for row in rows:
        key = tuple(getattr(row, column) for column in columns)
        groups.setdefault(key, []).append(row)
    return groups


def rank_by_time(rows: list[Timing]) -> tuple[list[list[Timing]], list[list[Timing]]]:
    """Sort the kernels of one phase, dtype and T by time. Returns (fastest, slower kernels).

    A kernel has the rows of all backends that ran it. Rows whose times vary widely are not ranked.
    If one of them could be the fastest, nothing is ranked.
    A kernel is as fast as the first one if their quartiles overlap, or if the ratio of their
    medians is at most MAX_TIE_RATIO.
    """
    ranked = [row for row in rows if row.is_finished and not row.is_noisy]
    kernels = list(group_rows(ranked, "resolved").values())
    kernels.sort(key=_mean_ms)
    noisy = [row for row in rows if row.is_noisy]
    if kernels and any(row.ms_q1 < _mean_ms(kernels[0]) for row in noisy):
        return [], []
    fastest = []
    for kernel in kernels:
        best = kernels[0]
        quartiles_overlap = min(row.ms_q1 for row in kernel) <= max(row.ms_q3 for row in best)
        if quartiles_overlap or _mean_ms(kernel) <= MAX_TIE_RATIO * _mean_ms(best):
            fastest.append(kernel)
    return fastest, [kernel for kernel in kernels if kernel not in fastest]


def _mean_ms(kernel: list[Timing]) -> float:
    return statistics.mean(row.ms_median for row in kernel)


def recommend(rows: list[Timing]) -> list[tuple[str, str, str]]:
    """Recommend the fastest backends. Returns lines of (phase and dtype, T, recommendation).

    Phases are in reverse order: training steps come first. Linear attention is omitted, because it
    changes the results.
    """
    lines = []
    for (phase, dtype), phase_rows in reversed(group_rows(rows, "title", "dtype").items()):
        for (T,), group in group_rows(phase_rows, "T").items():
            ranked = [row for row in group if row.backend not in NOT_RANKED]
            if ranked:
                lines.append((f"{phase}, {dtype}", f"T = {T:,}", _describe_fastest(ranked)))
    return lines


def _describe_fastest(rows: list[Timing]) -> str:
    """Name the fastest backends: "flash or sdpa (same kernel), 2.7 times as fast as naive".

    rows: at one T. The first one is the baseline.
    """
    fastest, slower = rank_by_time(rows)
    names = sorted(row.backend for kernel in fastest for row in kernel)
    sentence = " or ".join(names) or "not ranked"
    if len(fastest) > 1:
        sentence += " (equal)"
    elif len(names) > 1:
        sentence += " (same kernel)"
    # if the baseline is one of the fastest, the fastest of the others
    baseline = next((kernel for kernel in slower if rows[0] in kernel), None)
    if slower and any(rows[0] in kernel for kernel in fastest):
        baseline = slower[0]
    if baseline is not None:
        ratio = _mean_ms(baseline) / _mean_ms(fastest[0])
        sentence += f", {ratio:.1f} times as fast as "
        sentence += " and ".join(row.backend for row in baseline)
    problems = [f"{row.backend}: {row.problem}" for row in rows if row.problem]
    return "; ".join([sentence, *problems])
