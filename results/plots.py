"""Plots of a run, loss.png, and of a comparison, comparison.png."""

import math
from pathlib import Path

import numpy as np

from common.plots import (
    COLORS,
    GREY,
    TRAIN_COLOR,
    VAL_COLOR,
    line_style,
    make_figure,
    save_figure,
    style_axes,
)
from results.metrics import METRICS, Metric, Value
from results.read import Variant, read_curves
from results.statistics import divergence, find_pairs

LEGEND_LABEL_CHARS = 65
BAR_LABEL_CHARS = 40
MIN_EVALUATIONS = 4  # with as many, the loss before training is not plotted


def plot_run(folder: Path) -> None:
    """Plot the training and validation losses of a run into its loss.png."""
    curves = read_curves(folder)
    figure = make_figure(7.5, 4.2)
    axes = figure.subplots()
    style_axes(axes, folder.name)
    losses = curves["train/loss"]
    axes.plot(
        list(losses),
        list(losses.values()),
        color=TRAIN_COLOR,
        linewidth=0.8,
        label="training, each step's batch",
    )
    losses = curves["val/loss"]
    label = f"validation, best {min(losses.values(), default=math.nan):.3f}"
    axes.plot(
        list(losses),
        list(losses.values()),
        "o-",
        color=VAL_COLOR,
        linewidth=1.8,
        markersize=4,
        label=label,
    )
    axes.set(xlabel="optimizer step", ylabel="loss, nats per token")
    axes.legend(frameon=False)
    save_figure(figure, folder / "loss.png")


def plot_comparison(variants: list[Variant], rows: list[dict[str, Value]], path: Path) -> None:
    """Plot variants into a PNG file, 1500 pixels wide: curves of the losses, and bars.

    rows: result of compare_variants.
    """
    labels = [_make_label(row) for row in rows]
    bars = [name for name, metric in METRICS.items() if metric.in_plot]
    panel_rows = 1 + math.ceil(len(bars) / 2)
    figure = make_figure(10, 3.1 * panel_rows + 0.19 * math.ceil(len(rows) / 2))
    losses, distances, *panels = figure.subplots(panel_rows, 2).flat
    _plot_losses(losses, variants, labels)
    _plot_divergence(distances, variants)
    for axes, name in zip(panels, bars, strict=False):
        _plot_bars(axes, METRICS[name], labels, [row[name] for row in rows])
    for axes in panels[len(bars) :]:
        axes.remove()
    legend = losses.get_legend_handles_labels()
    figure.legend(*legend, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    save_figure(figure, path)


def _make_label(row: dict[str, Value]) -> str:
    """Name of a variant, and its status if no run finished."""
    label = row["variant"].value
    if not row["seeds"].value:
        label += f" ({row['status'].value})"
    # Names of files that are not UTF-8 are escaped. Two dollar signs would enclose a formula.
    text = label[:LEGEND_LABEL_CHARS].encode(errors="backslashreplace").decode()
    return text.replace("$", r"\$")


def _plot_losses(axes, variants: list[Variant], labels: list[str]) -> None:
    """Plot the mean validation loss, and a band from the lowest to the highest seed."""
    style_axes(axes, "validation loss, nats per token (band: all seeds)")
    axes.set_xlabel("optimizer step")
    for index, variant in enumerate(variants):
        curves = [run.curves["val/loss"] for run in variant.finished]
        if not curves:
            continue
        # the steps that all runs evaluated
        steps = sorted(set.intersection(*map(set, curves)))
        if len(steps) >= MIN_EVALUATIONS:
            steps = steps[1:]  # the loss before training would flatten the rest of the curve
        losses = np.array([[curve[step] for step in steps] for curve in curves])
        style = line_style(index, len(variants), max_width=5.0)
        axes.plot(steps, losses.mean(axis=0), label=labels[index], **style)
        band = losses.min(axis=0), losses.max(axis=0)
        axes.fill_between(steps, *band, color=style["color"], alpha=0.13)


def _plot_divergence(axes, variants: list[Variant]) -> None:
    """Plot the running maximum of the distance between the training losses of each variant and
    those of the baseline."""
    style_axes(axes, "divergence of the training loss, running maximum")
    axes.set_xlabel("optimizer step")
    for index, variant in enumerate(variants):
        distances = divergence(find_pairs(variant, variants[0]))
        maxima = np.maximum.accumulate(list(distances.values()))
        style = line_style(index, len(variants), max_width=4.0)
        axes.plot(list(distances), maxima, **style, drawstyle="steps-post")
    if axes.dataLim.y1 > 0:  # some losses differ
        axes.set_yscale("log", nonpositive="mask")


def _plot_bars(axes, metric: Metric, labels: list[str], values: list[Value]) -> None:
    """Plot a metric as horizontal bars, the baseline at the top. Error bars are intervals or
    quartiles."""
    style_axes(axes, f"{metric.header}, {metric.compare}", grid="x")
    bounds = [[value.low, value.value, value.high] for value in values]
    low, number, high = np.array(bounds, dtype=float).T  # None becomes NaN, which has no bar
    colors = [COLORS[index % len(COLORS)] for index in range(len(values))]
    names = [label[:BAR_LABEL_CHARS].replace(", ", "\n") for label in labels]
    bars = axes.barh(
        range(len(values)),
        number,
        xerr=[number - low, high - number],
        tick_label=names,
        color=colors,
        ecolor=GREY,
        alpha=0.75,
    )
    axes.bar_label(bars, fmt=metric.format, padding=3)
    axes.set_xticks([])  # the bars have their values
    axes.margins(x=0.25)
    axes.tick_params(axis="y", labelsize=9)
    axes.invert_yaxis()
