"""Plots comparison.png: validation loss, divergence, step time and memory of settings, side by side."""

import math
from pathlib import Path

import numpy as np

from common.console import format_number
from common.files import atomic_writer
from common.plots import COLORS, GREY, line_style, make_figure, style_axes
from comparison.runs.read import Setting
from comparison.runs.statistics import SettingStats, divergence, evaluations

LEGEND_LINE_CHARS = 130


def plot_comparison(settings: list[Setting], rows: list[SettingStats], path: Path) -> None:
    """Plot settings into a PNG file, 1500 pixels wide.

    rows: statistics of the settings.
    The legend numbers the settings, and the bars have these numbers. A bar without a value shows the setting's status.
    """
    statuses = [
        "" if row.status == f"{row.finished} finished" else f" ({row.status})" for row in rows
    ]
    labels = [
        f"{n} {row.setting}{status}"
        for n, (row, status) in enumerate(zip(rows, statuses, strict=True), 1)
    ]
    labels = [
        label[:LEGEND_LINE_CHARS].encode(errors="backslashreplace").decode() for label in labels
    ]
    labels = [label.replace("$", r"\$") for label in labels]  # otherwise, two would enclose math
    columns = max(1, min(len(rows), 4, LEGEND_LINE_CHARS // (max(map(len, labels)) + 8)))
    figure = make_figure(10, 6.2 + 0.19 * math.ceil(len(labels) / columns))
    losses, distances, times, memory = figure.subplots(2, 2).flat
    handles = _plot_losses(losses, settings)
    _plot_divergence(distances, settings)
    spreads = [
        row.step_ms and (row.step_ms - row.step_ms_q1, row.step_ms_q3 - row.step_ms) for row in rows
    ]
    _plot_bars(
        times, rows, "step time: median and quartiles", "ms", [row.step_ms for row in rows], spreads
    )
    peaks = [row.peak_memory_bytes and row.peak_memory_bytes / 2**20 for row in rows]
    _plot_bars(memory, rows, "peak memory of the median run", "MiB", peaks)
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        fontsize=9,
        handlelength=3,
    )
    with atomic_writer(path) as file:
        figure.savefig(file)


def _plot_losses(axes, settings: list[Setting]) -> list:
    """Plot the mean validation loss and a band from the lowest to the highest seed. Returns the legend's handles."""
    handles, highs, lows = [], [], []
    for index, setting in enumerate(settings):
        style = line_style(index, len(settings), 5.0 if len(settings) > 1 else 1.8)
        steps, losses = evaluations(setting)
        low, high = losses.min(axis=0, initial=math.inf), losses.max(axis=0, initial=-math.inf)
        means = losses.mean(axis=0) if len(losses) else steps
        (handle,) = axes.plot(
            steps, means, **style, marker="o" if len(steps) < 15 else None, markersize=4
        )
        axes.fill_between(steps, low, high, color=style["color"], alpha=0.13)
        handle.set_visible(len(steps) > 0)  # an invisible line has no symbol in the legend either
        handles.append(handle)
        lows += low.tolist()
        highs += high[
            len(high) > 3 :
        ].tolist()  # the loss before training would flatten the rest of the curve
    _style_steps(axes, "validation loss, nats per token (band: all seeds)")
    if lows:
        margin = 0.06 * ((max(highs) - min(lows)) or 1.0)
        axes.set_ylim(min(lows) - margin, max(highs) + margin)
    else:
        _show_text(axes, "no finished run")
    return handles


def _plot_divergence(axes, settings: list[Setting]) -> None:
    """Plot the running maximum of the distance between the training losses of each setting and the first one."""
    _style_steps(axes, "divergence of the training loss, running maximum")
    largest = []
    for index, setting in enumerate(settings):
        steps, distances = divergence(setting, settings[0])
        maxima = np.maximum.accumulate(distances)
        maxima[maxima == 0] = math.nan  # a log axis has no zero
        axes.plot(steps, maxima, **line_style(index, len(settings), 4.0), drawstyle="steps-post")
        largest += maxima[-1:].tolist()
    if any(value > 0 for value in largest):
        axes.set_yscale("log")
    else:
        _show_text(
            axes,
            "all training losses are equal"
            if largest
            else "no pair of finished runs with the same seed",
        )


def _plot_bars(
    axes, rows: list[SettingStats], title: str, unit: str, values: list, errors: list | None = None
) -> None:
    """Plot horizontal bars, the first setting at the top, and their values at the right.

    errors: lengths of the error bar below and above each value.
    """
    style_axes(axes, title, grid="x")
    axes.set_xlabel(unit)
    for index, (row, value) in enumerate(zip(rows, values, strict=True)):
        place = {"va": "center", "fontsize": 9, "transform": axes.get_yaxis_transform()}
        if value is None:
            axes.text(
                0.01,
                index,
                "unknown" if row.finished else row.status,
                color=GREY,
                style="italic",
                **place,
            )
        else:
            axes.barh(index, value, height=0.62, color=COLORS[index % len(COLORS)], alpha=0.75)
            axes.text(1.0, index, f"{format_number(value)} {unit}", ha="right", **place)
            if errors is not None:
                axes.errorbar(
                    value,
                    index,
                    xerr=np.transpose([errors[index]]),
                    color="black",
                    alpha=0.7,
                    capsize=3,
                )
    axes.set_xlim(0, 1.25 * max(axes.dataLim.x1, 0) or 1)
    axes.set_ylim(max(len(rows), 3) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), range(1, len(rows) + 1))


def _style_steps(axes, title: str) -> None:
    style_axes(axes, title)
    axes.set_xlabel("optimizer step")
    axes.locator_params(axis="x", integer=True)


def _show_text(axes, text: str) -> None:
    axes.text(
        0.5,
        0.5,
        text,
        transform=axes.transAxes,
        ha="center",
        va="center",
        color=GREY,
        style="italic",
    )
    axes.set(xticks=[], yticks=[])
