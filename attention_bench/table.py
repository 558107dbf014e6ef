"""Prints the results of a bench: the recommendation first, then one table per phase."""

from pathlib import Path

import torch
from rich.table import Table

from attention_bench.config import DEFAULT_TOKENS, BenchConfig
from attention_bench.results import (
    MAX_SPREAD,
    MAX_TIE_RATIO,
    NO_ATTENTION,
    NOT_RANKED,
    Timing,
    group_rows,
    rank_by_time,
    recommend,
)
from common.console import PlainConsole, make_table, pluralize
from common.machine import DTYPES
from model.attention import fastest_backend

LEGEND = (
    "kernel: the one that ran. ms: median time of a call, without compilation.",
    "MiB: memory of a call, besides its inputs; in phase step, besides model and optimizer.",
    "error: largest absolute difference of y from naive in float64; of gradients: dq, dk and dv.",
    f"equal: the quartiles overlap, or the medians differ by at most {MAX_TIE_RATIO - 1:.0%}.",
    f"times vary: the upper quartile is more than {MAX_SPREAD} times the lower quartile.",
    f"{NO_ATTENTION}: a training step whose layers add q, k and v instead of attending. No backend "
    "can make a step faster.",
)


def print_results(rows: list[Timing], folder: Path) -> None:
    """Print the recommendation, the tables, a legend and failures. folder: the bench's folder."""
    console = PlainConsole()
    console.print(f"\nfastest here ({rows[0].device})", style="bold")
    recommendation = make_table("", "", "", left=3, header=False)
    for line in recommend(rows):
        recommendation.add_row(*line)
    console.print(recommendation)
    for line in list_wrong_choices(rows):
        console.print(line, style="bold")
    noisy = [row for row in rows if row.is_noisy]
    if noisy:
        advice = "Close other programs, and run the bench again with more rounds or seconds."
        console.print(
            f"{len(noisy)} of {len(rows)} times vary widely and are not ranked. {advice}",
            style="bold",
        )
    for (phase, dtype), phase_rows in group_rows(rows, "title", "dtype").items():
        console.print(f"\n{phase}, {dtype}", style="bold")
        console.print(_phase_table(phase_rows))
    console.print()
    for note in [*LEGEND, *list_failures(rows)]:
        console.print(note)
    console.print_text(f"\nwritten  {folder / 'attention.csv'}  {folder / 'attention.png'}")


def _phase_table(rows: list[Timing]) -> Table:
    """Make a table of one phase and dtype, with a row per T and backend."""
    headers = ("T", "backend", "kernel", "ms (quartiles)", "MiB", "error", "of gradients")
    table = make_table(*headers, left=3)
    for row in rows:
        table.add_row(
            f"{row.T:,}",
            row.backend,
            row.resolved,
            row.format_ms(),
            _format(row.peak_memory_bytes and row.peak_memory_bytes / 2**20, ",.1f"),
            _format(row.error_y, ".1e"),
            _format(row.error_gradients, ".1e"),
        )
    return table


def _format(value: float | None, spec: str) -> str:
    return "" if value is None else f"{value:{spec}}"


def list_wrong_choices(rows: list[Timing]) -> list[str]:
    """List the training steps in which a backend is faster than the choice of attention=auto."""
    lines = []
    steps = [row for row in rows if row.phase == "step" and row.backend not in NOT_RANKED]
    for (dtype, T), group in group_rows(steps, "dtype", "T").items():
        choice = fastest_backend(torch.device(group[0].device), DTYPES[dtype], T)
        fastest, slower = rank_by_time(group)
        if choice in [row.backend for kernel in slower for row in kernel]:
            lines.append(
                f"step, {dtype}, T = {T:,}: attention=auto selects {choice}, but "
                f"{fastest[0][0].backend} is faster on this machine."
            )
    return lines


def list_failures(rows: list[Timing]) -> list[str]:
    """List why rows are not finished: "naive: out of memory (forward; T = 64, 128): ..."."""
    failed = [row for row in rows if not row.is_finished]
    lines = []
    groups = group_rows(failed, "backend", "status", "reason")
    for (backend, status, reason), group in groups.items():
        phases = "; ".join(dict.fromkeys(row.title for row in group))
        Ts = ", ".join(f"{T:,}" for T in sorted({row.T for row in group}))
        lines.append(f"{backend}: {status} ({phases}; T = {Ts}): {reason}")
    return lines


def describe_bench(config: BenchConfig, environment: dict) -> str:
    """Describe shapes, model and machine, as the title of the plot."""
    H, G, D, _ = config.kernel_shape()
    batch = f"{DEFAULT_TOKENS:,} tokens"
    if config.batch_size is not None:
        batch = pluralize(config.batch_size, "sequence")
    parts = [
        batch,
        f"attention: {pluralize(H, 'head')} of {D}, {pluralize(G, 'key/value head')}",
        f"training step: model={config.model.name}, optimizer={config.optimizer.name}",
        f"{environment['device_name']}, {environment['threads']} threads",
        f"torch {environment['versions']['torch']}",
    ]
    return "; ".join(parts)
