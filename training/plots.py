"""Curves of metrics.jsonl, and plots of a run: loss.png, and attention.png if the run has attention statistics."""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from common.plots import TRAIN_COLOR, VAL_COLOR, make_figure, style_axes

ATTENTION_PANELS = {
    "score_variance": "variance of the scores",
    "entropy": "entropy, nats",
    "first_token_weight": "weight on the first token",
    "previous_token_weight": "weight on the previous token",
    "mean_distance": "mean distance, tokens",
}


def read_curves(lines: Iterable[bytes], *keys: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Read metrics, such as "train/loss", from lines of metrics.jsonl. Returns {key: (steps, values)}."""
    curves: dict[str, tuple[list, list]] = {key: ([], []) for key in keys}
    for row in map(json.loads, lines):
        for key, (steps, values) in curves.items():
            if row.get(key) is not None:
                steps.append(row["step"])
                values.append(row[key])
    return {
        key: (np.array(steps, dtype=int), np.array(values, dtype=float))
        for key, (steps, values) in curves.items()
    }


def plot_run(folder: Path) -> None:
    """Plot the losses, and the attention statistics if there are any, in <folder>/metrics.jsonl over the steps."""
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    train, val = read_curves(lines, "train/loss", "val/loss").values()
    figure = make_figure(7.5, 4.2)
    axes = figure.subplots()
    style_axes(axes, folder.name)
    if len(train[0]):
        axes.plot(*train, color=TRAIN_COLOR, linewidth=0.8, label="training, each step's batch")
    if len(val[0]):
        label = f"validation, best {val[1].min():.3f}"
        axes.plot(*val, "o-", color=VAL_COLOR, linewidth=1.8, markersize=4, label=label)
    axes.set(xlabel="optimizer step", ylabel="loss, nats per token")
    if axes.lines:
        axes.legend(frameon=False)
    figure.savefig(folder / "loss.png")
    if rows := [json.loads(line) for line in lines if b'"attention/entropy"' in line]:
        _plot_attention(rows, folder / "attention.png")


def _plot_attention(rows: list[dict], path: Path) -> None:
    """Plot the attention statistics of evaluations. Thick lines are layers (mean over heads), thin lines heads."""
    from matplotlib import colormaps

    steps = [row["step"] for row in rows]
    n_layer = len({key.split("/")[2] for key in rows[0] if key.startswith("attention/entropy/")})
    colors = colormaps["viridis"](
        np.linspace(0, 0.9, n_layer)
    )  # without yellow, which is hard to see on white
    figure = make_figure(10, 5.6)
    *panels, legend = figure.subplots(2, 3).flatten()
    for axes, (name, title) in zip(panels, ATTENTION_PANELS.items(), strict=True):
        keys = [key for key in rows[0] if key.startswith(f"attention/{name}/")]
        values = np.array(
            [[row[key] for key in keys] for row in rows], dtype=float
        )  # None becomes NaN
        values = values.reshape(len(rows), n_layer, -1)  # one column per head
        style_axes(axes, title)
        for layer, color in enumerate(colors):
            axes.plot(
                steps,
                values[:, layer],
                color=color,
                linewidth=0.5,
                alpha=min(0.5, 3 / n_layer),
                zorder=1,
            )
            axes.plot(
                steps,
                values[:, layer].mean(-1),
                color=color,
                linewidth=1.8,
                label=f"layer {layer + 1}",
            )
        axes.set_xlabel("optimizer step")
    panels[0].set_yscale("log", nonpositive="clip")
    legend.axis("off")
    lines, title = panels[0].get_legend_handles_labels(), "thick: mean over heads, thin: heads"
    legend.legend(
        *lines, loc="center", ncols=-(-n_layer // 12), frameon=False, fontsize=9, title=title
    )
    figure.savefig(path)
