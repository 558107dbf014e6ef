"""Prints the results of a bench: the recommendation first, then one table per phase, then notes."""

import math
from pathlib import Path

from common.console import TABLE_WIDTH, PlainConsole, format_number, make_table, pluralize
from comparison import MAX_SPREAD
from comparison.bench.config import BenchConfig
from comparison.bench.results import (
    MAX_TIE_RATIO,
    NO_ATTENTION,
    Timing,
    compute_spread,
    group_rows,
    recommend,
)
from model.config import ATTENTION_TYPES


def print_results(rows: list[Timing], folder: Path) -> None:
    """Print the recommendation, the tables and the notes. folder: the bench's folder."""
    console = PlainConsole()
    console.print(f"\nfastest here ({rows[0].device})", style="bold")
    recommendation, previous_phase = make_table("", "", "", left=3, header=False), None
    for phase, Ts, sentence in recommend(rows):
        recommendation.add_row("" if phase == previous_phase else phase, Ts, sentence)
        previous_phase = phase
    console.print(recommendation)
    if (spread := compute_spread(rows)) > MAX_SPREAD:
        advice = "Close other programs, and run the bench again with more rounds or seconds."
        reason = f"the upper quartile is typically {spread:.1f} times the lower quartile"
        console.print(f"These times are not reliable: {reason}. {advice}", style="bold")
    for (phase, dtype), phase_rows in group_rows(rows, "title", "dtype").items():
        if any(row.is_finished for row in phase_rows):
            console.print(f"\n{phase}, {dtype}", style="bold")
            console.print(
                _phase_table(phase_rows), width=max(TABLE_WIDTH, console.width), crop=False
            )
    console.print()
    for note in list_notes(rows):
        console.print(note)
    console.print_text(f"\nwritten  {folder / 'attention.csv'}  {folder / 'attention.png'}")


def _phase_table(rows: list[Timing]):
    """Make a table with a row per T. Backends that finished at no T are only in the notes."""
    lines = [
        line
        for line in group_rows(rows, "backend").values()
        if any(row.is_finished for row in line)
    ]
    headers = [header for line in lines for header in (f"{line[0].backend}\nms", "\nMiB")]
    table = make_table("\nT", *headers, left=0)
    for rows_at_T in zip(*lines, strict=False):  # an interrupted bench may lack rows of the last T
        table.add_row(
            f"{rows_at_T[0].T:,}", *(cell for row in rows_at_T for cell in _format_cells(row))
        )
    return table


def _format_cells(row: Timing) -> tuple[str, str]:
    """Format milliseconds and MiB."""
    if not row.is_finished:
        return row.status, ""
    MiB = None if row.peak_memory_bytes is None else row.peak_memory_bytes / 2**20
    return format_number(
        row.ms_median
    ), "-" if MiB is None else "<0.1" if MiB < 0.1 else format_number(MiB)


def list_notes(rows: list[Timing]) -> list[str]:
    """List the sentences that explain the tables."""
    finished, notes = [row for row in rows if row.is_finished], []
    if finished:
        notes.append("ms: median time of a call, without compilation.")
        notes.append(
            "MiB: memory besides the inputs; phase step includes the model and the optimizer."
        )
        notes.append(
            f"equal: the quartiles overlap, or the medians differ by less than {MAX_TIE_RATIO - 1:.0%}."
        )
    if any(row.backend == NO_ATTENTION for row in finished):
        notes.append(
            f"{NO_ATTENTION}: a training step whose layers add q, k and v instead of attending."
        )
    types = " and ".join(
        dict.fromkeys(row.backend for row in finished if row.backend in ATTENTION_TYPES)
    )
    if types:
        notes.append(
            f"{types}: model.attention_type={types} changes the results, and is not among the fastest above."
        )
    for kernel, ran in group_rows(
        [r for r in finished if r.resolved != r.backend], "backend", "resolved"
    ).items():
        notes.append(
            "{} ran {} ({}).".format(*kernel, ", ".join(dict.fromkeys(row.phase for row in ran)))
        )
    for (dtype,), dtype_rows in group_rows(finished, "dtype").items():
        errors = [
            (error, row.backend)
            for row in dtype_rows
            for error in (row.error_y, row.error_gradients)
        ]
        errors = [error for error in errors if error[0] is not None]
        if errors:
            worst = max(errors, key=lambda error: (math.isnan(error[0]), error))
            notes.append(
                "Largest error in {}, compared with float64: {:.1e}, by {}.".format(dtype, *worst)
            )
    failures = group_rows(
        [row for row in rows if not row.is_finished], "backend", "status", "reason"
    )
    for (backend, status, reason), group in failures.items():
        phases = "; ".join(dict.fromkeys(row.title for row in group))
        Ts = ", ".join(f"{T:,}" for T in sorted({row.T for row in group}))
        notes.append(f"{backend}: {status} ({phases}; T = {Ts}): {reason}")
    return notes


def describe_bench(config: BenchConfig, environment: dict) -> str:
    """Describe shapes, model and machine, as the title of the plot."""
    parts, sequences = [], pluralize(config.batch_size, "sequence")
    if set(config.phases) != {"step"}:
        H, G, D, _ = config.kernel_shape()
        key_heads = f", {pluralize(G, 'key/value head')}" if G != H else ""
        parts.append(f"attention: {sequences}, {pluralize(H, 'head')} of {D}{key_heads}")
    if "step" in config.phases:
        parts.append(
            f"training step: model={config.model.name}, optimizer={config.optimizer.name}, {sequences}"
        )
    machine, torch_version = environment["device_name"], environment["versions"]["torch"]
    return "; ".join(
        [*parts, f"{machine}, {environment['threads']} threads, torch {torch_version}"]
    )
