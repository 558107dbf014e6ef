"""Colors and style of all plots. matplotlib takes seconds to import, so functions import it."""

import warnings
from pathlib import Path

from common.files import atomic_writer

# The palette of Okabe and Ito for color-blind readers, without yellow, which is hard to see on
# white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
GREY = "#666666"  # text beside the data
TRAIN_COLOR = "#9db4d0"
VAL_COLOR = "#c2410c"


def make_figure(width: float, height: float):
    """Make an empty figure of a size in inches. pyplot would keep all figures in memory."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=150, layout="constrained")


def save_figure(figure, path: Path) -> None:
    """Write a figure as a complete PNG file or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), atomic_writer(path) as file:
        warnings.filterwarnings("ignore", message="Glyph")  # characters without one become boxes
        figure.savefig(file, format="png")


def style_axes(axes, title: str, grid: str = "both") -> None:
    """Set a title on the left and a light grid, and remove the frame. grid: "both", "x" or "y"."""
    axes.set_title(title, loc="left", fontsize=10.5)
    axes.grid(alpha=0.25, axis=grid)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def label_log_axis(axis) -> None:
    """Label a logarithmic axis, after plotting, with plain numbers: 1, 2, 5, 10, 20, ..."""
    from matplotlib.ticker import LogLocator, NullFormatter

    low, high = axis.get_view_interval()
    subs = (1, 2, 5) if high > 10 * low else (1, 1.2, 1.5, 2, 3, 5, 7)
    axis.set_major_locator(LogLocator(subs=subs))
    axis.set_major_formatter("{x:,.10g}")
    axis.set_minor_formatter(NullFormatter())


def line_style(index: int, count: int, max_width: float) -> dict:
    """Style of line `index` of `count`: keyword arguments of matplotlib's plot.

    The first line has max_width points and the last one 1.4, so that all stay visible where they
    cover each other.
    """
    return {
        "color": COLORS[index % len(COLORS)],
        "linewidth": max_width + (1.4 - max_width) * index / max(1, count - 1),
        "linestyle": DASHES[index // len(COLORS) % len(DASHES)],
    }
