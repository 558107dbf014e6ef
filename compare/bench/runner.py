"""Runs a bench: each backend has a worker process, and the backends take turns in several rounds.

A machine that becomes slower or faster during the bench therefore affects all backends equally.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from compare.bench.cases import (
    BenchResult,
    BenchSettings,
    Case,
    count_flops,
    measure,
    measure_peak_flops,
    write_reference,
)
from compare.bench.results import FINISHED, TIME_LIMIT, Timing
from compare.bench.worker import IsolatedCallFailed, Worker


class BenchRunner:
    """Measures groups of cases. A group is one phase, dtype and T, with one case per backend.

    workers: the process of each backend. reference_worker: the process that computes references and the peak FLOP/s.
    folder: for the file of the reference.
    """

    def __init__(self, settings: BenchSettings, workers: dict[str, Worker], reference_worker: Worker, folder: Path):
        self.settings, self.workers, self.reference_worker = settings, workers, reference_worker
        self.reference = folder / "reference.pt"
        self.timed_out: dict[tuple[str, str, str], int] = {}  # (backend, phase, dtype) -> first T over the limit

    def run_group(self, group: list[Case], show_progress: Callable[[float], None]) -> list[Timing]:
        """Measure a group and return a row per case. show_progress: called with the finished share, from 0 to 1."""
        self._write_reference(group[0])
        results: dict[str, list[BenchResult]] = {case.name: [] for case in group}
        failures = self._skip_slow_backends(group)
        seconds_left = dict.fromkeys(results, self.settings.time_limit)
        peaks = []  # measured in every round, because a CPU's peak varied by a factor of 1.8 within one bench
        for round_index in range(self.settings.rounds):
            running = [case for case in group if case.name not in failures and seconds_left[case.name] > 0]
            if not running:
                break
            peaks.append(self.measure_peak_flops(group[0]))
            first = round_index % len(running)  # each round begins with another backend
            for position, case in enumerate(running[first:] + running[:first]):
                show_progress((round_index + position / len(running)) / self.settings.rounds)
                arguments, limits = (case, self.settings, self.reference), _call_limits(case, seconds_left[case.name])
                try:
                    result = self.workers[case.name].call(measure, *arguments, **limits)
                except IsolatedCallFailed as failure:
                    seconds_left[case.name] = 0.0
                    # After a time limit, the results of earlier rounds make the row.
                    if failure.status != TIME_LIMIT or not results[case.name]:
                        failures[case.name] = failure
                else:
                    results[case.name].append(result)
                    seconds_left[case.name] -= result.wall_seconds
        peak = max(filter(None, peaks), default=None)
        return [
            self._make_failed_row(case, failures[case.name])
            if case.name in failures
            else summarize(case, results[case.name], count_flops(case, self.settings), peak)
            for case in group
        ]

    def _make_failed_row(self, case: Case, failure: IsolatedCallFailed) -> Timing:
        if failure.status == TIME_LIMIT:
            self.timed_out.setdefault((case.name, case.phase, case.dtype_name), case.request.Tk)
        reason = failure.reason.split("; set ")[0]  # without the advice, which is for train.py
        return Timing(**_describe(case), status=failure.status, reason=reason)

    def measure_peak_flops(self, case: Case) -> float | None:
        """Measure the FLOP/s of matrix products on the device and in the dtype of `case`. None: it failed."""
        arguments = case.request.device, case.request.dtype, self.settings.tf32
        try:
            return self.reference_worker.call(measure_peak_flops, *arguments, time_limit=self.settings.time_limit)
        except IsolatedCallFailed:
            return None

    def _write_reference(self, case: Case) -> None:
        self.reference.unlink(missing_ok=True)
        if case.phase == "step":
            return
        arguments, limits = (case, self.settings.seed, self.reference), _call_limits(case, self.settings.time_limit)
        try:
            self.reference_worker.call(write_reference, *arguments, **limits)
        except IsolatedCallFailed:  # too little memory or time: the errors of this group stay unknown
            self.reference.unlink(missing_ok=True)

    def _skip_slow_backends(self, group: list[Case]) -> dict[str, IsolatedCallFailed]:
        """Fail the backends that exceeded the time limit with a smaller T -> {backend: failure}."""
        failures = {}
        for case in group:
            T = self.timed_out.get((case.name, case.phase, case.dtype_name))
            if T is not None:
                reason = f"not tried, as T = {T:,} took longer than {self.settings.time_limit:g} s"
                failures[case.name] = IsolatedCallFailed(TIME_LIMIT, reason)
        return failures


@contextmanager
def start_runner(settings: BenchSettings, backends: Iterable[str]) -> Iterator[BenchRunner]:
    """Context manager: yields a BenchRunner. Its worker processes end with the context."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # The compile cache starts empty, so that compile_s does not depend on earlier runs.
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compile_cache")}
        workers = {name: stack.enter_context(Worker(environment)) for name in backends}
        yield BenchRunner(settings, workers, stack.enter_context(Worker(environment)), folder)


def estimate_seconds(group: list[Case], settings: BenchSettings, peak: float | None) -> float:
    """Estimate the duration of a group: turns of many short calls, plus four calls at 40% of the peak."""
    call_seconds = sum(4 * count_flops(case, settings) / (0.4 * (peak or 1e11)) for case in group)
    return settings.rounds * (len(group) * (0.05 + 1.3 * settings.seconds) + call_seconds)


def summarize(case: Case, results: list[BenchResult], flops: int, peak: float | None) -> Timing:
    """Summarize the rounds of a finished case. Each round has the same weight, independent of its number of calls."""
    first = results[0]
    q1, median, q3 = _quantiles([value for result in results for value in _quantiles(result.seconds, 20)], 4)
    memory = [result.peak_memory_bytes for result in results]
    return Timing(
        **_describe(case),
        status=FINISHED,
        resolved=first.resolved.resolved,
        impl=first.resolved.impl,
        ms_median=1000 * median,
        ms_q1=1000 * q1,
        ms_q3=1000 * q3,
        tokens_per_second=case.tokens / median,
        flops_per_second=flops / median,
        peak_share=None if peak is None else flops / median / peak,
        peak_memory_bytes=None if None in memory else max(memory),
        compile_s=first.compile_s,  # later rounds use the compile cache
        **{f"error_{output}": error for output, error in first.errors.items()},
    )


def _describe(case: Case) -> dict:
    r = case.request
    shapes = {"B": r.B, "T": r.Tk, "H": r.H, "G": r.G, "D": r.D, "Dv": r.Dv}
    return {"backend": case.name, "phase": case.phase, "device": r.device.type, "dtype": case.dtype_name} | shapes


def _call_limits(case: Case, seconds: float) -> dict:
    """Limits of a worker call: time, and on a CPU memory. CUDA's driver reserves more address space than memory."""
    return {"time_limit": seconds, "limit_memory": case.request.device.type == "cpu"}


def _quantiles(values: list[float], n: int) -> list[float]:
    """The n - 1 points that divide `values` into n equal parts."""
    return statistics.quantiles(values, n=n, method="inclusive") if len(values) > 1 else values * (n - 1)
