"""Prints the results of a bench: the recommendation first, then one table per phase, then notes."""

from pathlib import Path

from common.console import format_number, make_console, make_table, pluralize
from compare import MAX_SPREAD
from compare.bench.config import BenchConfig
from compare.bench.results import (
    MAX_TIE_RATIO,
    NO_ATTENTION,
    NOT_RANKED,
    Timing,
    compute_spread,
    group_rows,
    rank_by_time,
    recommend,
)
from model.config import MIXER_NAMES

MIB = 2**20


def print_results(rows: list[Timing], folder: Path) -> None:
    """Print the results. folder: contains the files of the bench."""
    console = make_console(width=120)
    console.print(f"\nfastest here ({rows[0].device})", style="bold")
    console.print(_recommendation_table(rows))
    spread = compute_spread(rows)
    if spread is not None and spread > MAX_SPREAD:
        console.print(
            f"These times are not reliable: the upper quartile is typically {spread:.1f} times the lower quartile. "
            "Close other programs, and run the bench again with more rounds or seconds.",
            style="bold",
        )
    for (phase, dtype), phase_rows in group_rows(rows, "title", "dtype").items():
        if any(row.is_finished for row in phase_rows):
            console.print(f"\n{phase}, {dtype}", style="bold")
            console.print(_phase_table(phase_rows))
    if any(row.bandwidth_share for row in rows):
        console.print("\nfastest backend at the longest T, relative to the limits of this machine", style="bold")
        console.print(_limits_table(rows))
    console.print()
    for note in list_notes(rows):
        console.print(note)
    print(f"\nwritten  {folder / 'attention.csv'}  {folder / 'attention.png'}")


def list_notes(rows: list[Timing]) -> list[str]:
    """List the sentences that explain the tables."""
    notes = []
    finished = [row for row in rows if row.is_finished]
    attention_rows = [row for row in rows if row.phase != "step"]
    if attention_rows:
        notes.append(f"Attention alone: {describe_shapes(attention_rows[0])}.")
    if finished:
        notes.append("ms: median time of a call. MiB: memory besides the inputs; phase step includes the model.")
        notes.append(f"equal: the quartiles overlap, or the medians differ by less than {MAX_TIE_RATIO - 1:.0%}.")
    mixers = " and ".join(dict.fromkeys(row.backend for row in finished if row.backend in MIXER_NAMES))
    if mixers:
        notes.append(f"{mixers}: model.mixer={mixers}, which changes the results, and is not among the fastest above.")
    if any(row.compile_s for row in rows):
        notes.append("Times exclude compilation; attention.csv has its seconds in the column compile_s.")
    kernels = dict.fromkeys(f"{row.backend} ran {row.kernel}" for row in finished if row.kernel != row.backend)
    if kernels:
        notes.append(f"{'; '.join(kernels)}.")
    return notes + _step_notes(finished) + _error_notes(finished) + _failure_notes(rows)


def _step_notes(finished: list[Timing]) -> list[str]:
    errors = [(row.predicted_ms / row.ms_median - 1, row) for row in finished if row.predicted_ms is not None]
    notes = []
    if any(row.backend == NO_ATTENTION for row in finished):
        notes.append(f"{NO_ATTENTION}: a training step whose layers add q, k and v instead of attending.")
    if errors:
        error, row = max(errors, key=lambda pair: abs(pair[0]))
        notes.append(
            "predicted: the step without attention, plus attention alone in each layer. It differs from the measured "
            f"time by at most {abs(error):.0%} ({row.backend}, T = {row.T:,})."
        )
    return notes


def _error_notes(finished: list[Timing]) -> list[str]:
    notes = []
    for dtype in dict.fromkeys(row.dtype for row in finished):
        errors = [(error, row.backend) for row in finished if row.dtype == dtype for error in row.errors]
        if errors:
            notes.append("Largest error in {}, compared with float64: {:.1e}, by {}.".format(dtype, *max(errors)))
    unchecked = [row for row in finished if row.phase != "step" and row.backend not in NOT_RANKED and not row.errors]
    if unchecked:
        notes.append(f"Not compared with float64, for lack of memory or time: {_list_contexts(unchecked)}.")
    return notes


def _failure_notes(rows: list[Timing]) -> list[str]:
    notes = []
    failures = group_rows([row for row in rows if not row.is_finished], "backend", "status", "reason")
    for (backend, status, reason), group in failures.items():
        phases = ", ".join(dict.fromkeys(row.title for row in group))
        notes.append(f"{backend}: {status} ({phases}; {_list_contexts(group)}): {reason}")
    return notes


def describe_bench(config: BenchConfig, row: Timing, environment: dict) -> str:
    """Compose the title of the plot: shapes, model and machine."""
    parts = []
    if set(config.phases) != {"step"}:
        parts.append(f"attention: {describe_shapes(row)}")
    if "step" in config.phases:
        sequences = pluralize(config.batch_size, "sequence")
        parts.append(f"training step: model={config.model.name}, optimizer={config.optimizer.name}, {sequences}")
    machine, torch_version = environment["device_name"], environment["versions"]["torch"]
    return "; ".join([*parts, f"{machine}, {environment['threads']} threads, torch {torch_version}"])


def describe_shapes(row: Timing) -> str:
    """ "1 sequence, 2 heads of 64"."""
    key_heads = f", {pluralize(row.G, 'key/value head')}" if row.G != row.H else ""
    value_dim = f", values of {row.Dv}" if row.Dv != row.D else ""
    return f"{pluralize(row.B, 'sequence')}, {pluralize(row.H, 'head')} of {row.D}{key_heads}{value_dim}"


def _list_contexts(rows: list[Timing]) -> str:
    return "T = " + ", ".join(f"{T:,}" for T in sorted({row.T for row in rows}))


def _recommendation_table(rows: list[Timing]):
    table, previous_phase = make_table("", "", "", left=3, header=False), None
    for phase, Ts, sentence in recommend(rows):
        table.add_row("" if phase == previous_phase else phase, Ts, sentence)
        previous_phase = phase
    return table


def _phase_table(rows: list[Timing]):
    """A row per T. Backends that finished at no T are only in the notes."""
    columns: list[tuple[str, list[str]]] = []  # header, and a cell per T
    for (backend,), line in group_rows(rows, "backend").items():
        if not any(row.is_finished for row in line):
            continue
        times = [format_number(row.ms_median) if row.is_finished else row.status for row in line]
        columns.append((f"{backend}\nms", times))
        if any(row.predicted_ms for row in line):
            predicted = ["" if row.predicted_ms is None else format_number(row.predicted_ms) for row in line]
            columns.append(("pre-\ndicted", predicted))
        columns.append(("\nMiB", [_format_memory(row) for row in line]))
    headers, cells = zip(*columns, strict=True)
    table = make_table("\nT", *headers, left=0)
    for (T,), *line in zip(group_rows(rows, "T"), *cells, strict=True):
        table.add_row(f"{T:,}", *line)
    return table


def _limits_table(rows: list[Timing]):
    """Shares of the peak FLOP/s and of the memory bandwidth, and the cost of masks."""
    headers = ["\nT", "peak\nFLOP/s", "memory\nbandwidth", "ns per\nvisible pair", "mask,\nms"]
    table = make_table("", "\nbackend", *headers, left=2)
    rows = [row for row in rows if row.bandwidth_share]
    for (title, dtype), phase_rows in group_rows(rows, "title", "dtype").items():
        T = max(row.T for row in phase_rows)
        row = rank_by_time([row for row in phase_rows if row.T == T])[0][0]
        mask = "" if row.mask_ms is None else format_number(row.mask_ms)
        shares = f"{row.peak_share:.1%}", f"{row.bandwidth_share:.1%}"
        table.add_row(
            f"{title}, {dtype}", row.backend, f"{T:,}", *shares, format_number(1e9 / row.pairs_per_second), mask
        )
    return table


def _format_memory(row: Timing) -> str:
    """MiB."""
    if not row.is_finished:
        return ""
    memory = row.peak_memory_bytes
    return "-" if memory is None else "<0.1" if memory < MIB / 10 else format_number(memory / MIB)
