"""Plots comparison.png: validation loss, divergence, step time and memory, side by side."""

import itertools
import math
from pathlib import Path

import numpy as np

from common.console import format_number
from common.plots import COLORS, GREY, line_style, make_figure, save_figure, style_axes
from results.read import Setting
from results.statistics import SettingStats, divergence, find_pairs, mean

LEGEND_LINE_CHARS = 130
BAR_LABEL_CHARS = 40
MIN_EVALUATIONS = 4  # with as many, the loss before training is not plotted


def plot_comparison(settings: list[Setting], rows: list[SettingStats], path: Path) -> None:
    """Plot settings into a PNG file, 1500 pixels wide.

    rows: statistics of the settings.
    """
    labels = [_legend_label(row) for row in rows]
    longest = max(len(label) for label in labels)
    columns = max(1, min(len(rows), 4, LEGEND_LINE_CHARS // (longest + 8)))
    figure = make_figure(10, 6.2 + 0.19 * math.ceil(len(labels) / columns))
    losses, distances, times, memory = figure.subplots(2, 2).flat
    lines = _plot_losses(losses, settings)
    _plot_divergence(distances, settings)
    step_ms = [[row.step_ms_q1, row.step_ms, row.step_ms_q3] for row in rows]
    q1, median, q3 = np.array(step_ms, dtype=float).T  # None becomes NaN
    title = "step time: median and quartiles, ms"
    _plot_bars(times, title, labels, median, [median - q1, q3 - median])
    peaks = np.array([row.peak_memory_bytes for row in rows], dtype=float)
    _plot_bars(memory, "peak memory of the median run, MiB", labels, peaks / 2**20)
    legend = figure.legend(
        lines, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9
    )
    for text in legend.get_texts():
        text.set_parse_math(False)  # two dollar signs would enclose a formula
    save_figure(figure, path)


def _legend_label(row: SettingStats) -> str:
    """Name of a setting, and its status if no run finished."""
    label = row.setting if row.seeds else f"{row.setting} ({row.status})"
    # Names of files that are not UTF-8 are escaped.
    return label[:LEGEND_LINE_CHARS].encode(errors="backslashreplace").decode()


def _plot_losses(axes, settings: list[Setting]) -> list:
    """Plot the mean validation loss, and a band from the lowest to the highest seed.

    Returns the lines, for the legend.
    """
    style_axes(axes, "validation loss, nats per token (band: all seeds)")
    lines = []
    for index, setting in enumerate(settings):
        curves = [run.curves["val/loss"] for run in setting.finished]
        # The steps that all runs evaluated.
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        if len(steps) >= MIN_EVALUATIONS:
            steps = steps[1:]  # the loss before training would flatten the rest of the curve
        losses = [[curve[step] for curve in curves] for step in steps]
        lows = [min(values) for values in losses]
        highs = [max(values) for values in losses]
        style = line_style(index, len(settings), max_width=5.0)
        lines += axes.plot(steps, [mean(values) for values in losses], **style)
        axes.fill_between(steps, lows, highs, color=style["color"], alpha=0.13)
    _label_steps(axes)
    return lines


def _plot_divergence(axes, settings: list[Setting]) -> None:
    """Plot the running maximum of the distance between the training losses of each setting and
    those of the first one."""
    style_axes(axes, "divergence of the training loss, running maximum")
    for index, setting in enumerate(settings):
        distances = divergence(find_pairs(setting, settings[0]))
        maxima = list(itertools.accumulate(distances.values(), max))
        style = line_style(index, len(settings), max_width=4.0)
        axes.plot(list(distances), maxima, **style, drawstyle="steps-post")
    if axes.dataLim.y1 > 0:  # some losses differ
        axes.set_yscale("log", nonpositive="mask")
    _label_steps(axes)


def _plot_bars(
    axes, title: str, labels: list[str], values: np.ndarray, spreads: list | None = None
) -> None:
    """Plot horizontal bars with their values, the first setting at the top. NaN has no bar.

    labels: names of the settings.
    spreads: lengths of the error bar below and above each value.
    """
    style_axes(axes, title, grid="x")
    numbers = range(1, len(values) + 1)
    colors = [COLORS[index % len(COLORS)] for index in range(len(values))]
    bars = axes.barh(numbers, values, xerr=spreads, color=colors, alpha=0.75, ecolor=GREY)
    axes.bar_label(bars, fmt=format_number, padding=3)
    axes.margins(x=0.25)
    names = [label[:BAR_LABEL_CHARS].replace(", ", "\n") for label in labels]
    axes.set_yticks(numbers, names, parse_math=False, fontsize=9)
    axes.invert_yaxis()


def _label_steps(axes) -> None:
    axes.set_xlabel("optimizer step")
    axes.locator_params(axis="x", integer=True)
