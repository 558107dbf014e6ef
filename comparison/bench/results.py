"""Rows of attention.csv, their ranking, and the recommendation of the fastest backends.

The first backend of the rows is the baseline. The other backends are compared with it.
"""

import csv
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from comparison.bench.config import CAUSAL
from model.config import ATTENTION_TYPES

FINISHED, TIME_LIMIT = "finished", "time limit"
NO_ATTENTION = "none"  # the row of phase step whose layers compute no attention
NOT_RANKED = {*ATTENTION_TYPES, NO_ATTENTION}  # rows that do not compute softmax attention
MAX_TIE_RATIO = 1.1  # two backends count as equally fast up to this ratio of their medians
MIN_COMPARED_BYTES = 2**20  # a process on the CPU sometimes allocates this much for other purposes


@dataclass(kw_only=True)
class Timing:
    """A row of attention.csv: the measurements of one backend, phase, mask, dtype and T. Unknown values are None."""

    backend: str  # as requested
    resolved: str | None = None  # the kernel that ran
    status: str  # finished, refused, out of memory, time limit or failed
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
    peak_memory_bytes: int | None = (
        None  # of a call besides its inputs; in phase step, with model and optimizer
    )
    error_y: float | None = None  # largest absolute difference from the float64 reference
    error_gradients: float | None = None  # the same, of dq, dk and dv
    compile_s: float | None = None

    @property
    def is_finished(self) -> bool:
        return self.status == FINISHED

    @property
    def title(self) -> str:
        return self.phase if self.mask == CAUSAL else f"{self.phase}, {self.mask}"


def append_row(path: Path, row: Timing) -> None:
    """Append a row to the CSV file immediately, so that an interruption does not lose it."""
    values = {
        key: f"{value:.6g}" if isinstance(value, float) else value
        for key, value in asdict(row).items()
    }
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(values))
        if file.tell() == 0:
            writer.writeheader()
        writer.writerow(values)


def group_rows(rows: list[Timing], *columns: str) -> dict[tuple, list[Timing]]:
    """Group rows by the values of some columns, in order of appearance."""
    groups: dict[tuple, list[Timing]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, column) for column in columns), []).append(row)
    return groups


def rank_by_time(rows: list[Timing]) -> tuple[list[Timing], list[Timing]]:
    """Sort the finished rows of one phase, dtype and T by time. Returns (fastest rows, slower rows).

    Two rows are equally fast if their quartiles overlap, or if the ratio of their medians is at most MAX_TIE_RATIO.
    """
    finished = sorted((row for row in rows if row.is_finished), key=lambda row: row.ms_median)
    best = finished[0] if finished else None
    fastest = [
        row
        for row in finished
        if row.ms_q1 <= best.ms_q3 or row.ms_median <= MAX_TIE_RATIO * best.ms_median
    ]
    return fastest, [row for row in finished if row not in fastest]


def recommend(rows: list[Timing]) -> list[tuple[str, str, str]]:
    """Recommend the fastest backends. Returns lines of (phase and dtype, T, backends and their advantage).

    Phases are in reverse order: training steps come first. Their lines end with the largest possible gain of any
    backend (Amdahl's law), measured by a step without attention. Linear attention is omitted: it changes the results.
    """
    lines = []
    for (phase, dtype), phase_rows in reversed(group_rows(rows, "title", "dtype").items()):
        for (T,), group in group_rows(phase_rows, "T").items():
            bound = next((row.ms_median for row in group if row.backend == NO_ATTENTION), None)
            ranked = [row for row in group if row.backend not in NOT_RANKED]
            if ranked:
                lines.append((f"{phase}, {dtype}", f"T = {T:,}", _describe_fastest(ranked, bound)))
    return lines


def _describe_fastest(rows: list[Timing], bound: float | None) -> str:
    """ "flash or sdpa (equal), 2.7 times as fast as naive". rows: at one T. bound: ms of a step without attention."""
    fastest, slower = rank_by_time(rows)
    if not fastest:
        return "none: " + ", ".join(f"{row.backend} {row.status}" for row in rows)
    names = sorted(row.backend for row in fastest)
    parts = [names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]} (equal)"]
    best, baseline = fastest[0], rows[0]
    if baseline in fastest and slower:
        baseline = slower[0]
    if not baseline.is_finished:
        parts.append(f"{baseline.backend}: {baseline.status}")
    elif baseline not in fastest:
        parts.append(
            f"{baseline.ms_median / best.ms_median:.1f} times as fast as {baseline.backend}"
        )
        if (
            best.peak_memory_bytes is not None
            and (baseline.peak_memory_bytes or 0) >= MIN_COMPARED_BYTES
        ):
            parts.append(
                f"with {best.peak_memory_bytes / baseline.peak_memory_bytes:.0%} of its memory"
            )
    sentence = ", ".join(parts)
    if bound is None or bound >= best.ms_median:  # a busy machine
        return sentence
    gain = best.ms_median / bound
    return f"{sentence}; attention takes {1 - 1 / gain:.0%}: no backend can gain more than {gain:.2f} times"


def compute_spread(rows: list[Timing]) -> float:
    """Median over rows of upper quartile / lower quartile, a measure of noise; 1 if no row has a time."""
    return statistics.median([row.ms_q3 / row.ms_q1 for row in rows if row.is_finished] or [1.0])
