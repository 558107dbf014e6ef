"""Sweeps over settings (sweep/), comparison of finished runs (runs/), and timing of attention backends (bench/)."""

# The palette of Okabe and Ito for color-blind readers, without yellow, which is hard to see on white.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MAX_SPREAD = 1.5  # upper / lower quartile of times. A larger ratio means that the machine was busy.
DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))


def format_number(number: float) -> str:
    """Format a number with at least three significant digits: "0.0123", "1.23", "46.0", "123", "1,234"."""
    return f"{number:,.0f}" if number >= 99.95 else f"{number:#.3g}"


def line_style(index: int, count: int, max_width: float) -> dict:
    """Style of line `index` of `count`. Earlier lines are thicker, so that they stay visible below later ones."""
    width = max_width + (1.4 - max_width) * index / max(1, count - 1)
    dash = DASHES[index // len(COLORS) % len(DASHES)]
    return {"color": COLORS[index % len(COLORS)], "linewidth": width, "linestyle": dash}
