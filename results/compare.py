"""Compares finished runs: the rows, a sentence for each, the terminal's table, and the files.

read.py joins runs to variants. The first variant is the baseline. A row is a dict from the names of
the metrics that the registry compares to their Value.
"""

import math
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.table import Table

from common.console import PlainConsole, make_table, pluralize, print_text
from common.errors import UserError
from common.files import read_json, write_csv, write_json
from results.metrics import (
    COMPUTED,
    DIFFERENCE,
    DISTINCT,
    MEAN,
    MEDIAN,
    METRICS,
    STEP_MEDIAN,
    Value,
    format_difference,
    format_loss,
)
from results.plots import plot_comparison
from results.read import WHAT_TO_SET, Variant, read_variants
from results.statistics import (
    ERROR_RATE,
    compare_losses,
    divergence,
    estimate_difference,
    estimate_mean,
    estimate_median,
    find_pairs,
    judge,
)

Row = dict[str, Value]

FILES = ("comparison.png", "comparison.csv")
UNFINISHED = "not finished; the same command continues it"  # a sweep without a comparison
EN_DASH = "–"  # noqa: RUF001
MAX_SPREAD = 1.5  # upper / lower quartile of step times; a larger ratio means a busy machine


def compare(folders: list[Path], out: Path, negligible: float | None) -> list[Row]:
    """Compare runs, and write FILES.

    comparison.json has the folders of the runs, relative to `out`, and the sentences, for
    results/wandb.py.
    out: folder for the files, which is created if needed.
    negligible: a relative difference of losses that counts as none. None: as in the first run.
    Returns the rows. Raises UserError for a folder that is not a run and for a damaged file.
    """
    variants = read_variants(folders)
    if negligible is None:
        negligible = variants[0].runs[0].negligible
    rows = compare_variants(variants, negligible)
    out.mkdir(parents=True, exist_ok=True)
    write_csv([flatten_row(row) for row in rows], out / "comparison.csv")
    plot_comparison(variants, rows, negligible, out / "comparison.png")
    runs = [os.path.relpath(run.folder, out) for variant in variants for run in variant.runs]
    write_json(out / "comparison.json", {"runs": runs, "sentences": describe_rows(rows)})
    return rows


def print_comparison(rows: list[Row], out: Path) -> None:
    """Print a sentence for each row, the table, its notes, and the names of the files."""
    console = PlainConsole()
    console.print(*describe_rows(rows), sep="\n", soft_wrap=True)
    console.print(make_terminal_table(rows))
    for note in list_notes(rows):
        console.print(note, soft_wrap=True)  # a command in a note can be copied
    console.print("comparison.csv has more columns.")
    console.print_text(f"\nwritten  {'  '.join(str(out / name) for name in FILES)}")


def print_history(sweeps: Path) -> None:
    """Print the sentences of all sweeps in a folder, the oldest sweep first."""
    files = sorted(sweeps.glob("*/sweep.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise UserError(f"there is no run to compare, and no sweep in {sweeps}; {WHAT_TO_SET}")
    for file in files:
        print_text(file.parent.name)
        comparison = read_json(file.with_name("comparison.json"))
        for sentence in comparison.get("sentences", [UNFINISHED]):
            print_text(f"  {sentence}")
    print_text(f"\nWith normal noise, at most 1 sweep in {1 / ERROR_RATE:.0f} has a wrong verdict.")


# The rows


def compare_variants(variants: list[Variant], negligible: float) -> list[Row]:
    """Make a row for each variant: a Value for each metric that the registry compares."""
    num_comparisons = sum(bool(find_pairs(variant, variants[0])) for variant in variants)
    rows = []
    for variant in variants:
        row = {name: _summarize(variant, name) for name in METRICS if METRICS[name].compare}
        row |= _compare_with_baseline(variant, variants[0], num_comparisons, negligible)
        rows.append(row)
    return rows


def _summarize(variant: Variant, name: str) -> Value:
    """Summarize a metric over the runs of a variant."""
    how = METRICS[name].compare
    if how == MEAN:
        return estimate_mean(variant.newest(name))
    if how == MEDIAN:
        return estimate_median(variant.newest(name))
    if how == STEP_MEDIAN:
        return estimate_median(variant.timed(name))
    return _join_distinct(run.summary.get(name) for run in variant.runs)


def _compare_with_baseline(
    variant: Variant, baseline: Variant, num_comparisons: int, negligible: float
) -> Row:
    """Compute the metrics that the registry names COMPUTED or DIFFERENCE."""
    pairs = find_pairs(variant, baseline)
    differences = compare_losses(pairs)
    difference = estimate_difference(differences, num_comparisons)
    distances = divergence(pairs)
    verdict = judge(variant, baseline, difference, distances, negligible)
    return {
        "variant": Value(variant.label),
        "status": Value(variant.status),
        "kernel": _join_distinct(run.kernel for run in variant.runs),
        "seeds": Value(len(variant.newest("val/loss"))),
        "pairs": Value(len(differences)),
        "difference": difference,
        "verdict": Value(verdict),
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


# The sentences


def describe_rows(rows: list[Row]) -> list[str]:
    """A sentence for each row, the lowest loss first. Rows with equal losses are sorted by time."""
    return [describe_row(row, rows[0]) for row in sorted(rows, key=_rank)]


def _rank(row: Row) -> tuple:
    verdict = row["verdict"].value or ""
    difference = 0.0 if verdict.startswith("equal") else row["difference"].value
    is_unknown = not row["seeds"].value
    return is_unknown, difference or 0.0, row["step_ms"].value or math.inf


def describe_row(row: Row, baseline: Row) -> str:
    """One sentence: the label of a variant, and its verdict or why it has none."""
    if row is baseline and row["seeds"].value:
        text = (
            f"baseline, loss {format_cell(row, 'val/loss')}, "
            f"{pluralize(row['seeds'].value, 'seed')}"
        )
    elif row["verdict"].value is not None:
        text = describe_verdict(row, baseline)
    elif row["seeds"].value:
        text = "not compared, because the baseline has no finished run with its seed and text"
    else:
        text = row["status"].value
    return f"{row['variant'].value}: {text}"


def describe_verdict(row: Row, baseline: Row) -> str:
    """The verdict, its interval, the number of pairs, and the ratio of step times."""
    text = row["verdict"].value
    difference = row["difference"]
    if text.startswith("failed"):
        return text
    if text in ("better", "worse"):
        text += f" by {100 * abs(difference.value):.2f} %"
    if difference.low is not None:
        text += f" (loss {format_bounds(difference)})"
    elif text == "undecided":
        text += f" (loss {format_difference(difference.value)} so far)"
    text += f", {pluralize(row['pairs'].value, 'seed')}"
    times = row["step_ms"]
    baseline_times = baseline["step_ms"]
    if times.low and baseline_times.low and row["device_name"] == baseline["device_name"]:
        text += f"; steps {baseline_times.value / times.value:.2f} times as fast"
        if times.low <= baseline_times.high and baseline_times.low <= times.high:
            text += ", which may be noise"
    return text


def format_bounds(difference: Value) -> str:
    """The interval of a difference: -0.10 to +0.31 %."""
    low = format_difference(difference.low).removesuffix(" %")
    return f"{low} to {format_difference(difference.high)}"


# The table and its notes


def make_terminal_table(rows: list[Row]) -> Table:
    """Make the table for a terminal. Spreads are below values, and the status below variants."""
    columns = choose_columns(rows)
    table = make_table(*(str(METRICS[name].header) for name in columns), left=2)
    table.leading = 1
    for row in rows:
        variant, *cells = [_multiline(format_cell(row, name)) for name in columns]
        table.add_row(f"{variant}\n{row['status'].value}", *cells)
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
    if "undecided" in _distinct(rows, "verdict"):
        notes.append(
            "Undecided settings need more seeds (seed=auto, or a higher sweep.max_seeds), or a "
            "larger sweep.difference."
        )
    step_times = [
        row["step_ms"]
        for row in rows
        # a student's steps take longer than those of its teachers
        if row["step_ms"].low is not None and not row["n_teachers"].value
    ]
    if any(times.high > MAX_SPREAD * times.low for times in step_times):
        notes.append(
            "Step times vary widely, because the machine is busy. Their ratios are uncertain, and "
            "losses at equal time (train.minutes), too."
        )
    devices = _distinct(rows, "device_name")
    if len(devices) > 1:
        notes.append(
            f"Times and memory are not comparable: the devices differ ({', '.join(devices)})."
        )
    if len(_distinct(rows, "text_hash")) > 1:
        notes.append("Losses are not comparable: the texts differ.")
    elif len(_distinct(rows, "vocab_size")) > 1 or len(_distinct(rows, "data")) > 1:
        notes.append(
            "The vocabularies differ: compare bits per byte, not losses per token, and set "
            "eval.windows=null, because some windows are other parts of the text."
        )
    return notes + [
        f"{row['variant'].value}: {row['status'].value}: {row['error'].value}"
        for row in rows
        if row["error"].value is not None
    ]


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
        return EN_DASH
    text = metric.format(value.value)
    if value.low is None:
        return text
    if metric.compare == DIFFERENCE:
        return f"{text} ({format_bounds(value)})"
    if metric.compare == MEAN:
        return f"{text} ± {format_loss((value.high - value.low) / 2)}"
    bounds = f"{metric.format(value.low)}{EN_DASH}{metric.format(value.high)}"
    bounds = re.sub(rf" (\w+)(?={EN_DASH}\S+ \1$)", "", bounds)  # the unit once
    return f"{text} ({bounds})"
