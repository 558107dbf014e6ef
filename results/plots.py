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
from results.metrics import Value
from results.read import Variant, read_curves
from results.statistics import divergence, find_pairs

LEGEND_LABEL_CHARS = 65
ROW_LABEL_CHARS = 40  # per line
ROW_LABEL_LINES = 3  # which fit into the height of a row
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
    # the first step of each model, with train.n_teachers
    model_starts = {number: step for step, number in reversed(curves["teachers"].items())}
    for step in model_starts.values():
        axes.axvline(step, color=GREY, linestyle=":", linewidth=1)
    losses = curves["val/loss"]
    axes.plot(
        list(losses),
        list(losses.values()),
        "o-",
        color=VAL_COLOR,
        linewidth=1.8,
        markersize=4,
        label=f"validation, best {min(losses.values(), default=math.nan):.3f}",
    )
    axes.set(xlabel="optimizer step", ylabel="loss, nats per token")
    axes.legend(frameon=False)
    save_figure(figure, folder / "loss.png")


def plot_comparison(
    variants: list[Variant], rows: list[dict[str, Value]], negligible: float, path: Path
) -> None:
    """Plot variants into a PNG file, 1500 pixels wide: differences, step times, and loss curves.

    rows: result of compare_variants. negligible: a relative difference that counts as none.
    """
    labels = [_make_label(row) for row in rows]
    names = [_break_label(label) for label in labels]
    kernels = [row["kernel"].value or "" for row in rows]
    forest_height = 1.0 + 0.45 * len(rows)
    figure = make_figure(10, forest_height + 3.6 + 0.1 * len(rows))
    panels = figure.subplots(2, 2, height_ratios=(forest_height, 3.1)).flat
    differences, times, losses, distances = panels
    _plot_forest(
        differences,
        "loss difference, % (left is better, grey is none)",
        names,
        [row["difference"] for row in rows],
        scale=100,
    )
    differences.axvline(0, color=GREY, linewidth=1)
    differences.axvspan(-100 * negligible, 100 * negligible, color=GREY, alpha=0.12)
    _plot_forest(
        times,
        "time per step, ms (median, quartiles)",
        kernels,
        [row["step_ms"] for row in rows],
    )
    _plot_losses(losses, variants, labels)
    _plot_divergence(distances, variants)
    figure.legend(
        *losses.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    save_figure(figure, path)


def _break_label(label: str) -> str:
    """The first settings of a label, one per line, which is cut."""
    settings = label.split(", ")[:ROW_LABEL_LINES]
    return "\n".join(setting[:ROW_LABEL_CHARS] for setting in settings)


def _make_label(row: dict[str, Value]) -> str:
    """Name of a variant, and its status if no run finished."""
    label = row["variant"].value
    if not row["seeds"].value:
        label += f" ({row['status'].value})"
    # Names of files that are not UTF-8 are escaped. Two dollar signs would enclose a formula.
    text = label[:LEGEND_LABEL_CHARS].encode(errors="backslashreplace").decode()
    return text.replace("$", r"\$")


def _plot_forest(
    axes, title: str, labels: list[str], values: list[Value], scale: float = 1.0
) -> None:
    """Plot a value and its interval per row, the baseline at the top."""
    style_axes(axes, title, grid="x")
    for index, value in enumerate(values):
        bounds = np.array([value.low, value.value, value.high], dtype=float)  # None becomes NaN
        low, number, high = bounds * scale
        color = COLORS[index % len(COLORS)]
        axes.plot([low, high], [index, index], color=color, linewidth=2.5)
        axes.plot(number, index, "o", color=color)
    axes.set_yticks(range(len(labels)), labels, fontsize=9)
    axes.set_ylim(len(labels) - 0.5, -0.5)


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
        marker = "o" if len(steps) == 1 else None  # a line needs two points
        axes.plot(steps, losses.mean(axis=0), label=labels[index], marker=marker, **style)
        band = losses.min(axis=0), losses.max(axis=0)
        axes.fill_between(steps, *band, color=style["color"], alpha=0.13)


def _plot_divergence(axes, variants: list[Variant]) -> None:
    """Plot the largest distance so far between the losses of each variant and the baseline."""
    style_axes(axes, "divergence of the training loss, running maximum")
    axes.set_xlabel("optimizer step")
    for index, variant in enumerate(variants):
        distances = divergence(find_pairs(variant, variants[0]))
        maxima = np.maximum.accumulate(list(distances.values()))
        style = line_style(index, len(variants), max_width=4.0)
        axes.plot(list(distances), maxima, **style, drawstyle="steps-post")
    if axes.dataLim.y1 > 0:  # some losses differ
        axes.set_yscale("log", nonpositive="mask")
