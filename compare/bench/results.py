"""Rows of attention.csv, and their evaluation: the fastest backends and a recommendation.

The first backend of the rows is the baseline, with which the others are compared.
"""

import csv
import itertools
import statistics
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from compare.bench.config import CAUSAL
from model.config import MIXER_NAMES, GPTConfig

FINISHED, TIME_LIMIT = "finished", "time limit"
NO_ATTENTION = "none"  # the row of phase step whose layers compute no attention
NOT_RANKED = {*MIXER_NAMES, NO_ATTENTION}  # rows that compute something else than the backends
MAX_TIE_RATIO = 1.1  # of the medians of two backends that count as equally fast
MIN_COMPARED_BYTES = 2**20  # a process on the CPU sometimes allocates this much for other purposes


@dataclass(kw_only=True)
class Timing:
    """A row of attention.csv: the measurements of one backend, phase, mask, dtype and T. Unknown values are None.

    backend: as requested; resolved, impl: the kernel that ran. status: finished, refused, out of memory, time limit or
    failed; reason: why a row is not finished. T: number of keys; Tq: number of queries.
    ms_*: milliseconds of a call, median and quartiles. peak_share: share of the FLOP/s that matrix products reach.
    bytes_per_second: inputs and outputs of a call, each counted once. bandwidth_share: share of the memory bandwidth.
    pairs_per_second: visible pairs of a query and a key, in all heads. mask_ms: time to build the mask.
    attention_share: share of attention in a training step; predicted_ms: see add_predictions.
    peak_memory_bytes: memory of a call besides its inputs; phase step includes the model and the optimizer.
    error_*: largest absolute difference from the float64 reference. compile_s: seconds, which ms_* does not include.
    """

    backend: str
    resolved: str | None = None
    impl: str | None = None
    status: str
    reason: str | None = None
    phase: str
    mask: str
    device: str
    dtype: str
    B: int
    Tq: int
    T: int
    H: int
    G: int
    D: int
    Dv: int
    ms_median: float | None = None
    ms_q1: float | None = None
    ms_q3: float | None = None
    tokens_per_second: float | None = None
    flops_per_second: float | None = None
    peak_share: float | None = None
    bytes_per_second: float | None = None
    bandwidth_share: float | None = None
    pairs_per_second: float | None = None
    mask_ms: float | None = None
    attention_share: float | None = None
    predicted_ms: float | None = None
    peak_memory_bytes: int | None = None
    error_y: float | None = None
    error_dq: float | None = None
    error_dk: float | None = None
    error_dv: float | None = None
    compile_s: float | None = None

    @property
    def is_finished(self) -> bool:
        return self.status == FINISHED

    @property
    def title(self) -> str:
        return self.phase if self.mask == CAUSAL else f"{self.phase}, {self.mask}"

    @property
    def shape(self) -> tuple:
        return self.device, self.dtype, self.B, self.T, self.H, self.G, self.D, self.Dv

    @property
    def errors(self) -> list[float]:
        errors = (self.error_y, self.error_dq, self.error_dk, self.error_dv)
        return [error for error in errors if error is not None]

    @property
    def kernel(self) -> str:
        return f"{self.resolved} {self.impl}" if self.impl else str(self.resolved)


def append_row(path: Path, row: Any) -> None:
    """Append `row`, a dataclass, to the CSV file immediately, so that no interruption loses it."""
    values = {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in asdict(row).items()}
    has_header = path.exists()
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(values))
        if not has_header:
            writer.writeheader()
        writer.writerow(values)


def group_rows(rows: list[Any], *columns: str) -> dict[tuple, list[Any]]:
    """Group rows by the values of some columns -> {values: rows}, in order of appearance."""
    groups: dict[tuple, list[Any]] = {}
    for row in rows:
        groups.setdefault(tuple(getattr(row, column) for column in columns), []).append(row)
    return groups


def add_predictions(rows: list[Timing], earlier: list[Timing], model: GPTConfig) -> list[Timing]:
    """Add attention_share and predicted_ms to the rows of phase step of one T. Other rows stay as they are.

    predicted_ms is the time of a step without attention, plus that of attention alone in each layer. It stays unknown
    if the rows of forward+backward have another shape, or if the model has windows, dropout or softcaps, which those
    rows lack. earlier: all rows of other phases.
    """
    rest_ms = next((row.ms_median for row in rows if row.backend == NO_ATTENTION), None)
    if rest_ms is None:
        return rows
    is_plain = not any(model.windows) and not model.dropout and model.attention_softcap is None
    attention_ms = {
        (row.backend, row.shape): row.ms_median
        for row in earlier
        if row.phase == "forward+backward" and row.mask == CAUSAL and row.is_finished and is_plain
    }
    layers, predicted = model.mixers.count("softmax"), []
    for row in rows:
        if row.is_finished and row.backend not in NOT_RANKED:
            ms = attention_ms.get((row.backend, row.shape))
            share = max(0.0, 1 - rest_ms / row.ms_median)
            row = replace(row, attention_share=share, predicted_ms=None if ms is None else rest_ms + layers * ms)
        predicted.append(row)
    return predicted


def rank_by_time(rows: list[Timing]) -> tuple[list[Timing], list[Timing]]:
    """Sort finished rows of one phase, dtype and T by time -> (the fastest row and those equally fast, slower rows).

    Two rows are equally fast if their quartiles overlap, or if the ratio of their medians is at most MAX_TIE_RATIO.
    """
    finished = sorted((row for row in rows if row.is_finished), key=lambda row: row.ms_median)
    fastest = [row for row in finished if _is_tie(row, finished[0])]
    return fastest, [row for row in finished if row not in fastest]


def _is_tie(row: Timing, fastest: Timing) -> bool:
    return row.ms_q1 <= fastest.ms_q3 or row.ms_median <= MAX_TIE_RATIO * fastest.ms_median


def recommend(rows: list[Timing]) -> list[tuple[str, str, str]]:
    """Recommend the fastest backends -> lines of (phase and dtype, range of T, backends and their advantage).

    The phases are in reverse order, so that the training step comes first. Neighboring T with the same fastest
    backends share a line. Linear attention is not a recommendation, because it changes the results. Lines of phase step
    end with the largest possible gain of any backend: a step without attention (Amdahl's law).
    """
    lines, rows = [], [row for row in rows if row.backend not in NOT_RANKED]
    for (phase, dtype), phase_rows in reversed(group_rows(rows, "title", "dtype").items()):
        rows_per_T = group_rows(phase_rows, "T").values()
        for _, group in itertools.groupby(rows_per_T, key=lambda at_T: (_fastest_names(at_T), at_T[0].status)):
            group = list(group)
            low, high = group[0][0].T, group[-1][0].T
            Ts = f"T = {low:,}" if low == high else f"T = {low:,} to {high:,}"
            lines.append((f"{phase}, {dtype}", Ts, _describe_fastest(group) + _describe_bound(group)))
    return lines


def _describe_bound(group: list[list[Timing]]) -> str:
    """ "; attention takes 3 to 9%: no backend can gain more than 1.10 times". Empty for other phases."""
    fastest = [rank_by_time(rows)[0][:1] for rows in group]
    shares = [row.attention_share for rows in fastest for row in rows if row.attention_share is not None]
    if not shares:
        return ""
    percent, gain = [100 * share for share in shares], 1 / (1 - max(shares))
    return f"; attention takes {_format_range(percent, '.0f')}%: no backend can gain more than {gain:.2f} times"


def _fastest_names(rows: list[Timing]) -> list[str]:
    return sorted(row.backend for row in rank_by_time(rows)[0])


def _describe_fastest(group: list[list[Timing]]) -> str:
    """ "flash or sdpa (equal), 1.4 to 8.9 times as fast as naive, with 3 to 20% of its memory".

    group: for each T, the rows of all backends.
    """
    baseline, names = group[0][0], _fastest_names(group[0])
    if not names:
        return "none: " + ", ".join(f"{row.backend} {row.status}" for row in group[0])
    best = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]} (equal)"
    rankings = [rank_by_time(rows) for rows in group]
    if baseline.backend in names:
        pairs = [(slower[0], fastest[0]) for fastest, slower in rankings if slower]
        return best + (f", {_describe_speedup(pairs)}" if pairs else "")
    if not baseline.is_finished:
        return f"{best}; {baseline.backend}: {baseline.status}"
    pairs = [(rows[0], fastest[0]) for rows, (fastest, _) in zip(group, rankings, strict=True)]
    memory = [(slow.peak_memory_bytes, fast.peak_memory_bytes) for slow, fast in pairs]
    percent = [100 * b / a for a, b in memory if a is not None and b is not None and a >= MIN_COMPARED_BYTES]
    saved = f", with {_format_range(percent, '.0f')}% of its memory" if percent else ""
    return f"{best}, {_describe_speedup(pairs)}{saved}"


def _describe_speedup(pairs: list[tuple[Timing, Timing]]) -> str:
    """pairs: (slower row, faster row)."""
    ratios = [slower.ms_median / faster.ms_median for slower, faster in pairs]
    slower_names = " or ".join(dict.fromkeys(slower.backend for slower, _ in pairs))
    return f"{_format_range(ratios, '.1f')} times as fast as {slower_names}"


def compute_spread(rows: list[Timing]) -> float | None:
    """Median over rows of upper quartile / lower quartile, a measure of noise. None: no row has a time."""
    ratios = [row.ms_q3 / row.ms_q1 for row in rows if row.is_finished]
    return statistics.median(ratios) if ratios else None


def _format_range(values: list[float], form: str) -> str:
    """The smallest and the largest value: "1.4 to 8.9"."""
    ends = [f"{value:{form}}" for value in (min(values), max(values))]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
