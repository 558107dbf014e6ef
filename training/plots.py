"""Plots of a run: loss.png, and attention.png if it has attention statistics."""

import json
import math
from pathlib import Path

import numpy as np

from common.plots import (
    TRAIN_COLOR,
    VAL_COLOR,
    label_log_axis,
    make_figure,
    save_figure,
    style_axes,
)
from training.run_folder import read_curves

ATTENTION_PANELS = {
    "score_variance": "variance of the scores",
    "entropy": "entropy, nats",
    "first_token_weight": "weight on the first token",
    "previous_token_weight": "weight on the previous token",
    "mean_distance": "mean distance, tokens",
}


def plot_run(folder: Path) -> None:
    """Plot the losses and, if there are any, the attention statistics in <folder>/metrics.jsonl."""
    content = (folder / "metrics.jsonl").read_bytes()
    curves = read_curves(content, "train/loss", "val/loss")
    figure = make_figure(7.5, 4.2)
    axes = figure.subplots()
    style_axes(axes, folder.name)
    losses = curves["train/loss"]
    if losses:
        axes.plot(
            list(losses),
            list(losses.values()),
            color=TRAIN_COLOR,
            linewidth=0.8,
            label="training, each step's batch",
        )
    losses = curves["val/loss"]
    if losses:
        axes.plot(
            list(losses),
            list(losses.values()),
            "o-",
            color=VAL_COLOR,
            linewidth=1.8,
            markersize=4,
            label=f"validation, best {min(losses.values()):.3f}",
        )
    axes.set(xlabel="optimizer step", ylabel="loss, nats per token")
    if axes.lines:
        axes.legend(frameon=False)
    save_figure(figure, folder / "loss.png")
    lines = content.splitlines()
    rows = [json.loads(line) for line in lines if b'"attention/entropy"' in line]
    if rows:
        _plot_attention(rows, folder / "attention.png")


def _plot_attention(rows: list[dict], path: Path) -> None:
    """Plot the attention statistics of evaluations.

    Thick lines are layers (mean over heads), thin lines are heads.
    """
    from matplotlib import colormaps

    steps = [row["step"] for row in rows]
    n_layer = len({key.split("/")[2] for key in rows[0] if key.startswith("attention/entropy/")})
    # without yellow, which is hard to see on white
    colors = colormaps["viridis"](np.linspace(0, 0.9, n_layer))
    figure = make_figure(10, 5.6)
    *panels, legend = figure.subplots(2, 3).flatten()
    for axes, (name, title) in zip(panels, ATTENTION_PANELS.items(), strict=True):
        keys = [key for key in rows[0] if key.startswith(f"attention/{name}/")]
        table = [[row[key] for key in keys] for row in rows]
        values = np.array(table, dtype=float)  # None becomes NaN
        values = values.reshape(len(rows), n_layer, -1)  # one column per head
        style_axes(axes, title)
        axes.set_xlabel("optimizer step")
        for layer, color in enumerate(colors):
            heads = values[:, layer]
            alpha = min(0.5, 3 / n_layer)
            axes.plot(steps, heads, color=color, linewidth=0.5, alpha=alpha, zorder=1)
            label = f"layer {layer + 1}"
            axes.plot(steps, heads.mean(-1), color=color, linewidth=1.8, label=label)
    panels[0].set_yscale("log", nonpositive="clip")
    label_log_axis(panels[0].yaxis)
    legend.axis("off")
    legend.legend(
        *panels[0].get_legend_handles_labels(),
        loc="center",
        ncols=math.ceil(n_layer / 12),
        frameon=False,
        fontsize=9,
        title="thick: mean over heads, thin: heads",
    )
    save_figure(figure, path)
