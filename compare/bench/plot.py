"""attention.png: time and memory over T, a column for each phase, with the places where the fastest kernel changes."""

import textwrap
from pathlib import Path

from compare.bench.results import FINISHED, Timing, crossovers, group_by_phase

COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito's
DASHES = ("-", (0, (4, 1.5)), (0, (1.2, 1.2)))  # of the dtypes
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
GREY = "#666666"
MIB = 2**20
LEAST = MIB // 16  # bytes: Linux counts a process's memory no finer


def draw(rows: list[Timing], path: Path, title: str) -> None:
    """Draw the picture, about 1800 pixels wide. title: where it was measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    phases = list(dict.fromkeys(row.phase for row in rows))
    names = list(dict.fromkeys(row.backend for row in rows))
    with plt.rc_context({"font.size": 10, "axes.titlesize": 11, "axes.titlelocation": "left"}):
        figure, axes = plt.subplots(
            2, len(phases), figsize=(max(5.0, 3.0 * len(phases)), 6.4), dpi=150, layout="constrained", squeeze=False,
            sharex=True,
        )  # fmt: skip
        figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06)
        for column, phase in enumerate(phases):
            mine = [row for row in rows if row.phase == phase]
            _times(axes[0, column], mine, names)
            _memory(axes[1, column], mine, names)
            axes[0, column].set_title("whole training step" if phase == "step" else phase)
            axes[1, column].set_xlabel("T, keys in the cache" if phase == "decode" else "T, tokens in context")
        axes[0, 0].set_ylabel("time, ms")
        axes[1, 0].set_ylabel(f"extra memory, MiB (from {LEAST / MIB:.2g})")
        for each in axes.flat:
            _finish(each, sorted({row.T for row in rows}))
        width = figure.get_figwidth()
        figure.suptitle(textwrap.fill(title, int(12 * width)), fontsize=10, color=GREY)
        handles, labels = _legend(rows, names)
        columns = max(1, int(width / (0.8 + 0.08 * max(map(len, labels)))))  # inches
        figure.legend(handles, labels, loc="outside lower center", ncols=min(columns, 5), frameon=False, handlelength=4)
        figure.savefig(path)
        plt.close(figure)


def _style(rows: list[Timing], names: list[str], row: Timing) -> dict:
    """Lines that lie on one another stay visible: the first backends' are the thickest, and lie below."""
    index, dtypes = names.index(row.backend), list(dict.fromkeys(row.dtype for row in rows))
    thinner = index / max(1, len(names) - 1)
    return {
        "color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)],
        "linestyle": DASHES[dtypes.index(row.dtype) % len(DASHES)],
        "linewidth": 2.6 - 1.4 * thinner, "markersize": 6.5 - 3.0 * thinner,
    }  # fmt: skip


def _lines(rows: list[Timing], names: list[str]):
    """(the rows of one line by T, its style), for each backend and dtype."""
    for name in names:
        for dtype in dict.fromkeys(row.dtype for row in rows):
            line = sorted((row for row in rows if (row.backend, row.dtype) == (name, dtype)), key=lambda row: row.T)
            if line:
                yield line, _style(rows, names, line[0])


def _times(axes, rows: list[Timing], names: list[str]) -> None:
    """Median calls in a band of quartiles; dotted, the crossovers; above, a cross for what came to nothing."""
    axes.set_yscale("log")
    for line, style in _lines(rows, names):
        there = [row for row in line if row.status == FINISHED]
        Ts = [row.T for row in there]
        axes.plot(Ts, [row.ms_median for row in there], **style)
        axes.fill_between(Ts, [row.ms_q1 for row in there], [row.ms_q3 for row in there],
                          color=style["color"], alpha=0.15, linewidth=0)  # fmt: skip
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.12)  # room above
    if not any(row.status == FINISHED for row in rows):
        axes.set_yticks([])
    edge = 0.96
    several = len(group_by_phase(rows)) > 1
    for line, style in _lines(rows, names):
        missing = [row for row in line if row.status != FINISHED]
        if not missing:
            continue
        place = {"color": style["color"], "transform": axes.get_xaxis_transform()}
        words = " or ".join(dict.fromkeys(row.status for row in missing)) + several * f", {line[0].dtype}"
        if len(missing) == len(line):
            axes.text(0.03, edge, f"{line[0].backend}: {words}", va="center", fontsize=8, color=style["color"],
                      transform=axes.transAxes)  # fmt: skip
        else:
            axes.plot([row.T for row in missing], [edge] * len(missing), "x", **place)
            axes.text(min(row.T for row in missing) * 0.8, edge, words, ha="right", va="center", fontsize=8, **place)
        edge -= 0.07
    for mine in group_by_phase(rows).values():
        for each in crossovers(mine):
            axes.plot([each.T, each.T], [low, each.ms], color=GREY, linestyle=":", linewidth=1.2)
            axes.plot(each.T, each.ms, "o", color=GREY, fillstyle="none", markersize=11)
            axes.annotate(f"T ≈ {float(f'{each.T:.2g}'):,.0f}", (each.T, low), xytext=(3, 3), fontsize=8,
                          textcoords="offset points", color=GREY)  # fmt: skip


def _memory(axes, rows: list[Timing], names: list[str]) -> None:
    """What a call takes; where that cannot be told from what a process takes anyway, there is no point."""
    drawn = False
    for line, style in _lines(rows, names):
        there = [row for row in line if (row.peak_memory_bytes or 0) >= LEAST]
        axes.plot([row.T for row in there], [row.peak_memory_bytes / MIB for row in there], **style)
        drawn = drawn or bool(there)
    if drawn:
        axes.set_yscale("log")
    else:
        known = any(row.peak_memory_bytes is not None for row in rows)
        words = f"less than {LEAST // 1024} KiB" if known else "unknown"
        axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", color=GREY, style="italic")
        axes.set_yticks([])


def _finish(axes, Ts: list[int]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks(Ts if len(Ts) <= 6 else Ts[::2])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda T, _: f"{T / 1024:.0f}k" if T % 1024 == 0 else f"{T:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    if len(axes.get_yticks()):
        low, high = axes.get_ylim()
        fine = [(4, (1, 1.5, 2, 3, 4, 6, 8)), (30, (1, 2, 5)), (300, (1, 3))]
        steps = next((steps for most, steps in fine if high < most * low), (1,))
        axes.yaxis.set_major_locator(LogLocator(subs=steps, numticks=20))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def _legend(rows: list[Timing], names: list[str]) -> tuple[list, list[str]]:
    from matplotlib.lines import Line2D

    handles, labels = [], []
    several = len({row.dtype for row in rows}) > 1
    for line, style in _lines(rows, names):
        ran = list(dict.fromkeys(row.kernel for row in line if row.status == FINISHED))
        kernels = "" if ran in ([line[0].backend], []) else f" → {', '.join(ran)}"
        handles.append(Line2D([], [], **style))
        labels.append(f"{line[0].backend}{kernels}" + (f", {line[0].dtype}" if several else ""))
    return handles, labels
