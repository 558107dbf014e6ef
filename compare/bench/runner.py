"""Runs a bench: each backend has a worker process, and the backends take turns in several rounds.

A machine that becomes slower or faster during the bench therefore affects all backends equally.
"""

import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from common.console import ProgressBar, format_number
from compare.bench.cases import (
    BenchResult,
    Case,
    count_bytes,
    count_flops,
    count_pairs,
    measure,
    measure_peaks,
    write_reference,
)
from compare.bench.config import BenchConfig
from compare.bench.results import FINISHED, TIME_LIMIT, Timing, add_predictions, append_row
from compare.bench.worker import IsolatedCallFailed, Worker


def measure_groups(groups: list[list[Case]], config: BenchConfig, table: Path, rows: list[Timing]) -> None:
    """Measure all groups, with a progress bar. Append each row to `rows` and to the CSV file `table`."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # The compile cache starts empty, so that compile_s does not depend on earlier runs.
        environment = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "compile_cache")}
        # CUDA's driver reserves more address space than there is memory.
        limit_memory = groups[0][0].request.device.type == "cpu"
        names = dict.fromkeys(case.name for group in groups for case in group)
        workers = {name: stack.enter_context(Worker(environment, limit_memory)) for name in names}
        reference_worker = stack.enter_context(Worker(environment, limit_memory))
        runner = BenchRunner(config, workers, reference_worker, folder / "reference.pt")
        progress = stack.enter_context(ProgressBar())
        peak = (runner.measure_peaks(groups[0][0]) or (1e11, 0))[0]
        estimates = [estimate_seconds(group, config, peak) for group in groups]
        progress.restart(sum(estimates))
        width = max(len(str(group[0])) for group in groups)
        for index, group in enumerate(groups):
            label, done, estimate = f"{group[0]!s:<{width}}", sum(estimates[:index]), estimates[index]
            show_progress = lambda part: progress.update(done + part * estimate, label)  # noqa: B023, E731
            times = []
            for row in add_predictions(runner.run_group(group, show_progress), rows, config.model):
                append_row(table, row)
                rows.append(row)
                times.append(f"{row.backend} {format_number(row.ms_median) if row.is_finished else row.status}")
            progress.print(f"{label}  ms: {', '.join(times)}")


def estimate_seconds(group: list[Case], config: BenchConfig, peak: float) -> float:
    """Estimate the duration of a group: turns of many short calls, plus four calls at 40% of the peak."""
    call_seconds = sum(4 * count_flops(case, config) / (0.4 * peak) for case in group)
    return config.rounds * (len(group) * (0.05 + 1.3 * config.seconds) + call_seconds)


class BenchRunner:
    """Measures groups of cases. A group is one phase, mask, dtype and T, with one case per backend.

    workers: the process of each backend. reference_worker: the process that computes references and the peak speeds.
    reference: file of the reference of the current group.
    """

    def __init__(self, config: BenchConfig, workers: dict[str, Worker], reference_worker: Worker, reference: Path):
        self.config, self.workers, self.reference_worker = config, workers, reference_worker
        self.reference = reference
        self.too_slow: dict[tuple[str, ...], IsolatedCallFailed] = {}  # by backend, phase, mask and dtype

    def run_group(self, group: list[Case], show_progress: Callable[[float], None]) -> list[Timing]:
        """Measure a group and return a row per case. show_progress: called with the finished share, from 0 to 1."""
        self._write_reference(group[0])
        keys = {case.name: (case.name, case.phase, case.mask, case.dtype_name) for case in group}
        failures = {name: self.too_slow[key] for name, key in keys.items() if key in self.too_slow}
        results: dict[str, list[BenchResult]] = {name: [] for name in keys}
        seconds_left = dict.fromkeys(keys, self.config.time_limit)
        peaks = []  # measured in every round, because a CPU's peak varied by a factor of 1.8 within one bench
        for round_index in range(self.config.rounds):
            running = [case for case in group if case.name not in failures and seconds_left[case.name] > 0]
            if not running:
                break
            peaks.append(self.measure_peaks(group[0]))
            first = round_index % len(running)  # each round begins with another backend
            for position, case in enumerate(running[first:] + running[:first]):
                show_progress((round_index + position / len(running)) / self.config.rounds)
                name = case.name
                arguments = case, self.config, self.reference
                try:
                    result = self.workers[name].call(measure, *arguments, time_limit=seconds_left[name])
                except IsolatedCallFailed as failure:
                    seconds_left[name] = 0.0
                    if failure.status != TIME_LIMIT:
                        failures[name] = failure
                    elif not results[name]:  # otherwise, the row has the results of earlier rounds
                        failures[name] = failure
                        reason = f"not tried, as T = {case.request.Tk:,} {failure.reason}"
                        self.too_slow[keys[name]] = IsolatedCallFailed(TIME_LIMIT, reason)
                else:
                    results[name].append(result)
                    seconds_left[name] -= result.wall_seconds
        peaks = [max(values) for values in zip(*filter(None, peaks), strict=True)]
        return [
            summarize(case, results[case.name], count_flops(case, self.config), peaks)
            if case.name not in failures
            else _make_failed_row(case, failures[case.name])
            for case in group
        ]

    def measure_peaks(self, case: Case) -> tuple[float, float] | None:
        """Measure the peak speeds of the machine for the device and dtype of `case`. None: it failed."""
        arguments = case.request.device, case.request.dtype, self.config.tf32
        try:
            return self.reference_worker.call(measure_peaks, *arguments, time_limit=self.config.time_limit)
        except IsolatedCallFailed:
            return None

    def _write_reference(self, case: Case) -> None:
        self.reference.unlink(missing_ok=True)
        if case.phase == "step":
            return
        arguments = case, self.config.seed, self.reference
        try:
            self.reference_worker.call(write_reference, *arguments, time_limit=self.config.time_limit)
        except IsolatedCallFailed:  # too little memory or time: the errors of this group stay unknown
            self.reference.unlink(missing_ok=True)


def summarize(case: Case, results: list[BenchResult], flops: int, peaks: list[float]) -> Timing:
    """Summarize the rounds of a finished case. Each round has the same weight, independent of its number of calls.

    flops: of a call. peaks: FLOP/s and bytes per second of the machine; empty if unknown.
    """
    first, size, pairs = results[0], count_bytes(case), count_pairs(case)
    mask_seconds = [result.mask_seconds for result in results if result.mask_seconds is not None]
    seconds = [np.quantile(result.seconds, np.arange(0.05, 1, 0.05)) for result in results]
    q1, median, q3 = np.quantile(seconds, [0.25, 0.5, 0.75]).tolist()
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
        peak_share=flops / median / peaks[0] if peaks else None,
        bytes_per_second=None if size is None else size / median,
        bandwidth_share=size / median / peaks[1] if size is not None and peaks else None,
        pairs_per_second=None if pairs is None else pairs / median,
        mask_ms=1000 * statistics.median(mask_seconds) if mask_seconds else None,
        peak_memory_bytes=None if None in memory else max(memory),
        compile_s=first.compile_s,  # later rounds use the compile cache
        **{f"error_{output}": error for output, error in first.errors.items()},
    )


def _describe(case: Case) -> dict:
    r = case.request
    shapes = {"B": r.B, "T": r.Tk, "H": r.H, "G": r.G, "D": r.D, "Dv": r.Dv}
    names = {"backend": case.name, "phase": case.phase, "mask": case.mask}
    return names | {"device": r.device.type, "dtype": case.dtype_name, "Tq": r.Tq} | shapes


def _make_failed_row(case: Case, failure: IsolatedCallFailed) -> Timing:
    reason = failure.reason.split("; set ")[0]  # without the advice, which is for train.py
    return Timing(**_describe(case), status=failure.status, reason=reason)
