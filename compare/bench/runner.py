"""Attention backends side by side: each measured in processes of its own, all taking turns."""

import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from compare.bench.cases import BenchResult, BenchSettings, Case, flops, measure, peak_flops, write_reference
from compare.bench.worker import IsolatedCallFailed, run_isolated


@dataclass(frozen=True)
class BenchGroup:
    """One phase, dtype and T, and a case for each backend, by the name that it was asked for."""

    phase: str
    dtype: str
    T: int
    cases: dict[str, Case]

    def __str__(self) -> str:
        return f"{self.phase}, {self.dtype}, T = {self.T:,}"

    def seconds(self, settings: BenchSettings, peak: float | None) -> float:
        """About how long it takes: to start processes, to time short calls, and four long ones at 40 % of the peak."""
        calls = sum(4 * flops(case, settings) / (0.4 * (peak or 1e11)) for case in self.cases.values())
        return settings.rounds * (len(self.cases) * (0.15 + 1.3 * settings.seconds) + calls)


def run_group(
    contest: BenchGroup, settings: BenchSettings, given_up: dict[tuple, int], advance: Callable[[float], None]
) -> list[dict]:
    """The contest's rows, as dicts by the names of attention.csv's columns.

    given_up: at which T a (backend, phase, dtype) took longer than the time limit; it is brought up to date here, and
    larger T are not tried. advance: is told which part of the work is done.
    """
    found: dict[str, list[BenchResult] | IsolatedCallFailed] = {}
    for name in contest.cases:
        T = given_up.get((name, contest.phase, contest.dtype))
        if T is not None:
            found[name] = IsolatedCallFailed(
                "time limit", f"not tried, as T = {T:,} took longer than {settings.time_limit:g} s"
            )
    with tempfile.TemporaryDirectory() as folder:
        reference = Path(folder) / "reference.pt"
        case = next(iter(contest.cases.values()))
        try:
            if case.phase != "step":
                _call(write_reference, case, settings.seed, reference, time_limit=settings.time_limit)
        except IsolatedCallFailed:
            reference.unlink(missing_ok=True)  # the errors stay unknown
        cases = {name: case for name, case in contest.cases.items() if name not in found}
        measured, peak = run_interleaved(cases, settings, reference, advance)
        found |= measured
    rows = []
    for name, case in contest.cases.items():
        row = {"backend": name, "resolved": None, "impl": None, "status": "finished", "reason": None}
        row |= {"phase": contest.phase, "device": case.device.type, "dtype": contest.dtype}
        row |= {key: getattr(case, key) for key in ("B", "T", "H", "G", "D", "Dv")}
        outcome = found[name]
        if isinstance(outcome, IsolatedCallFailed):
            # What to set instead is for those who want to train.
            row |= {"status": outcome.status, "reason": outcome.reason.split("; set ")[0]}
            if outcome.status == "time limit":
                given_up.setdefault((name, contest.phase, contest.dtype), contest.T)
        else:
            row |= summarize(outcome, peak)
        rows.append(row)
    return rows


def run_interleaved(
    cases: dict[str, Case],
    settings: BenchSettings,
    reference: Path,
    advance: Callable[[float], None] = lambda part: None,
) -> tuple[dict[str, list[BenchResult] | IsolatedCallFailed], float | None]:
    """Measure `cases` -> (for each what its processes found, or how it came to nothing; the peak beside them, FLOP/s).

    A process of each in every round, in another order, and one for matrix products: a machine that drifts does so for
    all alike.
    """
    found: dict[str, list[BenchResult] | IsolatedCallFailed] = {name: [] for name in cases}
    left = dict.fromkeys(cases, settings.time_limit)
    peak = None
    for turn in range(settings.rounds):
        going = [name for name in cases if not isinstance(found[name], IsolatedCallFailed) and left[name] > 0]
        if not going:
            break
        peak = max(filter(None, [peak, measure_matmul_peak(cases[going[0]], settings)]), default=None)
        first = turn % len(going)
        for place, name in enumerate(going[first:] + going[:first]):
            advance((turn + place / len(going)) / settings.rounds)
            started = time.perf_counter()
            try:
                found[name].append(_call(measure, cases[name], settings, reference, time_limit=left[name]))
            except IsolatedCallFailed as ended:
                if ended.status != "time limit":
                    found[name] = ended
                elif not found[name]:  # in a later round, what the earlier ones found stands
                    found[name] = IsolatedCallFailed(ended.status, f"took longer than {settings.time_limit:g} s")
            left[name] -= time.perf_counter() - started
    return found, peak


def measure_matmul_peak(case: Case, settings: BenchSettings) -> float | None:
    """FLOP/s that matrix products reach now, where and in what `case` computes. None: they could not be timed."""
    try:
        return run_isolated(peak_flops, case.device, case.dtype, settings.tf32, time_limit=settings.time_limit)
    except IsolatedCallFailed:
        return None


def _call(function: Callable, case: Case, *arguments: Any, time_limit: float) -> Any:
    """CUDA's driver has uses of its own for the memory of a process, which cannot be bounded."""
    return run_isolated(function, case, *arguments, time_limit=time_limit, bounded=case.device.type == "cpu")


def summarize(found: list[BenchResult], peak: float | None) -> dict:
    """The figures of a row, over all its processes, each of which counts the same however many calls it timed."""
    first = found[0]
    q1, median, q3 = _quantiles([each for measured in found for each in _quantiles(measured.seconds, 20)], 4)
    memory = [measured.peak_memory_bytes for measured in found]
    return {
        "resolved": first.resolved.resolved, "impl": first.resolved.impl,
        "ms_median": 1000 * median, "ms_q1": 1000 * q1, "ms_q3": 1000 * q3,
        "tokens_per_second": first.tokens / median, "flops_per_second": first.flops / median,
        "peak_share": None if peak is None else first.flops / median / peak,
        "peak_memory_bytes": None if None in memory else max(memory),
        **{f"error_{name}": error for name, error in first.errors.items()},
        "compile_s": first.compile_s,  # the others find it in the compile cache
    }  # fmt: skip


def _quantiles(values: list[float], n: int) -> list[float]:
    """The n - 1 points that divide `values` into n equal parts."""
    return statistics.quantiles(values, n=n, method="inclusive") if len(values) > 1 else values * (n - 1)
