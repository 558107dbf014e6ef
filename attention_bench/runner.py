"""Runs a bench: each backend has a worker process, and the backends take turns in several rounds.

If the machine becomes slower or faster during the bench, all backends are therefore affected
equally.
"""

import tempfile
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from attention_bench.cases import Case, count_flops
from attention_bench.config import BenchConfig
from attention_bench.measure import measure, write_reference
from attention_bench.results import FINISHED, TIME_LIMIT, Timing
from attention_bench.worker import Worker
from common.console import ProgressBar
from common.files import write_csv

REFERENCE = "reference"  # name of the worker that computes references in float64


def measure_groups(
    groups: list[list[Case]], config: BenchConfig, table: Path, rows: list[Timing]
) -> None:
    """Measure all groups, with a progress bar.

    table: CSV file, which is written after each group.
    rows: list to which rows are appended, so that the caller has them after an interruption.
    """
    names = dict.fromkeys(case.name for group in groups for case in group)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        workers = {}
        for name in [*names, REFERENCE]:
            # The compile cache starts empty, so that first_call_s does not depend on earlier runs.
            workers[name] = Worker(folder / "compile_cache")
            stack.callback(workers[name].close)
        progress = stack.enter_context(ProgressBar(len(groups)))
        for index, group in enumerate(groups):
            label = str(group[0])
            progress.show(index, label)
            measured = measure_group(group, config, workers, folder / "reference.pt")
            rows += measured
            write_csv([asdict(row) for row in rows], table)
            times = [f"{row.backend} {row.format_ms()}" for row in measured]
            progress.print_text(f"{label}  ms: {', '.join(times)}")


def measure_group(
    group: list[Case], config: BenchConfig, workers: dict[str, Worker], reference: Path
) -> list[Timing]:
    """Measure the cases of one phase, mask, dtype and T. Returns a row per case.

    workers: processes by name of the backend, and the process REFERENCE.
    reference: path for the file of write_reference.
    """
    reference.unlink(missing_ok=True)
    if group[0].phase != "step":
        arguments = group[0], config.seed, reference
        status, _ = workers[REFERENCE].call(
            write_reference, *arguments, time_limit=config.time_limit
        )
        if status != FINISHED:  # the errors stay unknown; the file may be incomplete
            reference.unlink(missing_ok=True)
    rounds: dict[str, list[tuple[Timing, list[float]]]] = {case.name: [] for case in group}
    failures: dict[str, Timing] = {}
    for number in range(config.rounds):
        running = [case for case in group if case.name not in failures]
        first = number % max(1, len(running))  # each round begins with another backend
        for case in running[first:] + running[:first]:
            status, result = workers[case.name].call(
                measure, case, config, reference, time_limit=config.time_limit
            )
            if status == FINISHED:
                rounds[case.name].append(result)
            elif status != TIME_LIMIT or not rounds[case.name]:  # otherwise, other rounds count
                failures[case.name] = case.make_row(status, reason=result)
    finished = [case for case in group if case.name not in failures]
    rows = {case.name: summarize(rounds[case.name], count_flops(case, config)) for case in finished}
    return [(rows | failures)[case.name] for case in group]


def summarize(rounds: list[tuple[Timing, list[float]]], flops: int) -> Timing:
    """Summarize the results of `measure` as one row.

    Each round has the same weight, however many calls it has.
    """
    quantiles = [np.quantile(seconds, np.arange(0.05, 1, 0.05)) for _, seconds in rounds]
    q1, median, q3 = np.quantile(quantiles, [0.25, 0.5, 0.75]).tolist()
    peaks = [row.peak_memory_bytes for row, _ in rounds if row.peak_memory_bytes is not None]
    first_row, _ = rounds[0]  # later rounds use the compile cache
    return replace(
        first_row,
        ms_median=1000 * median,
        ms_q1=1000 * q1,
        ms_q3=1000 * q3,
        flops_per_second=flops / median,
        peak_memory_bytes=max(peaks, default=None),
    )
