"""Tables of a comparison: on the terminal, in report.html and in comparison.csv."""

import csv
import io
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from pathlib import Path

from rich.table import Table

from common.console import format_memory, format_number, make_table
from common.files import atomic_write
from comparison import MAX_SPREAD
from comparison.runs.statistics import WARMUP_STEPS, SettingStats

UNKNOWN = EN_DASH = "–"  # noqa: RUF001
# Header of each column, and the function that formats its cells. Columns without any known value are hidden.
COLUMNS: dict[str, Callable[[SettingStats], str]] = {
    "setting": lambda row: row.setting,
    "verdict": lambda row: row.verdict or UNKNOWN,
    "runs": lambda row: row.status,
    "device": lambda row: (
        ", ".join(filter(None, (row.device_name, row.device, row.dtype))) or UNKNOWN
    ),
    "kernel": lambda row: row.kernel or UNKNOWN,
    "val loss": lambda row: _format_with_ci(row.val_loss, row.val_loss_ci95, ".4f"),
    "best": lambda row: _format(row.best_val_loss, ".4f"),
    "bits/byte": lambda row: _format(row.val_bpb, ".4f"),
    "difference": lambda row: _format_with_ci(row.difference, row.difference_ci95, "+.4f"),
    "detectable": lambda row: _format(row.detectable, ".4f"),
    "seeds needed": lambda row: _format(row.seeds_needed, ",d"),
    "divergence, step 1": lambda row: _format(row.first_divergence, ".1e"),
    "divergence": lambda row: _format(row.divergence, ".1e"),
    "step, ms": lambda row: _format_step_ms(row),
    "tokens/s": lambda row: _format(row.tokens_per_second, ",.0f"),
    "memory": lambda row: (
        UNKNOWN if row.peak_memory_bytes is None else format_memory(row.peak_memory_bytes)
    ),
    "attention score variance": lambda row: _format(row.score_variance, ".3g"),
    "attention entropy, nats": lambda row: _format(row.attention_entropy, ".3f"),
    "attention distance, tokens": lambda row: _format(row.attention_distance, ".1f"),
}
# The columns on the terminal, which fit into 80 characters. The first two are text. report.html has all columns.
TERMINAL_COLUMNS = (
    "setting",
    "kernel",
    "val loss",
    "bits/byte",
    "difference",
    "seeds needed",
    "step, ms",
    "memory",
)
COLUMN_NOTES = {
    "val loss": "Losses are in nats per token, from the last evaluation of each finished run.",
    "difference": "Difference: validation loss minus the first setting's loss, for runs with the same seed.",
    "detectable": "Detectable: true difference that these seeds find with a probability of 80 %.",
    "divergence": "Divergence: largest distance between the training losses, at step 1 and at any step.",
    "step, ms": f"Step times are medians (quartiles), without the first {WARMUP_STEPS} steps of each run.",
}


def make_terminal_table(rows: list[SettingStats]) -> Table:
    """Make the table for a terminal. Spreads are below values, and verdicts are below settings."""
    headers = choose_headers(rows, TERMINAL_COLUMNS)
    table = make_table(*headers, left=2 if "kernel" in headers else 1)
    table.leading = 1
    for row in rows:
        setting, *cells = [multiline(COLUMNS[header](row)) for header in headers]
        table.add_row(
            "\n".join(filter(None, [setting, row.status, multiline(row.verdict or "")])), *cells
        )
    return table


def write_csv(rows: list[SettingStats], path: Path) -> None:
    """Write all statistics as plain numbers (bytes, ms, nats per token). Unknown values are empty."""
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, [field.name for field in fields(SettingStats)])
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    atomic_write(path, file.getvalue())


def list_notes(rows: list[SettingStats], columns: Iterable[str] = COLUMNS) -> list[str]:
    """List the sentences that explain the columns of a table, and why runs did not finish."""
    notes = [
        COLUMN_NOTES[header] for header in choose_headers(rows, columns) if header in COLUMN_NOTES
    ]
    if any(row.val_loss_ci95 is not None for row in rows):
        notes.append("± is the 95 % confidence interval of the mean over seeds (Student's t).")
    device_names = list(dict.fromkeys(row.device_name for row in rows if row.device_name))
    if noisy := [row.setting for row in rows if row.has_noisy_steps]:
        reason = (
            f"the upper quartile is more than {MAX_SPREAD} times the lower one ({'; '.join(noisy)})"
        )
        notes.append(
            f"Step times are not reliable: {reason}. Close other programs, and train these runs again."
        )
    if len(device_names) > 1:
        notes.append(
            f"Times and memory are not comparable: the devices differ ({', '.join(device_names)})."
        )
    if _has_several_vocabularies(rows):
        notes.append(
            "The vocabularies differ: if the texts are equal, compare bits per byte, not losses per token."
        )
    elif len({row.data for row in rows if row.data is not None}) > 1:
        notes.append("Losses are not comparable: the texts differ.")
    return notes + [f"{row.setting}: {row.status}: {row.reason}" for row in rows if row.reason]


def choose_headers(rows: list[SettingStats], columns: Iterable[str] = COLUMNS) -> list[str]:
    """List the columns that have a known value and are useful for these rows."""
    known = [header for header in columns if any(COLUMNS[header](row) != UNKNOWN for row in rows)]
    return [header for header in known if header != "bits/byte" or _has_several_vocabularies(rows)]


def multiline(cell: str) -> str:
    """Break a cell into lines, with the spread below the value, so that columns are narrow."""
    return re.sub(r" (?=[±(])|[,;] ", "\n", cell).replace(": ", ":\n")


def _has_several_vocabularies(rows: list[SettingStats]) -> bool:
    return len({row.vocab_size for row in rows if row.vocab_size is not None}) > 1


def _format(value: float | None, spec: str) -> str:
    """Format a number. Numbers that 4 decimals would round to 0 are formatted as 1.2e-05."""
    if value is None:
        return UNKNOWN
    if value == 0:  # exactly
        return "0"
    if spec.endswith("4f") and abs(value) < 0.001:
        spec = spec.replace("4f", "1e")
    return f"{value:{spec}}"


def _format_with_ci(value: float | None, ci95: float | None, spec: str) -> str:
    return _format(value, spec) + ("" if ci95 is None else f" ± {_format(ci95, '.4f')}")


def _format_step_ms(row: SettingStats) -> str:
    if row.step_ms is None:
        return UNKNOWN
    return f"{format_number(row.step_ms)} ({format_number(row.step_ms_q1)}{EN_DASH}{format_number(row.step_ms_q3)})"
