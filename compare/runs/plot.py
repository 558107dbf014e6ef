"""comparison.png: losses, divergence, step time and memory of settings, side by side."""

import math
import textwrap
from collections.abc import Callable
from pathlib import Path

from compare.runs.read import Setting
from compare.runs.statistics import Row, divergence
from compare.runs.table import memory, milliseconds

# Okabe and Ito's colours, which colour-blind readers tell apart, without the yellow, which white paper swallows.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
GREY = "#666666"


def draw(settings: list[Setting], rows: list[Row], path: Path) -> None:
    """Draw the picture, 1500 pixels wide; the legend below grows with the settings.

    Settings without a figure are named with the reason for it ("refused") in the place where it would stand.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [_legend_entry(index, row, rows) for index, row in enumerate(rows)]
    columns = max(1, min(len(rows), 4, 130 // (max(map(len, names)) + 8)))
    entries = [textwrap.fill(name, 125) for name in names]
    lines = sum(entry.count("\n") + 1 for entry in entries) / columns
    with plt.rc_context({"font.size": 10, "axes.titlesize": 10.5, "axes.titlelocation": "left"}):
        figure, axes = plt.subplots(2, 2, figsize=(10, 6.2 + 0.19 * lines), dpi=150, layout="constrained")
        figure.get_layout_engine().set(w_pad=0.1, h_pad=0.08)
        handles = _losses(axes[0, 0], settings)
        _divergences(axes[0, 1], settings)
        _step_times(axes[1, 0], rows)
        _memory(axes[1, 1], rows)
        for each in axes.flat:
            each.spines[["top", "right"]].set_visible(False)
            each.set_axisbelow(True)
        figure.legend(
            handles, entries, loc="outside lower center", ncols=columns, frameon=False, fontsize=9, handlelength=3
        )
        figure.savefig(path)
        plt.close(figure)


def _style(index: int, count: int, thin: float, thick: float) -> dict:
    """Lines that lie on one another stay visible: the first ones are the thickest, and lie below."""
    width = thick + (thin - thick) * index / max(1, count - 1)
    dash = DASHES[index // len(COLOURS) % len(DASHES)]
    return {"color": COLOURS[index % len(COLOURS)], "linewidth": width, "linestyle": dash}


def _losses(axes, settings: list[Setting]) -> list:
    """Mean validation loss over steps, in a band from the lowest to the highest seed -> a handle per setting."""
    handles, tops, floors = [], [], []
    for index, setting in enumerate(settings):
        style = _style(index, len(settings), 1.4, 5.0 if len(settings) > 1 else 1.8)
        curves = [run.curve("val/loss") for run in setting.finished]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        values = [[curve[step] for curve in curves] for step in steps]
        means = [sum(each) / len(each) for each in values]
        (handle,) = axes.plot(steps, means, **style, marker="o" if len(steps) < 15 else None, markersize=4)
        if len(curves) > 1:
            axes.fill_between(steps, [min(each) for each in values], [max(each) for each in values],
                              color=style["color"], alpha=0.13, linewidth=0)  # fmt: skip
        handle.set_visible(bool(steps))  # in the legend as well
        handles.append(handle)
        later = values[1:] if len(values) > 3 else values  # the loss of an untrained model would flatten the rest
        tops += [max(each) for each in later]
        floors += [min(each) for each in values]
    axes.set(
        title="validation loss, nats per token"
        + (" (band: all seeds)" if any(len(setting.finished) > 1 for setting in settings) else "")
    )
    axes.set_xlabel("optimizer step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    if floors:
        margin = 0.06 * ((max(tops) - min(floors)) or 1.0)
        axes.set_ylim(min(floors) - margin, max(tops) + margin)
    else:
        _say_nothing(axes, "no finished run")
    return handles


def _divergences(axes, settings: list[Setting]) -> None:
    """Largest distance, over seeds, from the first setting's training loss; marks at the lower edge are zeros."""
    axes.set(title="distance of training loss from the first setting", xlabel="optimizer step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.25)
    curves = {index: apart for index, each in enumerate(settings) if (apart := divergence(each, settings[0]))}
    if not curves:
        only = len(settings) == 1
        return _say_nothing(axes, "one setting, nothing to compare" if only else "no pair of finished runs of one seed")
    edge = 0.02  # height of the next row of marks, in parts of the axis
    for index, apart in curves.items():
        style = _style(index, len(settings), 0.8, 2.0)
        above = [value or math.nan for value in apart.values()]  # a log axis has no zero: the line breaks there
        axes.plot(apart.keys(), above, **style, marker=".", markersize=style["linewidth"] + 1.5)
        equal = [step for step, value in apart.items() if value == 0]
        if equal:
            axes.plot(equal, [edge] * len(equal), "|", color=style["color"], markersize=5,
                      transform=axes.get_xaxis_transform())  # fmt: skip
            edge += 0.025
    positive = [value for apart in curves.values() for value in apart.values() if value > 0]
    if positive:
        low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)) + 0.1)
        low -= (high - low) * (edge + 0.02) if edge > 0.02 else 0  # room for the marks
        axes.set(yscale="log", ylim=(10**low, 10**high))
    else:
        axes.set(yticks=[], ylim=(0, 1))
    if edge > 0.02:
        axes.text(0.99, 0.98, "marks at the lower edge: exactly equal", transform=axes.transAxes, ha="right", va="top",
                  fontsize=8.5, color=GREY)  # fmt: skip


def _step_times(axes, rows: list[Row]) -> None:
    axes.set(title="step time: median, and quartiles", xlabel="ms per optimizer step")
    times = [row.step_ms for row in rows]
    _bars(axes, rows, times, lambda value: f"{milliseconds(value)} ms", [row.step_ms_q3 for row in rows])
    for index, row in enumerate(rows):
        if row.step_ms is not None:
            spread = [[row.step_ms - row.step_ms_q1], [row.step_ms_q3 - row.step_ms]]
            axes.errorbar(row.step_ms, index, xerr=spread, color="black", alpha=0.7, capsize=3, linewidth=1.3)


def _memory(axes, rows: list[Row]) -> None:
    largest = max((row.peak_memory_bytes or 0 for row in rows), default=0)
    unit, size = ("GiB", 2**30) if largest >= 2**30 else ("MiB", 2**20)
    axes.set(title="peak memory, the median run's", xlabel=unit)
    sizes = [None if row.peak_memory_bytes is None else row.peak_memory_bytes / size for row in rows]
    _bars(axes, rows, sizes, lambda value: memory(round(value * size)), sizes)


def _bars(axes, rows: list[Row], values: list[float | None], form: Callable, reach: list[float | None]) -> None:
    """Lying bars from zero, the first setting on top, each one's value at the right; a text where there is none.

    reach: how far to the right a setting's marks go.
    """
    for index, (row, value) in enumerate(zip(rows, values, strict=True)):
        place = {"va": "center", "fontsize": 9, "transform": axes.get_yaxis_transform()}
        if value is None:  # finished, and yet unknown: the run did not log it
            axes.text(0.01, index, "unknown" if row.finished else row.status, color=GREY, style="italic", **place)
            continue
        axes.barh(index, value, height=0.62, color=COLOURS[index % len(COLOURS)], alpha=0.75)
        axes.text(1.0, index, form(value), ha="right", **place)
    axes.set_xlim(0, 1.25 * max((value for value in reach if value is not None), default=0) or 1)
    axes.set_ylim(max(len(rows), 3) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), _short_names(rows) or range(1, len(rows) + 1))
    axes.grid(alpha=0.25, axis="x")


def _say_nothing(axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY, style="italic")
    axes.set(xticks=[], yticks=[])


def _short_names(rows: list[Row]) -> list[str] | None:
    """Labels that fit beside the bars; None where numbers must stand there, which the legend explains."""
    labels = [row.setting for row in rows]
    same_key = len({label.partition("=")[0] for label in labels}) == 1  # attention=x, attention=y: x, y
    names = [label.partition("=")[2] or label if same_key else label for label in labels]
    return names if len(rows) <= 8 and max(map(len, names)) <= 18 else None


def _legend_entry(index: int, row: Row, rows: list[Row]) -> str:
    number = "" if _short_names(rows) else f"{index + 1}  "
    return f"{number}{row.setting}" + ("" if row.finished == row.runs else f" ({row.status})")
