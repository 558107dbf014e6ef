"""Plots attention.png: time and memory over T, with one column per phase."""

import textwrap
from pathlib import Path

from attention_bench.results import Timing, group_rows
from common.plots import (
    DASHES,
    GREY,
    label_log_axis,
    line_style,
    make_figure,
    save_figure,
    style_axes,
)

MEMORY_RESOLUTION_BYTES = 2**16  # of Linux's counters; the plot omits smaller values


def plot_results(rows: list[Timing], path: Path, title: str) -> None:
    """Plot rows into a PNG file. It is 450 pixels wide per phase, and at least 750."""
    phases = group_rows(rows, "title")
    width = max(5.0, 3.0 * len(phases))
    Ts = sorted({row.T for row in rows})
    styles = _line_styles(rows)
    figure = make_figure(width, 6.4)
    panels = figure.subplots(2, len(phases), squeeze=False, sharex=True)
    for (top, bottom), ((phase,), phase_rows) in zip(panels.T, phases.items(), strict=True):
        style_axes(top, phase)
        style_axes(bottom, "")
        bottom.set_xlabel("T, tokens")
        for key, line in group_rows(phase_rows, "backend", "dtype").items():
            _plot_line(top, bottom, line, styles[key])
        _set_scales(top, Ts)
        _set_scales(bottom, Ts)
    panels[0, 0].set_ylabel("time, ms")
    panels[1, 0].set_ylabel("extra memory, MiB")
    figure.suptitle(textwrap.fill(title, int(12 * width)), fontsize=10, color=GREY)
    lines = {line.get_label(): line for axes in panels[0] for line in axes.lines}
    longest = max(len(label) for label in lines)
    columns = max(1, int(width / (1.0 + 0.08 * longest)))  # estimated inches per entry
    place = {"loc": "outside lower center", "ncols": columns}
    figure.legend(lines.values(), lines, **place, frameon=False, handlelength=4)
    save_figure(figure, path)


def _plot_line(top, bottom, rows: list[Timing], style: dict) -> None:
    """Plot the times of a backend with a band between the quartiles, and its memory below."""
    rows = [row for row in rows if row.is_finished]
    Ts = [row.T for row in rows]
    q1 = [row.ms_q1 for row in rows]
    q3 = [row.ms_q3 for row in rows]
    top.plot(Ts, [row.ms_median for row in rows], **style)
    top.fill_between(Ts, q1, q3, color=style["color"], alpha=0.15, linewidth=0)
    rows = [row for row in rows if (row.peak_memory_bytes or 0) >= MEMORY_RESOLUTION_BYTES]
    MiB = [row.peak_memory_bytes / 2**20 for row in rows]
    bottom.plot([row.T for row in rows], MiB, **style)


def _line_styles(rows: list[Timing]) -> dict[tuple[str, str], dict]:
    """Choose style and label of each line, by backend and dtype.

    A backend has a color, and a dtype has dashes. The label has the kernels that ran,
    and why rows are missing: "sdpa → flash", "naive → naive, out of memory".
    """
    backends = list(dict.fromkeys(row.backend for row in rows))
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    styles = {}
    for (backend, dtype), line in group_rows(rows, "backend", "dtype").items():
        index = backends.index(backend)
        results = [row.resolved if row.is_finished else row.status for row in line]
        label = f"{backend} → {', '.join(dict.fromkeys(results))}"
        if len(dtypes) > 1:
            label += f", {dtype}"
        styles[backend, dtype] = {
            **line_style(index, len(backends), max_width=2.6),
            "linestyle": DASHES[dtypes.index(dtype) % len(DASHES)],
            "label": label,
            "marker": "o",
        }
    return styles


def _set_scales(axes, Ts: list[int]) -> None:
    """Make both axes logarithmic, with plain numbers as ticks."""
    axes.set_xscale("log")
    axes.set_xticks(Ts, [f"{T:,}" for T in Ts])
    if any(len(line.get_ydata()) > 0 for line in axes.lines):
        axes.set_yscale("log")
        label_log_axis(axes.yaxis)
    else:
        axes.set_yticks([])  # no backend has a value
    axes.minorticks_off()
