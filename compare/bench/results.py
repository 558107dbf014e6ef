"""Rows of attention.csv, and their evaluation: rankings, crossovers and a recommendation.

The first backend of the rows is the baseline. The others are compared with it.
"""

import csv
import itertools
import statistics
from dataclasses import asdict, dataclass
from math import log
from pathlib import Path

FINISHED, TIME_LIMIT = "finished", "time limit"
MAX_TIE_RATIO = 1.1  # of the medians of two backends that count as equally fast
MAX_SPREAD = 1.5  # ratio of the quartiles; a larger one means that the machine was busy
MIN_COMPARED_BYTES = 2**20  # a process on the CPU sometimes allocates this much for other purposes


@dataclass(kw_only=True)
class Timing:
    """A row of attention.csv: the measurements of one backend, phase, dtype and T. Unknown values are None.

    backend: as requested; resolved, impl: the kernel that ran. status: finished, refused, out of memory, time limit or
    failed; reason: why a row is not finished. T: number of keys and of queries; phase decode has one query.
    ms_*: milliseconds of a call, median and quartiles. peak_share: share of the FLOP/s that matrix products reach.
    peak_memory_bytes: memory of a call besides its inputs; phase step includes the model and the optimizer.
    error_*: largest absolute difference from the float64 reference. compile_s: seconds, which ms_* does not include.
    """

    backend: str
    resolved: str | None = None
    impl: str | None = None
    status: str
    reason: str | None = None
    phase: str
    device: str
    dtype: str
    B: int
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
    def errors(self) -> list[float]:
        errors = (self.error_y, self.error_dq, self.error_dk, self.error_dv)
        return [error for error in errors if error is not None]

    @property
    def kernel(self) -> str:
        return f"{self.resolved} {self.impl}" if self.impl else str(self.resolved)


def append_row(path: Path, row: Timing) -> None:
    """Append `row` to the CSV file immediately, so that no interruption loses it."""
    values = {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in asdict(row).items()}
    has_header = path.exists()
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(values))
        if not has_header:
            writer.writeheader()
        writer.writerow(values)


@dataclass
class Ranking:
    """The backends at one T, ranked by time.

    fastest: the row with the smallest median, then the rows that are equally fast. runner_up: the first slower row.
    baseline: the row of the first backend. unfinished: rows without a time.
    """

    T: int
    fastest: list[Timing]
    runner_up: Timing | None
    baseline: Timing
    unfinished: list[Timing]

    @property
    def fastest_names(self) -> list[str]:
        return [row.backend for row in self.fastest]


def group_by_phase(rows: list[Timing]) -> dict[tuple[str, str], list[Timing]]:
    """Group rows by phase and dtype -> {(phase, dtype): rows}, in order of appearance."""
    groups: dict[tuple[str, str], list[Timing]] = {}
    for row in rows:
        groups.setdefault((row.phase, row.dtype), []).append(row)
    return groups


def rank_backends(rows: list[Timing]) -> list[Ranking]:
    """Rank the backends at each T. rows: of one phase and dtype.

    Backends are equally fast if their quartiles overlap, or if the ratio of their medians is at most MAX_TIE_RATIO.
    """
    rankings = []
    for T in sorted({row.T for row in rows}):
        at_T = [row for row in rows if row.T == T]
        finished = sorted((row for row in at_T if row.is_finished), key=lambda row: row.ms_median)
        fastest = [row for row in finished if _is_tie(row, finished[0])]
        slower = [row for row in finished if row not in fastest]
        baseline = next(row for row in at_T if row.backend == rows[0].backend)
        unfinished = [row for row in at_T if not row.is_finished]
        rankings.append(Ranking(T, fastest, slower[0] if slower else None, baseline, unfinished))
    return rankings


def _is_tie(row: Timing, fastest: Timing) -> bool:
    return row.ms_q1 <= fastest.ms_q3 or row.ms_median <= MAX_TIE_RATIO * fastest.ms_median


@dataclass
class Crossover:
    """The T at which backend `faster` overtakes backend `slower`, and the milliseconds that both take there."""

    T: float
    ms: float
    slower: str
    faster: str


def find_crossovers(rows: list[Timing]) -> list[Crossover]:
    """Find the contexts T at which the fastest backend changes. rows: of one phase and dtype.

    A change counts only if no backend stays among the fastest, and if the two kernels differ.
    """
    crossovers: list[Crossover] = []
    leaders: list[str] = []
    for ranking in rank_backends(rows):
        fastest = ranking.fastest_names
        if leaders and fastest and not set(leaders) & set(fastest):
            pair = leaders[0], fastest[0]
            crossover = _intersect(rows, *pair)
            kernels = {row.kernel for row in rows if row.T == ranking.T and row.backend in pair}
            if crossover is not None and len(kernels) > 1:
                crossovers.append(crossover)
        leaders = [name for name in fastest if name in leaders] or fastest or leaders
    return crossovers


def _intersect(rows: list[Timing], slower: str, faster: str) -> Crossover | None:
    """Intersect two lines of the plot, which has logarithmic axes -> the last intersection; None: there is none."""
    times = {
        name: {row.T: row.ms_median for row in rows if row.backend == name and row.is_finished}
        for name in (slower, faster)
    }
    log_ratios = {T: log(times[faster][T] / times[slower][T]) for T in sorted(times[slower].keys() & times[faster])}
    crossover = None
    for low, high in itertools.pairwise(log_ratios):
        if log_ratios[low] > 0 >= log_ratios[high]:
            part = log_ratios[low] / (log_ratios[low] - log_ratios[high])
            T = low ** (1 - part) * high**part
            ms = times[slower][low] ** (1 - part) * times[slower][high] ** part
            crossover = Crossover(T, ms, slower, faster)
    return crossover


def recommend(rows: list[Timing]) -> list[tuple[str, str, str]]:
    """Recommend the fastest backends -> lines of (phase and dtype, range of T, backends and their advantage).

    The phases are in reverse order, so that the training step comes first. Neighbouring T with the same fastest
    backends share a line.
    """
    lines = []
    for (phase, dtype), phase_rows in reversed(group_by_phase(rows).items()):
        rankings = rank_backends(phase_rows)
        for _, group in itertools.groupby(rankings, key=lambda r: (set(r.fastest_names), r.baseline.status)):
            group = list(group)
            low, high = group[0].T, group[-1].T
            Ts = f"T = {low:,}" if low == high else f"T = {low:,} to {high:,}"
            lines.append((f"{phase}, {dtype}", Ts, _describe_fastest(group)))
    return lines


def _describe_fastest(group: list[Ranking]) -> str:
    """ "flash or sdpa (equal), 1.4 to 8.9 times as fast as naive, with 3 to 20% of its memory"."""
    baseline = group[0].baseline
    names = sorted(group[0].fastest_names)
    if not names:
        return "none: " + ", ".join(f"{row.backend} {row.status}" for row in group[0].unfinished)
    fastest = names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]} (equal)"
    if baseline.backend in names:
        pairs = [(ranking.runner_up, ranking.fastest[0]) for ranking in group if ranking.runner_up is not None]
        return fastest + (f", {_describe_speedup(pairs)}" if pairs else "")
    if not baseline.is_finished:
        return f"{fastest}; {baseline.backend}: {baseline.status}"
    pairs = [(ranking.baseline, ranking.fastest[0]) for ranking in group]
    memory = [(slow.peak_memory_bytes, fast.peak_memory_bytes) for slow, fast in pairs]
    percent = [100 * b / a for a, b in memory if a is not None and b is not None and a >= MIN_COMPARED_BYTES]
    saved = f", with {_format_range(percent, '.0f')}% of its memory" if percent else ""
    return f"{fastest}, {_describe_speedup(pairs)}{saved}"


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
