"""Rows of attention.csv, their ranking, and the recommendation of the fastest backends.

The first backend of the rows is the baseline. The other backends are compared with it.
"""

from dataclasses import dataclass

from common.console import format_number
from comparison.bench.config import CAUSAL
from model.config import ATTENTION_TYPES

FINISHED = "finished"
REFUSED = "refused"
OUT_OF_MEMORY = "out of memory"
TIME_LIMIT = "time limit"
FAILED = "failed"
NO_ATTENTION = "none"  # the row of phase step whose layers compute no attention
NOT_RANKED = {*ATTENTION_TYPES, NO_ATTENTION}  # rows that do not compute softmax attention
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


def rank_by_time(rows: list[Timing]) -> tuple[list[Timing], list[Timing]]:
    """Sort the finished rows of one phase, dtype and T by time. Returns (fastest, slower rows).

    Two rows are equally fast if their quartiles overlap, or if the ratio of their medians is at
    most MAX_TIE_RATIO.
    """
    finished = [row for row in rows if row.is_finished]
    finished.sort(key=lambda row: row.ms_median)
    fastest = []
    for row in finished:
        best = finished[0]
        if row.ms_q1 <= best.ms_q3 or row.ms_median <= MAX_TIE_RATIO * best.ms_median:
            fastest.append(row)
    return fastest, [row for row in finished if row not in fastest]


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
    """Name the fastest backends: "flash or sdpa (equal), 2.7 times as fast as naive".

    rows: at one T. The first one is the baseline.
    """
    fastest, slower = rank_by_time(rows)
    if not fastest:
        return "none: " + ", ".join(f"{row.backend} {row.status}" for row in rows)
    sentence = " or ".join(sorted(row.backend for row in fastest))
    if len(fastest) > 1:
        sentence += " (equal)"
    baseline = rows[0]
    if baseline in fastest and slower:
        baseline = slower[0]
    if not baseline.is_finished:
        sentence += f", {baseline.backend}: {baseline.status}"
    elif baseline not in fastest:
        ratio = baseline.ms_median / fastest[0].ms_median
        sentence += f", {ratio:.1f} times as fast as {baseline.backend}"
    return sentence
