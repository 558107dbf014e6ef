"""Pictures and tables of attention: the causal weights of a text, and the entropies of the heads.

Everything comes in as arrays: weights (n_layer, H, T, T), row i what query i takes from each key; entropies
(n_layer, H) in nats; words, the T tokens as text. Layers, heads and tokens count from 1, as people do.
"""

import csv
from math import ceil
from pathlib import Path

import numpy as np

READABLE = 40  # tokens whose words can stand beside a panel; numbers beyond
FONT = "DejaVu Sans Mono"  # comes with matplotlib, so that what it can draw is the same everywhere
MARKS = {" ": "·", "\n": "⏎", "\r": "↵", "\t": "⇥"}
LONGEST = 12  # characters of a word that are shown
NEVER_SEEN = "#eceff3"  # the triangle of keys that come after their query, which zero, white, is told from
COLOURS = ("#ffffff", "#cfe1f2", "#6aaed6", "#1764ab", "#08264d")
GREY = "#666666"


def plot_maps(weights: np.ndarray, entropies: np.ndarray, words: list[str], folder: Path) -> list[Path]:
    """Draw <folder>/layer-01.png, ... with a panel per head, and overview.png -> their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"layer-{layer:02d}.png" for layer in range(1, len(weights) + 1)]
    for layer, path in enumerate(paths):
        _plot_layer(weights[layer], entropies[layer], words, f"layer {layer + 1}", path)
    return [*paths, plot_overview(weights, entropies, folder / "overview.png")]


def plot_overview(weights: np.ndarray, entropies: np.ndarray, path: Path) -> Path:
    """Draw all heads of all layers, a row of them per layer, without words; entropies in the empty corners."""
    path.parent.mkdir(parents=True, exist_ok=True)
    n_layer, H, T, _ = weights.shape
    gap = max(1, round(0.08 * T))
    # One image of all: a panel for each takes matplotlib twice as long (3.5 s for 12 x 12 heads).
    mosaic = np.ma.zeros((n_layer * (T + gap) - gap, H * (T + gap) - gap))
    for layer, head in np.ndindex(n_layer, H):
        top, left = layer * (T + gap), head * (T + gap)
        mosaic[top : top + T, left : left + T] = _seen(weights[layer, head])
    side = min(2.0, max(0.5, 11 / H))  # inches
    figure = _figure(side * H + 1.6, side * n_layer + 0.9)
    axes = figure.subplots()
    image = _image(axes, mosaic, (0, mosaic.shape[1], mosaic.shape[0], 0))
    if side >= 0.75:
        for (layer, head), value in np.ndenumerate(entropies):
            right, top = (head + 1) * (T + gap) - gap, layer * (T + gap)
            axes.text(right - 0.05 * T, top + 0.06 * T, f"{value:.2f}", ha="right", va="top",
                      fontsize=min(9, 7 * side), color=GREY)  # fmt: skip
    middles = np.arange(max(n_layer, H)) * (T + gap) + T / 2
    axes.set_xticks(middles[:H], [f"head {h}" if side >= 0.75 else str(h) for h in range(1, H + 1)], fontsize=9)
    axes.set_yticks(middles[:n_layer], [f"layer {layer}" for layer in range(1, n_layer + 1)], fontsize=9)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    numbers = "; numbers: entropy, nats" if side >= 0.75 else ""
    axes.set_xlabel(f"{T} tokens\nrows: queries, columns: keys{numbers}", fontsize=9, color=GREY)
    _colour_bar(figure, image, axes)
    figure.savefig(path)
    return path


def write_entropies(entropies: np.ndarray, uniform: float, path: Path) -> None:
    """Write a row per head. uniform: the largest entropy possible over these tokens, in nats."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["layer", "head", "entropy_nats", "uniform_nats"])
        for (layer, head), value in np.ndenumerate(entropies):
            writer.writerow([layer + 1, head + 1, f"{value:.6f}", f"{uniform:.6f}"])


def entropy_table(entropies: np.ndarray, uniform: float):
    """A rich.table.Table, a row per layer and a column per head; of more than 8 heads the least, mean and largest.

    uniform: the largest entropy possible over these tokens, in nats, which the last row repeats.
    """
    from rich import box
    from rich.table import Table

    H = entropies.shape[1]
    if H <= 8:
        headers, rows = [f"head {head}" for head in range(1, H + 1)], entropies
    else:
        headers = ["least", "mean", "largest"]
        rows = np.stack([entropies.min(1), entropies.mean(1), entropies.max(1)], axis=1)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for header in ("entropy, nats", *headers):
        table.add_column(header, justify="right", no_wrap=True)
    for layer, row in enumerate(rows, start=1):
        table.add_row(f"layer {layer}", *(f"{value:.2f}" for value in row), end_section=layer == len(rows))
    table.add_row("all keys alike", *[f"{uniform:.2f}"] * len(headers))
    return table


def label(word: str, drawable: set[int]) -> str:
    """A token's text as it can be shown: white space by marks, what the font lacks by �, and not too long.

    drawable: the code points that the font has.
    """
    shown = "".join(MARKS.get(c, c if ord(c) in drawable else "�") for c in word)
    return shown if len(shown) <= LONGEST else shown[: LONGEST - 1] + "…"


def _plot_layer(weights: np.ndarray, entropies: np.ndarray, words: list[str], title: str, path: Path) -> None:
    """weights (H, T, T), entropies (H,)."""
    H, T, _ = weights.shape
    columns = min(H, 4)
    rows = ceil(H / columns)
    side = max(2.6, 0.125 * T) if T <= READABLE else 3.2  # inches
    labels, margin = None, 0.4
    if T <= READABLE:
        drawable = _drawable()
        labels = [label(word, drawable) for word in words]
        margin = 0.2 + 0.07 * max(map(len, labels))
    figure = _figure(side * columns + margin + 1.2, (side + 0.3) * rows + margin + 0.3)
    panels = figure.subplots(rows, columns, squeeze=False)
    for head, axes in enumerate(panels.flat):
        if head >= H:
            axes.remove()
            continue
        image = _image(axes, _seen(weights[head]), (0.5, T + 0.5, T + 0.5, 0.5))  # tokens count from 1
        axes.set_title(f"head {head + 1}, {entropies[head]:.2f} nats", fontsize=10)
        axes.tick_params(length=0, labelsize=7.5)
        for axis, outside in ((axes.xaxis, head + columns >= H), (axes.yaxis, head % columns == 0)):
            if not outside:
                axis.set_ticks([])
            elif labels is not None:  # a $ is no formula
                axis.set_ticks(range(1, T + 1), labels, family=FONT, parse_math=False)
        if labels is not None:
            axes.tick_params(axis="x", rotation=90)
    figure.suptitle(title, fontsize=12)
    figure.supxlabel("key: the token that is looked at", fontsize=9, color=GREY)
    figure.supylabel("query: the token that looks", fontsize=9, color=GREY)
    _colour_bar(figure, image, list(panels.flat[:H]))
    figure.savefig(path)


def _figure(width: float, height: float):
    """An empty figure, of so many inches. It is drawn without a screen, and no pyplot has to forget it again."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=150, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.08, h_pad=0.06)
    return figure


def _seen(weights: np.ndarray) -> np.ma.MaskedArray:
    """A head's weights (T, T) without the keys that come after their query."""
    return np.ma.masked_where(np.triu(np.ones_like(weights, dtype=bool), k=1), weights)


def _image(axes, weights: np.ma.MaskedArray, edges: tuple[float, ...]):
    """Weights on a scale of square roots: over many keys most are small. edges: left, right, bottom, top."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    colours = LinearSegmentedColormap.from_list("weights", COLOURS).with_extremes(bad=NEVER_SEEN)
    axes.spines[:].set_visible(False)
    return axes.imshow(weights, cmap=colours, norm=PowerNorm(0.5, 0, 1), extent=edges)


def _colour_bar(figure, image, panels) -> None:
    bar = figure.colorbar(image, ax=panels, ticks=[0, 0.01, 0.05, 0.1, 0.25, 0.5, 1], shrink=0.9, aspect=40, pad=0.02)
    bar.ax.set_yticklabels(["0", "0.01", "0.05", "0.1", "0.25", "0.5", "1"])
    bar.set_label("weight", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)


def _drawable() -> set[int]:
    from matplotlib.font_manager import findfont, get_font

    return set(get_font(findfont(FONT)).get_charmap())
