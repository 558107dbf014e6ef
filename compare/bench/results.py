"""Timings of attention: the rows of attention.csv, and what they come to.

The first backend is the one that the others are held against.
"""

import csv
import itertools
import statistics
from dataclasses import asdict, dataclass, fields
from math import log
from pathlib import Path

FINISHED = "finished"
TIE_RATIO = 1.1
NOISE_LIMIT = 1.5  # a spread beyond which a machine was busy with something else
MIN_MEMORY = 2**20  # bytes: a CPU process takes as much anyway, now and then


@dataclass
class Timing:
    """A row. Figures are None where there are none.

    status: finished, refused, out of memory, time limit or failed, with the reason. backend: as it was asked for;
    resolved, impl: the kernel that ran. T: keys, and queries too but in phase decode, which has one. ms: of a call,
    median and quartiles. peak_share: of what matrix products reach. peak_memory_bytes: what a call takes beyond its
    inputs; a whole step's model counts. error: largest distance from float64 on the same inputs. compile_s: seconds,
    no part of ms.
    """

    backend: str
    resolved: str | None
    impl: str | None
    status: str
    reason: str | None
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
    def errors(self) -> list[float]:
        each = (self.error_y, self.error_dq, self.error_dk, self.error_dv)
        return [error for error in each if error is not None]

    @property
    def kernel(self) -> str:
        return f"{self.resolved} {self.impl}" if self.impl else str(self.resolved)


class TimingsFile:
    """attention.csv, a row at a time: what is there survives whatever comes after it."""

    def __init__(self, path: Path):
        self.file = open(path, "w", newline="", encoding="utf-8")  # noqa: SIM115 (open as long as the measuring)
        self.writer = csv.DictWriter(self.file, [field.name for field in fields(Timing)])
        self.writer.writeheader()
        self.file.flush()

    def write(self, row: Timing) -> None:
        told = asdict(row)
        self.writer.writerow(
            {key: f"{value:.6g}" if isinstance(value, float) else value for key, value in told.items()}
        )
        self.file.flush()

    def __enter__(self) -> "TimingsFile":
        return self

    def __exit__(self, *_) -> None:
        self.file.close()


@dataclass
class Ranking:
    """Who is fastest at one T. fastest: the least median first, then those that are as good as it.

    next: the one behind them, None: nobody. first: the first backend's row, for comparison. failed: those without time.
    """

    T: int
    fastest: list[Timing]
    next: Timing | None
    first: Timing
    failed: list[Timing]

    @property
    def names(self) -> set[str]:
        return {row.backend for row in self.fastest}


def group_by_phase(rows: list[Timing]) -> dict[tuple[str, str], list[Timing]]:
    """{(phase, dtype): its rows}, in order of appearance."""
    found: dict[tuple[str, str], list[Timing]] = {}
    for row in rows:
        found.setdefault((row.phase, row.dtype), []).append(row)
    return found


def rankings(rows: list[Timing]) -> list[Ranking]:
    """Who is fastest at each T, of the rows of one phase and dtype; nobody where none came to its end.

    Backends are alike where quartiles overlap, or where less than ALIKE lies between their medians: machines drift.
    """
    found = []
    for T in sorted({row.T for row in rows}):
        here = [row for row in rows if row.T == T]
        ranked = sorted((row for row in here if row.status == FINISHED), key=lambda row: row.ms_median)
        alike = [
            row for row in ranked for best in ranked[:1]
            if row.ms_q1 <= best.ms_q3 or row.ms_median <= TIE_RATIO * best.ms_median
        ]  # fmt: skip
        behind = [row for row in ranked if row not in alike]
        failed = [row for row in here if row.status != FINISHED]
        first = next(row for row in here if row.backend == rows[0].backend)
        found.append(Ranking(T, alike, behind[0] if behind else None, first, failed))
    return found


@dataclass
class Crossover:
    """Where backend `after` becomes faster than `before`, and the milliseconds that both take there."""

    T: float
    ms: float
    before: str
    after: str


def crossovers(rows: list[Timing]) -> list[Crossover]:
    """Where the fastest backend changes, of the rows of one phase and dtype.

    It changes where none of those that were fastest is any more; those that no figure tells apart are one.
    """
    found, leading = [], []
    for standing in rankings(rows):
        names = [row.backend for row in standing.fastest]
        if not names:
            continue
        if leading and not set(leading) & set(names):
            crossing = _crossing(rows, leading[0], names[0])
            kernels = {row.kernel for row in rows if row.T == standing.T and row.backend in (leading[0], names[0])}
            if crossing is not None and len(kernels) > 1:  # one kernel does not overtake itself
                found.append(crossing)
        leading = [name for name in names if name in leading] or names
    return found


def _crossing(rows: list[Timing], before: str, after: str) -> Crossover | None:
    """The last place where `after` overtakes `before`, on straight lines through the points of a log-log picture.

    None: nowhere that both were measured.
    """
    times = {name: {row.T: row.ms_median for row in rows if (row.backend, row.status) == (name, FINISHED)}
             for name in (before, after)}  # fmt: skip
    leads = {T: log(times[after][T] / times[before][T]) for T in sorted(times[before].keys() & times[after].keys())}
    found = None
    for low, high in itertools.pairwise(leads):
        if leads[low] > 0 >= leads[high]:
            part = leads[low] / (leads[low] - leads[high])
            T, ms = (a ** (1 - part) * b**part for a, b in ((low, high), (times[before][low], times[before][high])))
            found = Crossover(T, ms, before, after)
    return found


def recommendation(rows: list[Timing]) -> list[tuple[str, str, str]]:
    """Which attention is fastest here -> (phase and dtype, at which T, which and by how much) a line.

    What is measured last comes first: whole steps matter more than their parts. Neighbouring T with the same answer
    are one line.
    """
    lines = []
    for (phase, dtype), mine in reversed(group_by_phase(rows).items()):
        groups: list[list[Ranking]] = []
        for standing in rankings(mine):
            last = groups[-1][-1] if groups else None
            if last is not None and last.names == standing.names and last.first.status == standing.first.status:
                groups[-1].append(standing)
            else:
                groups.append([standing])
        for group in groups:
            low, high = group[0].T, group[-1].T
            at = f"T = {low:,}" if low == high else f"T = {low:,} to {high:,}"
            lines.append((f"{phase}, {dtype}", at, _sentence(group)))
    return lines


def _sentence(group: list[Ranking]) -> str:
    """ "sdpa or flash, 1.4 to 8.9 times as fast as naive, with 3 to 20 % of its memory"."""
    first = group[0].first
    if not group[0].fastest:
        return "none: " + ", ".join(f"{row.backend} {row.status}" for row in group[0].failed)
    names = sorted(group[0].names)
    listed = ", ".join(names[:-1]) + " or " * (len(names) > 1) + names[-1] + " (alike)" * (len(names) > 1)
    if first.backend in names:
        others = dict.fromkeys(each.next.backend for each in group if each.next is not None)
        ahead = [each.next.ms_median / each.fastest[0].ms_median for each in group if each.next is not None]
        return listed + (f", {_span(ahead, '.1f')} times as fast as {' or '.join(others)}" if others else "")
    if first.status != FINISHED:
        return f"{listed}; {first.backend}: {first.status}"
    ratios = [each.first.ms_median / each.fastest[0].ms_median for each in group]
    taken = [(each.first.peak_memory_bytes, each.fastest[0].peak_memory_bytes) for each in group]
    shares = [100 * b / a for a, b in taken if a is not None and b is not None and a >= MIN_MEMORY]
    memory = f", with {_span(shares, '.0f')} % of its memory" if shares else ""
    return f"{listed}, {_span(ratios, '.1f')} times as fast as {first.backend}{memory}"


def spread(rows: list[Timing]) -> float | None:
    """The typical ratio of a row's upper to its lower quartile: how still the machine was. None: there are no times."""
    ratios = [row.ms_q3 / row.ms_q1 for row in rows if row.status == FINISHED]
    return statistics.median(ratios) if ratios else None


def number(value: float) -> str:
    """Two or three digits that count: 0.0123, 1.23, 12.3, 123, 1,234."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _span(values: list[float], form: str) -> str:
    """The least and the largest."""
    ends = [f"{value:{form}}" for value in (min(values), max(values))]
    return ends[0] if ends[0] == ends[1] else f"{ends[0]} to {ends[1]}"
