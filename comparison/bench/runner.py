"""Runs a bench: each backend has a worker process, and the backends take turns in several rounds.

If the machine becomes slower or faster during the bench, all backends are therefore affected equally.
"""

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np

from common.console import ProgressBar, format_number
from comparison.bench.cases import Case, count_flops, measure, write_reference
from comparison.bench.config import BenchConfig
from comparison.bench.results import FINISHED, TIME_LIMIT, Timing, append_row
from comparison.bench.worker import Worker

REFERENCE = "reference"  # name of the worker that computes references in float64


def measure_groups(
    groups: list[list[Case]], config: BenchConfig, table: Path, rows: list[Timing]
) -> None:
    """Measure all groups, with a progress bar.

    table: CSV file to which rows are appended.
    rows: list to which rows are appended, so that the caller has them after an interruption.
    """
    names = dict.fromkeys(case.name for group in groups for case in group)
    width = max(len(str(group[0])) for group in groups)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        # The compile cache starts empty, so that compile_s does not depend on earlier runs.
        workers = {name: Worker(folder / "compile_cache") for name in [*names, REFERENCE]}
        for worker in workers.values():
            stack.callback(worker.close)
        progress = stack.enter_context(ProgressBar(len(groups)))
        for index, group in enumerate(groups):
            label, times = f"{group[0]!s:<{width}}", []
            progress.show(index, label)
            for row in measure_group(group, config, workers, folder / "reference.pt"):
                append_row(table, row)
                rows.append(row)
                times.append(
                    f"{row.backend} {format_number(row.ms_median) if row.is_finished else row.status}"
                )
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
            arguments = case, config, reference
            status, result = workers[case.name].call(
                measure, *arguments, time_limit=config.time_limit
            )
            if status == FINISHED:
                rounds[case.name].append(result)
            elif status != TIME_LIMIT or not rounds[case.name]:  # otherwise, the other rounds count
                failures[case.name] = Timing(**case.start_row(), status=status, reason=result)
    return [
        failures.get(case.name) or summarize(rounds[case.name], count_flops(case, config))
        for case in group
    ]


def summarize(rounds: list[tuple[Timing, list[float]]], flops: int) -> Timing:
    """Summarize the results of `measure` as one row. Each round has the same weight, however many calls it has."""
    rows, seconds = zip(*rounds, strict=True)
    quantiles = [np.quantile(call_seconds, np.arange(0.05, 1, 0.05)) for call_seconds in seconds]
    q1, median, q3 = np.quantile(quantiles, [0.25, 0.5, 0.75]).tolist()
    times = {
        "ms_median": 1000 * median,
        "ms_q1": 1000 * q1,
        "ms_q3": 1000 * q3,
        "flops_per_second": flops / median,
    }
    memory = [row.peak_memory_bytes for row in rows]
    peak = None if None in memory else max(memory)
    return replace(
        rows[0], **times, peak_memory_bytes=peak
    )  # the first round, as later ones use the compile cache
