"""attention.png: time and memory over T, one column per phase."""

import textwrap
from pathlib import Path

from common.plots import DASHES, GREY, line_style, make_figure, style_axes
from compare.bench.cases import CACHE_PHASES
from compare.bench.results import Timing, group_rows

MARKERS = ("o", "s", "^", "D", "v", "P", "X")
MIB = 2**20
MEMORY_RESOLUTION_BYTES = MIB // 16  # of Linux's counters; the plot omits smaller values


def plot_results(rows: list[Timing], path: Path, title: str) -> None:
    """Plot `rows` into a PNG file, 450 pixels wide per phase and at least 750."""
    phases = list(dict.fromkeys(row.title for row in rows))
    width = max(5.0, 3.0 * len(phases))
    figure = make_figure(width, 6.4)
    panels = figure.subplots(2, len(phases), squeeze=False, sharex=True)
    styles = _line_styles(rows)
    for (top, bottom), phase in zip(panels.T, phases, strict=True):
        for axes, heading in ((top, "complete training step" if phase == "step" else phase), (bottom, "")):
            style_axes(axes, heading)
            _set_scales(axes, sorted({row.T for row in rows}))
        bottom.set_xlabel("T, keys in the cache" if phase.startswith(CACHE_PHASES) else "T, tokens in context")
        lines = group_rows([row for row in rows if row.title == phase], "backend", "dtype")
        _plot_times(top, lines, styles)
        _plot_memory(bottom, lines, styles)
    panels[0, 0].set_ylabel("time, ms")
    panels[1, 0].set_ylabel(f"extra memory, MiB (at least {MEMORY_RESOLUTION_BYTES / MIB:.2g})")
    figure.suptitle(textwrap.fill(title, int(12 * width)), fontsize=10, color=GREY)
    _add_legend(figure, rows, styles)
    figure.savefig(path)


def _line_styles(rows: list[Timing]) -> dict[tuple[str, str], dict]:
    """The style of each line, by backend and dtype. A backend has a color and a marker, a dtype has a dash pattern."""
    backends = list(dict.fromkeys(row.backend for row in rows))
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    styles = {}
    for backend, dtype in group_rows(rows, "backend", "dtype"):
        index = backends.index(backend)
        style = line_style(index, len(backends), 2.6) | {"linestyle": DASHES[dtypes.index(dtype) % len(DASHES)]}
        marker = {"marker": MARKERS[index % len(MARKERS)], "markersize": 2.5 * style["linewidth"]}
        styles[backend, dtype] = style | marker
    return styles


def _plot_times(axes, lines: dict[tuple[str, str], list[Timing]], styles: dict[tuple[str, str], dict]) -> None:
    """Plot medians and quartiles. A legend has the status of rows without a time."""
    has_several_dtypes = len({dtype for _, dtype in lines}) > 1
    if not any(row.is_finished for line in lines.values() for row in line):
        axes.set_yticks([])
    for key, line in lines.items():
        finished = [row for row in line if row.is_finished]
        Ts = [row.T for row in finished]
        axes.plot(Ts, [row.ms_median for row in finished], **styles[key])
        quartiles = [row.ms_q1 for row in finished], [row.ms_q3 for row in finished]
        axes.fill_between(Ts, *quartiles, color=styles[key]["color"], alpha=0.15, linewidth=0)
        statuses = dict.fromkeys(row.status for row in line if not row.is_finished)
        if statuses:
            name = ", ".join(key) if has_several_dtypes else key[0]
            axes.plot([], [], **styles[key], label=f"{name}: {' or '.join(statuses)}")
            axes.legend(fontsize=8, framealpha=0.8, edgecolor="none", handlelength=3)


def _plot_memory(axes, lines: dict[tuple[str, str], list[Timing]], styles: dict[tuple[str, str], dict]) -> None:
    """Plot the memory of a call. Values below the resolution have no point."""
    for key, line in lines.items():
        sizes = [(row.T, row.peak_memory_bytes or 0) for row in line]
        points = [(T, size / MIB) for T, size in sizes if size >= MEMORY_RESOLUTION_BYTES]
        if points:
            axes.plot(*zip(*points, strict=True), **styles[key])
    if not axes.lines:
        text = f"unknown, or less than {MEMORY_RESOLUTION_BYTES // 1024} KiB"
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=GREY, style="italic")
        axes.set_yticks([])


def _set_scales(axes, Ts: list[int]) -> None:
    """Make both axes logarithmic, with plain numbers as ticks."""
    from matplotlib.ticker import LogLocator

    axes.set(xscale="log", yscale="log")
    Ts = Ts if len(Ts) <= 6 else Ts[::2]
    axes.set_xticks(Ts, [f"{T // 1024}k" if T % 1024 == 0 else f"{T:,}" for T in Ts])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.minorticks_off()


def _add_legend(figure, rows: list[Timing], styles: dict[tuple[str, str], dict]) -> None:
    """Add a legend: one entry per backend and dtype, with the kernels that ran."""
    from matplotlib.lines import Line2D

    labels = []
    show_dtype = len({row.dtype for row in rows}) > 1
    for (backend, dtype), line in group_rows(rows, "backend", "dtype").items():
        kernels = list(dict.fromkeys(row.kernel for row in line if row.is_finished))
        arrow = "" if kernels in ([backend], []) else f" → {', '.join(kernels)}"
        labels.append(f"{backend}{arrow}" + (f", {dtype}" if show_dtype else ""))
    handles = [Line2D([], [], **style) for style in styles.values()]
    columns = max(1, int(figure.get_figwidth() / (1.0 + 0.08 * max(map(len, labels)))))  # estimated inches per entry
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, handlelength=4)
