"""Timings on a terminal: the answer first, then a table per phase, then what to know beside them."""

from pathlib import Path

from compare.bench.results import (
    FINISHED,
    NOISE_LIMIT,
    TIE_RATIO,
    Timing,
    group_by_phase,
    number,
    recommendation,
    spread,
)
from compare.runs.table import UNKNOWN


def show(rows: list[Timing], folder: Path) -> None:
    """Print all of it, and where it was written."""
    from rich.console import Console

    console = Console(highlight=False, emoji=False, markup=False)
    if not console.is_terminal:
        console.width = 120
    console.print(f"\nfastest here ({rows[0].device})", style="bold")
    console.print(_lines(recommendation(rows)))
    apart = spread(rows)
    if apart is not None and apart > NOISE_LIMIT:
        console.print(
            f"This machine was busy, or not a quiet one: half of all calls lie within a factor of {apart:.1f}. Do not "
            "trust these figures; measure again while nothing else runs, with more rounds or seconds.", style="bold",
        )  # fmt: skip
    for (phase, dtype), mine in group_by_phase(rows).items():
        if any(row.status == FINISHED for row in mine):
            console.print(f"\n{phase}, {dtype}", style="bold")
            console.print(_table(mine))
    console.print()
    for note in notes(rows):
        console.print(note)
    print(f"\nwritten  {folder / 'attention.csv'}  {folder / 'attention.png'}")


def notes(rows: list[Timing]) -> list[str]:
    """What a reader has to know beside the tables, a sentence each."""
    said = []
    alone = [row for row in rows if row.phase != "step"]
    if alone:
        said.append(f"Attention alone: {where(alone[0])}.")
    if any(row.status == FINISHED for row in rows):
        said.append(
            "ms: median call, the backends taking turns; MiB: what a call takes beyond its inputs, or a whole step."
        )
        said.append(f"alike: quartiles overlap, or medians are within {TIE_RATIO - 1:.0%}.")
    if any(row.compile_s for row in rows):
        said.append("Compiling is not counted; attention.csv has it.")
    ran: dict[str, list[str]] = {}
    for row in rows:
        if row.status == FINISHED and row.kernel not in ran.setdefault(row.backend, []):
            ran[row.backend].append(row.kernel)
    others = [f"{backend} ran {' and '.join(kernels)}" for backend, kernels in ran.items() if kernels != [backend]]
    said += [f"{'; '.join(others)}."] if others else []
    for dtype in dict.fromkeys(row.dtype for row in rows):
        errors = {(error, row.backend) for row in rows if row.dtype == dtype for error in row.errors}
        if errors:
            largest, backend = max(errors)
            said.append(f"Largest error in {dtype}, against float64: {largest:.1e}, by {backend}.")
    bare = [row for row in alone if row.status == FINISHED and not row.errors]
    if bare:
        Ts = ", ".join(f"{T:,}" for T in sorted({row.T for row in bare}))
        said.append(f"Not held against float64, which needs more memory or time than there is: T = {Ts}.")
    reasons: dict[tuple[str, str, str], list[Timing]] = {}
    for row in rows:
        if row.status != FINISHED:
            reasons.setdefault((row.backend, row.status, row.reason or ""), []).append(row)
    for (backend, status, reason), those in reasons.items():
        phases = ", ".join(dict.fromkeys(row.phase for row in those))
        Ts = ", ".join(f"{T:,}" for T in sorted({row.T for row in those}))
        said.append(f"{backend}: {status} ({phases}; T = {Ts}): {reason}")
    return said


def where(row: Timing) -> str:
    """ "1 sequence, 2 heads of 64": the shapes of attention alone."""
    shared = f", {row.G} of keys and values" if row.G != row.H else ""
    wide = f", values of {row.Dv}" if row.Dv != row.D else ""
    return f"{row.B} sequence{'s' * (row.B > 1)}, {row.H} head{'s' * (row.H > 1)} of {row.D}{shared}{wide}"


def _lines(lines: list[tuple[str, str, str]]):
    """What is the same as above is not said again."""
    from rich.table import Table

    table, before = Table(box=None, show_header=False, padding=(0, 2, 0, 0)), None
    for phase, at, which in lines:
        table.add_row("" if phase == before else phase, at, which)
        before = phase
    return table


def _table(rows: list[Timing]):
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("\nT", justify="right", no_wrap=True)
    # Those that came to nothing at every T are in the notes.
    finished = {row.backend for row in rows if row.status == FINISHED}
    backends = [backend for backend in dict.fromkeys(row.backend for row in rows) if backend in finished]
    for backend in backends:
        table.add_column(f"{backend}\nms", justify="right", no_wrap=True)
        table.add_column("\nMiB", justify="right", no_wrap=True)
    for T in sorted({row.T for row in rows}):
        here = {row.backend: row for row in rows if row.T == T}
        cells = [cell for backend in backends for cell in _cells(here.get(backend))]
        table.add_row(f"{T:,}", *cells)
    return table


def _cells(row: Timing | None) -> tuple[str, str]:
    if row is None:
        return "", ""
    if row.status != FINISHED:
        return row.status, ""
    size = row.peak_memory_bytes
    return number(row.ms_median), UNKNOWN if size is None else "<0.1" if size < 2**20 / 10 else number(size / 2**20)
