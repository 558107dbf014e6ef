"""The rows of a comparison for people: a table on a terminal, comparison.md, comparison.csv."""

import csv
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path

from compare.runs.statistics import EARLY, WARM_UP, Row

UNKNOWN = "–"  # noqa: RUF001 (a dash, as print has it, not a minus)
# Header -> a row's cell. A column in which nothing is known is left out.
COLUMNS: dict[str, Callable[[Row], str]] = {
    "setting": lambda row: row.setting,
    "runs": lambda row: row.status,
    "device": lambda row: ", ".join(word for word in (row.device, row.dtype) if word) or UNKNOWN,
    "kernel": lambda row: f"{row.kernel or UNKNOWN} ({row.impl})" if row.impl else row.kernel or UNKNOWN,
    "val loss": lambda row: _with_interval(row.val_loss, row.val_loss_ci95, ".4f"),
    "best": lambda row: _number(row.best_val_loss, ".4f"),
    "bits/byte": lambda row: _number(row.val_bpb, ".4f"),
    "difference": lambda row: _with_interval(row.difference, row.difference_ci95, "+.4f"),
    "divergence": lambda row: UNKNOWN if row.divergence is None
    else f"{_number(row.divergence_200, '.1e')} / {_number(row.divergence, '.1e')}",
    "step, ms": lambda row: UNKNOWN if row.step_ms is None else milliseconds(row.step_ms)
    + f" ({milliseconds(row.step_ms_q1)}{UNKNOWN}{milliseconds(row.step_ms_q3)})",
    "tokens/s": lambda row: _number(row.tokens_per_second, ",.0f"),
    "memory": lambda row: UNKNOWN if row.peak_memory_bytes is None else memory(row.peak_memory_bytes),
    "compile": lambda row: UNKNOWN if row.compile_s is None else f"{row.compile_s:.1f} s",
}  # fmt: skip
DISPENSABLE = ("tokens/s", "memory", "kernel", "divergence")  # where there is no room for all
TEXT = ("setting", "runs", "device", "kernel")  # columns of words, which stand to the left


def terminal_table(rows: list[Row], console):
    """A rich.table.Table of the essential figures, of as many of them as the console is wide enough for."""
    from rich.measure import Measurement

    headers = [header for header in _headers(rows) if header != "best"]  # the widest labels need its room
    table = _table(rows, headers)
    all_finished = all(row.finished == row.runs for row in rows)
    for header in (("runs",) if all_finished else ()) + DISPENSABLE:
        if Measurement.get(console, console.options.update(max_width=1000), table).maximum <= console.width:
            break
        headers = [each for each in headers if each != header]
        table = _table(rows, headers)
        table.caption, table.caption_justify = "a wider terminal, and comparison.md, show more columns", "left"
    return table


def _table(rows: list[Row], headers: list[str]):
    from rich import box
    from rich.table import Table
    from rich.text import Text

    cells = [[_broken(COLUMNS[header](row)) for header in headers] for row in rows]
    apart = int(any(line[0].count("\n") > 1 for line in cells))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True, leading=apart)
    for header in headers:
        left = header in TEXT
        table.add_column(header, justify="left" if left else "right", no_wrap=not left, overflow="fold")
    for line in cells:
        table.add_row(*map(Text, line))
    return table


def write_csv(rows: list[Row], path: Path) -> None:
    """Every figure in plain numbers (bytes, ms, nats per token); an unknown one is empty."""
    with open(path, "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, [field.name for field in fields(Row)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)


def write_markdown(rows: list[Row], path: Path, picture: str) -> None:
    """The table of the essential figures, what it means, and the picture that lies beside it."""
    headers = _headers(rows)
    lines = [headers, ["---" if header in TEXT else "---:" for header in headers]]
    lines += [[_cell(COLUMNS[header](row)) for header in headers] for row in rows]
    text = ["# Comparison", "", *(f"| {' | '.join(line)} |" for line in lines), ""]
    text += [*(f"- {_cell(note)}" for note in notes(rows)), "", f"![comparison]({picture})", ""]
    path.write_text("\n".join(text), encoding="utf-8")


def notes(rows: list[Row]) -> list[str]:
    """What a reader has to know beside the table, a sentence each."""
    first = rows[0]
    said = [
        "Losses in nats per token, of the last evaluation; figures are over finished runs, ± is the 95 % interval of "
        f"the mean over seeds (Student t); step times: median (quartiles), without each run's first {WARM_UP} steps."
    ]
    if len(rows) > 1 and first.finished:
        said.append(
            f"Held against {first.setting}, seed by seed: the difference of the validation loss, and the divergence, "
            f"which is the largest distance of training losses at a step (first {EARLY} steps / all)."
        )
    elif len(rows) > 1:
        said.append(f"{first.setting} has no finished run, so that there is nothing to hold the others against.")
    where = dict.fromkeys(row.device_name for row in rows if row.device_name)
    if len(_where(rows)) == 1:
        said.append(f"Everything ran on {', '.join([*where, *_where(rows)])}.")
    if len(where) > 1:
        said.append(f"Times and memory do not compare, the runs had different devices: {', '.join(where)}.")
    if _vocabularies_differ(rows):
        said.append("Losses per token do not compare, the vocabularies differ; bits per byte do, on the same text.")
    said += [f"{row.setting}: {row.status}: {row.reason}" for row in rows if row.reason]
    return said


def memory(size: int) -> str:
    return f"{size / 2**20:.0f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"


def milliseconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _headers(rows: list[Row]) -> list[str]:
    """The columns worth showing: those in which something is known, and tells something."""
    hidden = {header for header, cell in COLUMNS.items() if all(cell(row) == UNKNOWN for row in rows)}
    if len(_where(rows)) == 1:
        hidden.add("device")
    if not _vocabularies_differ(rows):
        hidden.add("bits/byte")
    return [header for header in COLUMNS if header not in hidden]


def _where(rows: list[Row]) -> list[str]:
    return list(dict.fromkeys(cell for row in rows if (cell := COLUMNS["device"](row)) != UNKNOWN))


def _vocabularies_differ(rows: list[Row]) -> bool:
    return len({row.vocab_size for row in rows if row.vocab_size is not None}) > 1


def _number(value: float | None, form: str) -> str:
    """A number; one that would be rounded to nothing is said in powers of ten."""
    if value is None:
        return UNKNOWN
    if value == 0:  # exactly
        return "0"
    if form.endswith("4f") and 0 < abs(value) < 0.001:
        form = form.replace("4f", "1e")
    return f"{value:{form}}"


def _with_interval(value: float | None, half_width: float | None, form: str) -> str:
    interval = "" if half_width is None else f" ± {_number(half_width, '.4f')}"
    return _number(value, form) + interval


def _broken(cell: str) -> str:
    """A cell in several lines, which makes a narrow column: the figure, and its spread below it."""
    for mark, instead in ((" ± ", "\n± "), (" (", "\n("), (" / ", "\n"), (", ", "\n")):
        cell = cell.replace(mark, instead)
    return cell


def _cell(text: str) -> str:
    """Text that stays within a cell of a Markdown table."""
    return " ".join(text.replace("|", "\\|").split())
