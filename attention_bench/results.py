"""The results of a bench: the fastest backends, the table in the terminal, and attention.png."""

from pathlib import Path

import numpy as np

from common.console import PlainConsole, format_number, make_table
from common.plots import (
    GREY,
    label_log_axis,
    line_style,
    make_figure,
    save_figure,
    style_axes,
)
from model.attention import NON_SOFTMAX

PLOTTED_COLUMNS = ("ms_median", "ms_q1", "ms_q3", "peak_memory_bytes")
MIN_PLOTTED_BYTES = 2**16  # smaller values of Linux's counters are noise; drawn as this value
LEGEND = (
    "kernel: the one that ran. ms: median time of a call (quartiles), without compilation.",
    "MiB: memory of a call, besides its inputs.",
    "error: largest absolute difference of y from naive in float64; of gradients: dq, dk and dv.",
)


def describe_case(row: dict) -> str:
    """The phase, mask, dtype and T of a row."""
    return f"{row['phase']}, {row['mask']}, {row['dtype']}, T = {row['T']:,}"


def group_rows(rows: list[dict], *columns: str) -> dict[tuple, list[dict]]:
    """Group rows by the values of some columns, in order of appearance."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        key = tuple(row[column] for column in columns)
        groups.setdefault(key, []).append(row)
    return groups


def find_fastest(rows: list[dict]) -> list[dict]:
    """The rows with the smallest median of each phase, mask, dtype and T.

    Linear attention is left out, because it changes the results.
    """
    ranked = [row for row in rows if row["ms_median"] and row["backend"] not in NON_SOFTMAX]
    cases = group_rows(ranked, "phase", "mask", "dtype", "T")
    return [min(case, key=lambda row: row["ms_median"]) for case in cases.values()]


def print_results(rows: list[dict]) -> None:
    """Print a table per phase, mask and dtype, a legend, and why rows are not finished."""
    console = PlainConsole()
    fastest = find_fastest(rows)
    for titles, group in group_rows(rows, "phase", "mask", "dtype").items():
        table = make_table(
            "T", "backend", "kernel", "", "ms (quartiles)", "MiB", "error", "of gradients", left=4
        )
        for row in group:
            table.add_row(
                f"{row['T']:,}",
                row["backend"],
                row["resolved"],
                "fastest" if row in fastest else "",
                format_ms(row),
                format_optional(row["peak_memory_bytes"], ",.1f", unit=2**20),
                format_optional(row["error_y"], ".1e"),
                format_optional(row["error_gradients"], ".1e"),
            )
        console.print(", ".join(titles), style="bold")
        console.print(table)
    reasons = [
        f"{row['backend']}: {row['status']}: {row['reason']}" for row in rows if row["reason"]
    ]
    for line in [*LEGEND, *dict.fromkeys(reasons)]:
        console.print_text(line)


def format_ms(row: dict) -> str:
    """Milliseconds: "12.3 (11.9-13.0)". A row that is not finished has its status."""
    if row["status"] != "finished":
        return row["status"]
    q1 = format_number(row["ms_q1"])
    return f"{format_number(row['ms_median'])} ({q1}-{format_number(row['ms_q3'])})"


def format_optional(value: float | None, spec: str, unit: int = 1) -> str:
    return "" if value is None else f"{value / unit:{spec}}"


def plot_results(rows: list[dict], environment: dict, path: Path) -> None:
    """Plot time and memory over T into a PNG file, with a column per phase and mask.

    The band is between the quartiles. environment: of describe_environment.
    """
    columns = group_rows(rows, "phase", "mask")
    lines = list(group_rows(rows, "backend", "dtype"))
    figure = make_figure(max(5.0, 3.0 * len(columns)), 6.4)
    panels = figure.subplots(
        2,
        len(columns),
        squeeze=False,
        sharex=True,
        subplot_kw={"xscale": "log", "yscale": "log"},
    )
    for (top, bottom), ((phase, mask), panel_rows) in zip(panels.T, columns.items(), strict=True):
        style_axes(top, f"{phase}, {mask}")
        style_axes(bottom, "")
        bottom.set_xlabel("T, tokens")
        for (backend, dtype), line in group_rows(panel_rows, "backend", "dtype").items():
            style = line_style(lines.index((backend, dtype)), len(lines), max_width=2.6)
            # the kernels that ran, or why there are none: "sdpa → flash, float32"
            kernels = dict.fromkeys(row["resolved"] or row["status"] for row in line)
            label = f"{backend} → {', '.join(kernels)}, {dtype}"
            T = [row["T"] for row in line]
            # a value that is None becomes nan, which is not drawn
            values = np.array([[row[column] for column in PLOTTED_COLUMNS] for row in line], float)
            median, q1, q3, memory = values.T
            top.plot(T, median, marker="o", label=label, **style)
            top.fill_between(T, q1, q3, color=style["color"], alpha=0.15, linewidth=0)
            bottom.plot(T, memory.clip(MIN_PLOTTED_BYTES) / 2**20, marker="o", **style)
    for axes in panels.flat:
        label_log_axis(axes.yaxis)
        axes.minorticks_off()
    Ts = sorted({row["T"] for row in rows})
    panels[0, 0].set_xticks(Ts, [f"{T:,}" for T in Ts])
    panels[0, 0].set_ylabel("time, ms")
    panels[1, 0].set_ylabel("memory besides the inputs, MiB")
    figure.legend(
        *panels[0, 0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=len(columns),
        frameon=False,
    )
    case = rows[0]  # all rows have these shapes
    figure.suptitle(
        f"H = {case['H']}, G = {case['G']}, D = {case['D']}, Dv = {case['Dv']}\n"
        f"{environment['device_name']}, torch {environment['versions']['torch']}, "
        f"{environment['threads']} threads",
        fontsize=10,
        color=GREY,
    )
    save_figure(figure, path)
