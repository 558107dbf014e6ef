"""Compares finished runs: the rows, the terminal's table with its notes, and the files.

read.py joins runs to variants. The first variant is the baseline. A row is a dict from the names of
the metrics that the registry compares to their Value.
"""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from common.console import PlainConsole, make_table
from common.files import write_csv, write_json
from results.metrics import (
    COMPUTED,
    DIFFERENCE,
    DISTINCT,
    MEAN,
    MEDIAN,
    METRICS,
    STEP_MEDIAN,
    Value,
    format_loss,
)
from results.plots import plot_comparison
from results.read import Variant, read_variants
from results.speedup import list_lengths, measure_speedups
from results.statistics import (
    ROUNDING_STEPS,
    computes_same_function,
    divergence,
    estimate_mean,
    estimate_median,
    find_pairs,
    judge,
)

Row = dict[str, Value]

FILES = ("comparison.png", "comparison.csv")
UNKNOWN = EN_DASH = "–"  # noqa: RUF001
SAME_STEPS = f"the first {ROUNDING_STEPS} steps have the losses of the baseline, up to rounding"
EXCLUDES_0 = "the 95 % confidence interval of the difference excludes 0."
# Start of a verdict, and what it means.
VERDICT_NOTES = {
    "equal losses": "all losses equal the losses of the baseline, bit by bit.",
    "same up to rounding": f"{SAME_STEPS}; the validation losses show no difference.",
    "same for": f"{SAME_STEPS}; three or more seeds show whether the validation losses differ.",
    "differs": "the training losses differ by more than rounding error, so this variant does not "
    "compute the same function as the baseline.",
    "lower loss": EXCLUDES_0,
    "higher loss": EXCLUDES_0,
    "no difference found": "the 95 % confidence interval of the difference contains 0; more seeds "
    "find smaller differences.",
    "not tested": "one pair of runs cannot show a difference; train a second seed.",
}


def compare(folders: list[Path], out: Path) -> list[Row]:
    """Compare runs, and write FILES.

    comparison.json has the folders of the runs, relative to `out`, for results/wandb.py.
    out: folder for the files, which is created if needed.
    Returns the rows. Raises UserError for a folder that is not a run and for a damaged file.
    """
    variants = read_variants(folders)
    rows = compare_variants(variants)
    out.mkdir(parents=True, exist_ok=True)
    write_csv([flatten_row(row) for row in rows], out / "comparison.csv")
    plot_comparison(variants, rows, out / "comparison.png")
    runs = [os.path.relpath(run.folder, out) for variant in variants for run in variant.runs]
    write_json(out / "comparison.json", {"runs": runs})
    return rows


def print_comparison(rows: list[Row], out: Path) -> None:
    """Print the table, its notes, and the names of the files."""
    console = PlainConsole()
    console.print(make_terminal_table(rows))
    for note in list_notes(rows):
        console.print(note, soft_wrap=True)  # a command in a note can be copied
    console.print("comparison.csv has more columns.")
    console.print_text(f"\nwritten  {'  '.join(str(out / name) for name in FILES)}")


# The rows


def compare_variants(variants: list[Variant]) -> list[Row]:
    """Make a row for each variant: a Value for each metric that the registry compares."""
    lengths = list_lengths(variants)
    rows = []
    for variant in variants:
        row = {name: _summarize(variant, name) for name in METRICS if METRICS[name].compare}
        rows.append(row | _compare_with_baseline(variant, variants[0], lengths))
    return rows


def _summarize(variant: Variant, name: str) -> Value:
    """Summarize a metric over the runs of a variant."""
    how = METRICS[name].compare
    if how == MEAN:
        return estimate_mean(variant.newest(name))
    if how == MEDIAN:
        return estimate_median(variant.newest(name))
    if how == STEP_MEDIAN:
        return estimate_median(variant.after_warmup(name))
    return _join_distinct(run.summary.get(name) for run in variant.runs)


def _compare_with_baseline(variant: Variant, baseline: Variant, lengths: dict[int, Variant]) -> Row:
    """Compute the metrics that the registry names COMPUTED or DIFFERENCE."""
    pairs = find_pairs(variant, baseline)
    losses_of_pairs = [Variant(list(pair)).newest("val/loss") for pair in pairs]
    differences = [pair[0] - pair[1] for pair in losses_of_pairs if len(pair) == 2]
    distances = divergence(pairs)
    speedup, per_step, problem = measure_speedups(variant, baseline, lengths)
    if not pairs or computes_same_function(variant.config, baseline.config):
        problem = None
    return {
        "variant": Value(variant.label),
        "status": Value(variant.status),
        "kernel": _join_distinct(run.kernel for run in variant.runs),
        "seeds": Value(len(variant.newest("val/loss"))),
        "pairs": Value(len(differences)),
        "difference": estimate_mean(differences),
        "verdict": Value(judge(variant, baseline, differences, distances)),
        "speedup": speedup,
        "speedup_per_step": per_step,
        "speedup_problem": Value(problem),
        "first_divergence": Value(distances.get(1)),
        "divergence": Value(max(distances.values(), default=None)),
    }


def _join_distinct(values: Iterable[Any]) -> Value:
    """Join the distinct known values: "a, b"."""
    known = dict.fromkeys(str(value) for value in values if value is not None)
    return Value(", ".join(known) or None)


def flatten_row(row: Row) -> dict[str, Any]:
    """The columns of comparison.csv: val_loss, val_loss_low, val_loss_high, ..."""
    columns = {}
    for name, value in row.items():
        column = name.replace("/", "_")
        columns[column] = value.value
        if METRICS[name].compare not in (DISTINCT, COMPUTED):
            columns |= {f"{column}_low": value.low, f"{column}_high": value.high}
    return columns


# The table and its notes


def make_terminal_table(rows: list[Row]) -> Table:
    """Make the table for a terminal. Spreads are below values, and verdicts are below variants."""
    columns = choose_columns(rows)
    table = make_table(*(str(METRICS[name].header) for name in columns), left=2)
    table.leading = 1
    for row in rows:
        variant, *cells = [_multiline(format_cell(row, name)) for name in columns]
        lines = [variant, row["status"].value, _multiline(row["verdict"].value or "")]
        table.add_row("\n".join(filter(None, lines)), *cells)
    return table


def choose_columns(rows: list[Row]) -> list[str]:
    """List the metrics of the table that have a known value and are useful for these rows."""
    columns = [name for name, metric in METRICS.items() if metric.header is not None]
    if len(_distinct(rows, "vocab_size")) <= 1:
        columns.remove("val/bpb")
    return [name for name in columns if any(row[name] != Value() for row in rows)]


def list_notes(rows: list[Row]) -> list[str]:
    """List the sentences that explain the table, and why runs did not finish."""
    notes = [METRICS[name].note for name in choose_columns(rows) if METRICS[name].note]
    if any(row["val/loss"].low is not None for row in rows):
        notes.append("± is the 95 % confidence interval of the mean over seeds (Student's t).")
    for verdict in _distinct(rows, "verdict"):
        notes += [
            f"{verdict}: {meaning}"
            for start, meaning in VERDICT_NOTES.items()
            if verdict.startswith(start)
        ]
    notes += _distinct(rows, "speedup_problem")
    devices = _distinct(rows, "device_name")
    if len(devices) > 1:
        listed = ", ".join(devices)
        notes.append(f"Times and memory are not comparable: the devices differ ({listed}).")
    if len(_distinct(rows, "vocab_size")) > 1:
        advice = "if the texts are equal, compare bits per byte, not losses per token"
        notes.append(f"The vocabularies differ: {advice}.")
    elif len(_distinct(rows, "data")) > 1:
        notes.append("Losses are not comparable: the texts differ.")
    for row in rows:
        if row["error"].value is not None:
            notes.append(": ".join(row[name].value for name in ("variant", "status", "error")))
    return notes


def _distinct(rows: list[Row], name: str) -> list[Any]:
    """The distinct known values of a metric, in order of appearance."""
    values = dict.fromkeys(row[name].value for row in rows)
    return [value for value in values if value is not None]


def _multiline(cell: str) -> str:
    """Break a cell into lines, with the spread below the value, so that columns are narrow."""
    return re.sub(r" (?=[±(])|[,;] ", "\n", cell).replace(": ", ":\n")


def format_cell(row: Row, name: str) -> str:
    """Format the value of a metric, with its confidence interval or its quartiles."""
    metric = METRICS[name]
    value = row[name]
    if value == Value():
        return UNKNOWN
    if value.value is None and value.high is None:
        return f"> {metric.format(value.low)}"
    if value.value is None:
        return f"< {metric.format(value.high)}"
    text = metric.format(value.value)
    if value.low is None:
        return text
    if metric.compare in (MEAN, DIFFERENCE):
        return f"{text} ± {format_loss((value.high - value.low) / 2)}"
    bounds = f"{metric.format(value.low)}{EN_DASH}{metric.format(value.high)}"
    bounds = re.sub(rf" (\w+)(?={EN_DASH}\S+ \1$)", "", bounds)  # the unit once
    return f"{text} ({bounds})"
