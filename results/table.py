"""The table of a comparison: its columns, the terminal's table, and the notes that explain it."""

import re
from collections.abc import Callable, Iterable
from typing import Any

from rich.table import Table

from common.console import format_memory, format_number, make_table
from results.read import WARMUP_STEPS
from results.statistics import ROUNDING_STEPS, SettingStats, distinct

KV_CACHE = "KV cache, bytes per token"
UNKNOWN = EN_DASH = "–"  # noqa: RUF001


def format_scientific(number: float) -> str:
    return "0" if number == 0 else f"{number:.1e}"  # exactly 0


def format_loss(loss: float) -> str:
    """Four decimals. Numbers that they would round to 0 are formatted as 1.2e-05."""
    return format_scientific(loss) if abs(loss) < 0.001 else f"{loss:.4f}"


def format_difference(difference: float) -> str:
    return f"+{format_loss(difference)}" if difference > 0 else format_loss(difference)


# Header of each column, the field of SettingStats, and the function that formats it. Columns
# without any known value are hidden.
COLUMNS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "setting": ("setting", str),
    "verdict": ("verdict", str),
    "runs": ("status", str),
    "device": ("device_name", str),
    "dtype": ("dtype", str),
    "kernel": ("kernel", str),
    "val loss": ("val_loss", format_loss),
    "best": ("best_val_loss", format_loss),
    "bits/byte": ("val_bpb", format_loss),
    "difference": ("difference", format_difference),
    "detectable": ("detectable", format_loss),
    "speedup": ("speedup", "{:.2f}".format),
    "speedup per step": ("speedup_per_step", "{:.2f}".format),
    "seeds needed": ("seeds_needed", "{:,}".format),
    "divergence, step 1": ("first_divergence", format_scientific),
    "divergence": ("divergence", format_scientific),
    "step, ms": ("step_ms", format_number),
    "tokens/s": ("tokens_per_second", "{:,.0f}".format),
    "memory": ("peak_memory_bytes", format_memory),
    KV_CACHE: ("kv_cache_bytes_per_token", "{:,.0f}".format),
    "sample tokens/s": ("sample_tokens_per_second", "{:,.0f}".format),
    "attention score variance": ("score_variance", "{:.3g}".format),
    "attention entropy, nats": ("attention_entropy", "{:.3f}".format),
    "attention distance, tokens": ("attention_distance", "{:.1f}".format),
}
# The columns on the terminal, which fit into 80 characters. The first two are text. report.html
# has all columns.
TERMINAL_COLUMNS = (
    "setting",
    "kernel",
    "val loss",
    "bits/byte",
    "difference",
    "speedup",
    "seeds needed",
    "step, ms",
    "memory",
)
COLUMN_NOTES = {
    "val loss": "Losses are in nats per token, from the last evaluation of each finished run.",
    "difference": "Difference: validation loss minus the first setting's loss, for runs with the "
    "same seed.",
    "detectable": "Detectable: true difference that these seeds find with a probability of 80 %.",
    "speedup": "Speedup: time in which the first setting reaches this loss, divided by the time "
    "of this setting (95 % confidence interval).",
    "speedup per step": "Speedup per step: the same if all steps took equally long.",
    "divergence": "Divergence: largest distance between the training losses, at step 1 and at any "
    "step.",
    "step, ms": "Step times are medians (quartiles), without the first "
    f"{WARMUP_STEPS} steps of each run.",
}
SAME_STEPS = (
    f"the first {ROUNDING_STEPS} steps have the losses of the first setting, up to rounding"
)
# Start of a verdict, and what it means.
VERDICT_NOTES = {
    "equal losses": "all losses equal those of the first setting, bit by bit.",
    "same up to rounding": f"{SAME_STEPS}; the validation losses show no difference.",
    "same for": f"{SAME_STEPS}; three or more seeds show whether the validation losses differ.",
    "differs": "the training losses differ by more than rounding error, so this setting does not "
    "compute the same function as the first one.",
    "lower loss": "the 95 % confidence interval of the difference excludes 0.",
    "higher loss": "the 95 % confidence interval of the difference excludes 0.",
    "no difference found": "a difference below the detectable one can exist; more seeds find it.",
    "not tested": "one pair of runs cannot show a difference; train a second seed.",
}


def format_cell(row: SettingStats, header: str) -> str:
    """Format the value of a column, with its confidence interval or its quartiles."""
    field, format_field = COLUMNS[header]
    value = getattr(row, field)
    low = getattr(row, f"{field}_low", None)
    high = getattr(row, f"{field}_high", None)
    if value is None and low is not None:
        return f"> {format_field(low)}"
    if value is None and high is not None:
        return f"< {format_field(high)}"
    if value is None:
        return UNKNOWN
    text = format_field(value)
    ci95 = getattr(row, f"{field}_ci95", None)
    if ci95 is not None:
        text += f" ± {format_loss(ci95)}"
    q1 = getattr(row, f"{field}_q1", None)
    q3 = getattr(row, f"{field}_q3", None)
    if q1 is not None:
        spread = f"{format_field(q1)}{EN_DASH}{format_field(q3)}"
        spread = re.sub(rf" (\w+)(?={EN_DASH}\S+ \1$)", "", spread)  # the unit once
        text += f" ({spread})"
    if low is not None:
        text += f" ({format_field(low)}{EN_DASH}{format_field(high)})"
    return text


def make_terminal_table(rows: list[SettingStats]) -> Table:
    """Make the table for a terminal. Spreads are below values, and verdicts are below settings."""
    headers = choose_headers(rows, TERMINAL_COLUMNS)
    table = make_table(*headers, left=2 if "kernel" in headers else 1)
    table.leading = 1
    for row in rows:
        setting, *cells = [multiline(format_cell(row, header)) for header in headers]
        lines = [setting, row.status, multiline(row.verdict or "")]
        table.add_row("\n".join(filter(None, lines)), *cells)
    return table


def list_notes(rows: list[SettingStats], columns: Iterable[str] = COLUMNS) -> list[str]:
    """List the sentences that explain a table, and why runs did not finish.

    columns: of the table. The notes on columns that it hides are left out.
    """
    headers = choose_headers(rows, columns)
    notes = [note for header, note in COLUMN_NOTES.items() if header in headers]
    if any(row.val_loss_ci95 is not None for row in rows):
        notes.append("± is the 95 % confidence interval of the mean over seeds (Student's t).")
    for verdict in distinct(row.verdict for row in rows):
        for start, meaning in VERDICT_NOTES.items():
            if verdict.startswith(start):
                notes.append(f"{verdict}: {meaning}")
    notes += distinct(row.speedup_problem or None for row in rows)
    notes += _list_equal_kernels(rows)
    devices = distinct(row.device_name for row in rows)
    if len(devices) > 1:
        listed = ", ".join(devices)
        notes.append(f"Times and memory are not comparable: the devices differ ({listed}).")
    if _has_several_vocabularies(rows):
        advice = "if the texts are equal, compare bits per byte, not losses per token"
        notes.append(f"The vocabularies differ: {advice}.")
    elif len(distinct(row.data for row in rows)) > 1:
        notes.append("Losses are not comparable: the texts differ.")
    return notes + [f"{row.setting}: {row.status}: {row.reason}" for row in rows if row.reason]


def _list_equal_kernels(rows: list[SettingStats]) -> list[str]:
    """List the settings that differ in the requested backend only, but ran the same kernel."""
    settings: dict[tuple, list[str]] = {}
    for row in rows:
        others = re.sub(r"attention=[\w:]+", "", row.setting)
        if row.kernel is not None and others != row.setting:
            settings.setdefault((row.kernel, others), []).append(row.setting)
    return [
        f"{' and '.join(names)} ran the same kernel, {kernel}: they differ by noise only."
        for (kernel, _), names in settings.items()
        if len(names) > 1
    ]


def choose_headers(rows: list[SettingStats], columns: Iterable[str] = COLUMNS) -> list[str]:
    """List the columns that have a known value and are useful for these rows."""
    headers = []
    for header in columns:
        is_useful = any(format_cell(row, header) != UNKNOWN for row in rows)
        if header == "bits/byte":
            is_useful = is_useful and _has_several_vocabularies(rows)
        if header == KV_CACHE:
            is_useful = len(distinct(row.kv_cache_bytes_per_token for row in rows)) > 1
        if is_useful:
            headers.append(header)
    return headers


def multiline(cell: str) -> str:
    """Break a cell into lines, with the spread below the value, so that columns are narrow."""
    return re.sub(r" (?=[±(])|[,;] ", "\n", cell).replace(": ", ":\n")


def _has_several_vocabularies(rows: list[SettingStats]) -> bool:
    return len(distinct(row.vocab_size for row in rows)) > 1
