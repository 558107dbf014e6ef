"""Plots attention.png: time and memory over T, with one column per phase."""

import textwrap
from pathlib import Path

from common.plots import DASHES, GREY, line_style, make_figure, style_axes
from comparison.bench.results import Timing, group_rows

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MEMORY_RESOLUTION_BYTES = 2**16  # of Linux's counters. The plot omits smaller values.


def plot_results(rows: list[Timing], path: Path, title: str) -> None:
    """Plot rows into a PNG file. It is 450 pixels wide per phase, and at least 750."""
    phases = group_rows(rows, "title")
    width, Ts, styles = (
        max(5.0, 3.0 * len(phases)),
        sorted({row.T for row in rows}),
        _line_styles(rows),
    )
    figure = make_figure(width, 6.4)
    panels = figure.subplots(2, len(phases), squeeze=False, sharex=True)
    for (top, bottom), ((phase,), phase_rows) in zip(panels.T, phases.items(), strict=True):
        style_axes(top, "complete training step" if phase == "step" else phase)
        style_axes(bottom, "")
        for key, line in group_rows(phase_rows, "backend", "dtype").items():
            line = [row for row in line if row.is_finished]
            quartiles = [row.ms_q1 for row in line], [row.ms_q3 for row in line]
            top.plot([row.T for row in line], [row.ms_median for row in line], **styles[key])
            top.fill_between(
                [row.T for row in line],
                *quartiles,
                color=styles[key]["color"],
                alpha=0.15,
                linewidth=0,
            )
            line = [row for row in line if (row.peak_memory_bytes or 0) >= MEMORY_RESOLUTION_BYTES]
            bottom.plot(
                [row.T for row in line],
                [row.peak_memory_bytes / 2**20 for row in line],
                **styles[key],
            )
        for axes in (top, bottom):
            _set_scales(axes, Ts)
        bottom.set_xlabel(
            "T, keys in the cache" if phase.startswith("decode") else "T, tokens in context"
        )
    panels[0, 0].set_ylabel("time, ms")
    panels[1, 0].set_ylabel(f"extra memory, MiB (at least {MEMORY_RESOLUTION_BYTES / 2**20:.2g})")
    figure.suptitle(textwrap.fill(title, int(12 * width)), fontsize=10, color=GREY)
    lines = {line.get_label(): line for axes in panels[0] for line in axes.lines}
    columns = max(1, int(width / (1.0 + 0.08 * max(map(len, lines)))))  # estimated inches per entry
    figure.legend(
        lines.values(),
        lines,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        handlelength=4,
    )
    figure.savefig(path)


def _line_styles(rows: list[Timing]) -> dict[tuple[str, str], dict]:
    """Choose style and label of each line, by backend and dtype: a color and marker per backend, dashes per dtype.

    The label has the kernels that ran, and why rows are missing: "sdpa → flash", "naive → naive, out of memory".
    """
    backends = list(dict.fromkeys(row.backend for row in rows))
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    styles = {}
    for (backend, dtype), line in group_rows(rows, "backend", "dtype").items():
        index = backends.index(backend)
        style = line_style(index, len(backends), 2.6) | {
            "linestyle": DASHES[dtypes.index(dtype) % len(DASHES)]
        }
        results = list(
            dict.fromkeys(row.resolved if row.is_finished else row.status for row in line)
        )
        label = backend if results == [backend] else f"{backend} → {', '.join(results)}"
        label += f", {dtype}" if len(dtypes) > 1 else ""
        marker = {"marker": MARKERS[index % len(MARKERS)], "markersize": 2.5 * style["linewidth"]}
        styles[backend, dtype] = style | marker | {"label": label}
    return styles


def _set_scales(axes, Ts: list[int]) -> None:
    """Make both axes logarithmic, with plain numbers as ticks."""
    from matplotlib.ticker import LogLocator

    Ts = Ts if len(Ts) <= 6 else Ts[::2]
    axes.set_xscale("log")
    axes.set_xticks(Ts, [f"{T // 1024}k" if T % 1024 == 0 else f"{T:,}" for T in Ts])
    if any(len(line.get_ydata()) > 0 for line in axes.lines):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:,.10g}")
    else:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", color=GREY)
    axes.minorticks_off()
