"""attention.png: time and memory over T, one column per phase, with the crossovers of the fastest backends."""

import textwrap
from collections.abc import Iterator
from pathlib import Path

from compare.bench.results import Timing, find_crossovers, group_by_phase

COLORS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito
LINE_STYLES = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)))  # one per dtype
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#666666"
MIB = 2**20
MEMORY_RESOLUTION_BYTES = MIB // 16  # of Linux's counters; the plot omits smaller values


def plot_results(rows: list[Timing], path: Path, title: str) -> None:
    """Plot `rows` into a PNG file, 450 pixels wide per phase and at least 750."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    phases = list(dict.fromkeys(row.phase for row in rows))
    size = max(5.0, 3.0 * len(phases)), 6.4  # inches
    with plt.rc_context({"font.size": 10, "axes.titlesize": 11, "axes.titlelocation": "left"}):
        layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.06)
        figure, axes = plt.subplots(2, len(phases), figsize=size, dpi=150, layout=layout, squeeze=False, sharex=True)
        for column, phase in enumerate(phases):
            lines = list(_split_lines(rows, phase))
            _plot_times(axes[0, column], lines)
            _plot_memory(axes[1, column], lines)
            axes[0, column].set_title("complete training step" if phase == "step" else phase)
            axes[1, column].set_xlabel("T, keys in the cache" if phase == "decode" else "T, tokens in context")
        axes[0, 0].set_ylabel("time, ms")
        axes[1, 0].set_ylabel(f"extra memory, MiB (at least {MEMORY_RESOLUTION_BYTES / MIB:.2g})")
        for panel in axes.flat:
            _format_axes(panel, sorted({row.T for row in rows}))
        figure.suptitle(textwrap.fill(title, int(12 * size[0])), fontsize=10, color=GREY)
        _add_legend(figure, rows)
        figure.savefig(path)
        plt.close(figure)


def _split_lines(rows: list[Timing], phase: str | None = None) -> Iterator[tuple[list[Timing], dict]]:
    """Yield the rows of each backend and dtype, sorted by T, with the style of their line. phase None: all phases.

    The lines of the first backends are thicker, so that covered lines stay visible.
    """
    backends = list(dict.fromkeys(row.backend for row in rows))
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    for index, backend in enumerate(backends):
        thinness = index / max(1, len(backends) - 1)
        for dtype, line_style in zip(dtypes, LINE_STYLES * len(dtypes), strict=False):
            line = [row for row in rows if (row.backend, row.dtype) == (backend, dtype) and phase in (None, row.phase)]
            if line:
                yield (
                    sorted(line, key=lambda row: row.T),
                    {
                        "color": COLORS[index % len(COLORS)],
                        "marker": MARKERS[index % len(MARKERS)],
                        "linestyle": line_style,
                        "linewidth": 2.6 - 1.4 * thinness,
                        "markersize": 6.5 - 3.0 * thinness,
                    },
                )


def _plot_times(axes, lines: list[tuple[list[Timing], dict]]) -> None:
    """Plot medians and quartiles. Crosses at the top mark rows without a time, dotted lines mark crossovers."""
    axes.set_yscale("log")
    for line, style in lines:
        finished = [row for row in line if row.is_finished]
        Ts = [row.T for row in finished]
        axes.plot(Ts, [row.ms_median for row in finished], **style)
        quartiles = [row.ms_q1 for row in finished], [row.ms_q3 for row in finished]
        axes.fill_between(Ts, *quartiles, color=style["color"], alpha=0.15, linewidth=0)
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.12)  # space for the crosses
    groups = group_by_phase([row for line, _ in lines for row in line])
    if not any(row.is_finished for group in groups.values() for row in group):
        axes.set_yticks([])
    y = 0.96
    for line, style in lines:
        unfinished = [row for row in line if not row.is_finished]
        if unfinished:
            _mark_unfinished(axes, unfinished, y, style["color"], len(unfinished) == len(line), len(groups) > 1)
            y -= 0.07
    for crossover in (crossover for group in groups.values() for crossover in find_crossovers(group)):
        axes.plot([crossover.T, crossover.T], [low, crossover.ms], color=GREY, linestyle=":", linewidth=1.2)
        axes.plot(crossover.T, crossover.ms, "o", color=GREY, fillstyle="none", markersize=11)
        label = f"T ≈ {float(f'{crossover.T:.2g}'):,.0f}"
        place = {"xytext": (3, 3), "textcoords": "offset points"}
        axes.annotate(label, (crossover.T, low), fontsize=8, color=GREY, **place)


def _mark_unfinished(axes, rows: list[Timing], y: float, color: str, has_no_time: bool, show_dtype: bool) -> None:
    """Show why `rows` have no time, at height y. has_no_time: the backend has no time at any T."""
    text = " or ".join(dict.fromkeys(row.status for row in rows)) + (f", {rows[0].dtype}" if show_dtype else "")
    style = {"color": color, "va": "center", "fontsize": 8}
    if has_no_time:
        axes.text(0.03, y, f"{rows[0].backend}: {text}", transform=axes.transAxes, **style)
    else:
        Ts, transform = [row.T for row in rows], axes.get_xaxis_transform()
        axes.plot(Ts, [y] * len(Ts), "x", color=color, transform=transform)
        axes.text(min(Ts) * 0.8, y, text, ha="right", transform=transform, **style)


def _plot_memory(axes, lines: list[tuple[list[Timing], dict]]) -> None:
    """Plot the memory of a call. Values below the resolution have no point."""
    axes.set_yscale("log")
    is_empty = True
    for line, style in lines:
        points = [(row.T, row.peak_memory_bytes / MIB) for row in line if _has_memory(row)]
        axes.plot([T for T, _ in points], [mib for _, mib in points], **style)
        is_empty = is_empty and not points
    if is_empty:
        is_known = any(row.peak_memory_bytes is not None for line, _ in lines for row in line)
        text = f"less than {MEMORY_RESOLUTION_BYTES // 1024} KiB" if is_known else "unknown"
        axes.set_yscale("linear")
        axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=GREY, style="italic")
        axes.set_yticks([])


def _has_memory(row: Timing) -> bool:
    return row.peak_memory_bytes is not None and row.peak_memory_bytes >= MEMORY_RESOLUTION_BYTES


def _format_axes(axes, Ts: list[int]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(Ts if len(Ts) <= 6 else Ts[::2])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda T, _: f"{T / 1024:.0f}k" if T % 1024 == 0 else f"{T:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    if len(axes.get_yticks()):
        low, high = axes.get_ylim()
        subdivisions = [(4, (1, 1.5, 2, 3, 4, 6, 8)), (30, (1, 2, 5)), (300, (1, 3))]  # by high / low
        subs = next((subs for max_ratio, subs in subdivisions if high < max_ratio * low), (1,))
        axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=20))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def _add_legend(figure, rows: list[Timing]) -> None:
    """Add a legend: one entry per backend and dtype, with the kernels that ran."""
    from matplotlib.lines import Line2D

    handles, labels = [], []
    show_dtype = len({row.dtype for row in rows}) > 1
    for line, style in _split_lines(rows):
        kernels = list(dict.fromkeys(row.kernel for row in line if row.is_finished))
        arrow = "" if kernels in ([line[0].backend], []) else f" → {', '.join(kernels)}"
        handles.append(Line2D([], [], **style))
        labels.append(f"{line[0].backend}{arrow}" + (f", {line[0].dtype}" if show_dtype else ""))
    n_columns = int(figure.get_figwidth() / (0.8 + 0.08 * max(map(len, labels))))  # estimated inches per entry
    columns = min(max(1, n_columns), 5)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, handlelength=4)
