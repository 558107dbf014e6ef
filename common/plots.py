"""Curves from metrics.jsonl, and the style of plots. matplotlib is imported when it is needed, which takes seconds."""

import json
from collections.abc import Iterable

import numpy as np

GREY = "#666666"


def make_figure(width: float, height: float):
    """Make an empty figure of a size in inches, without pyplot, which would keep all figures in memory."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def read_curves(lines: Iterable[bytes], *keys: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Read metrics, such as "train/loss", from lines of metrics.jsonl. Returns {key: (steps, values)}."""
    curves: dict[str, tuple[list, list]] = {key: ([], []) for key in keys}
    for row in map(json.loads, lines):
        for key, (steps, values) in curves.items():
            if row.get(key) is not None:
                steps.append(row["step"])
                values.append(row[key])
    return {key: (np.array(steps, dtype=int), np.array(values, dtype=float)) for key, (steps, values) in curves.items()}


def style_axes(axes, title: str, grid: str = "both") -> None:
    """Set a title on the left and a light grid, and remove the frame. grid: "both", "x" or "y"."""
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.grid(alpha=0.25, axis=grid)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
