"""Plots and tables of attention weights and head entropies.

weights (n_layer, H, T, T): row i has the weights of all keys for query i. entropies (n_layer, H), in nats. T tokens,
H query heads. Plots and tables number layers, heads and tokens from 1.
"""

import csv
import sys
from math import ceil
from pathlib import Path

import numpy as np
import tiktoken
import torch
from rich.table import Table

from common.console import make_console, make_table
from common.errors import UserError
from data.tokenizer import encode, initial_tokens, token_strings
from model.generation.attention_maps import attention_maps, entropy, uniform_entropy
from model.gpt import GPT

MAX_MAP_TOKENS = 256  # with more, a weight is smaller than a pixel
MAX_LABELED_TOKENS = 40  # with more, the axes show numbers instead of tokens
MAX_LABEL_CHARS = 12
MAX_TABLE_HEADS = 7  # as many columns fit into 80 characters
FONT = "DejaVu Sans Mono"  # part of matplotlib, so that labels look the same on all machines
WHITESPACE_SYMBOLS = {" ": "·", "\n": "⏎", "\r": "↵", "\t": "⇥"}
COLORS = ("#ffffff", "#cfe1f2", "#6aaed6", "#1764ab", "#08264d")
MASKED_COLOR = "#eceff3"  # keys after their query; white is weight 0
GREY = "#666666"


def draw_attention_maps(model: GPT, tokenizer: tiktoken.Encoding, prompt: str, sample: str, folder: Path) -> None:
    """Plot the attention weights for the prompt, or for the sample if the prompt has fewer than two tokens.

    Also prints the entropies and saves them to entropies.csv. Raises UserError if there are fewer than two tokens.
    """
    tokens = encode(tokenizer, prompt).tolist()
    if len(tokens) < 2:
        tokens = ([] if prompt else initial_tokens(tokenizer)) + encode(tokenizer, sample).tolist()
    if len(tokens) < 2:
        raise UserError("attention_map=true needs at least two tokens; set a longer prompt or a larger max_new_tokens")
    T = min(len(tokens), model.config.block_size, MAX_MAP_TOKENS)
    if len(tokens) > T:
        limit = "the limit of the plots" if T == MAX_MAP_TOKENS else "the model's context"
        print(f"the attention map shows the last {T} of {len(tokens):,} tokens ({limit})", file=sys.stderr)
    tokens = tokens[-T:]
    weights = attention_maps(model, torch.tensor([tokens], device=model.wte.weight.device))
    entropies, uniform = entropy(weights).numpy(), uniform_entropy(T)
    plot_maps(weights.numpy(), entropies, token_strings(tokenizer, tokens), folder)
    write_entropies(entropies, uniform, folder / "entropies.csv")
    make_console(stderr=True).print(entropy_table(entropies, uniform))
    print(f"written  {folder}/layer-*.png, overview.png, entropies.csv", file=sys.stderr)


def plot_maps(weights: np.ndarray, entropies: np.ndarray, words: list[str], folder: Path) -> list[Path]:
    """Save layer-01.png, ... with one panel per head, and overview.png -> their paths. words: the tokens as strings."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"layer-{layer:02d}.png" for layer in range(1, len(weights) + 1)]
    for layer, path in enumerate(paths):
        _plot_layer(weights[layer], entropies[layer], words, f"layer {layer + 1}", path)
    return [*paths, plot_overview(weights, entropies, folder / "overview.png")]


def plot_overview(weights: np.ndarray, entropies: np.ndarray, path: Path) -> Path:
    """Plot all heads in one picture, one row per layer, without token labels -> path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    n_layer, H, T, _ = weights.shape
    gap = max(1, round(0.08 * T))
    step = T + gap
    # One image for all heads: with one panel per head, matplotlib takes twice as long (3.5 s for 12 x 12 heads).
    mosaic = np.ma.zeros((n_layer * step - gap, H * step - gap))
    for layer, head in np.ndindex(n_layer, H):
        mosaic[layer * step : layer * step + T, head * step : head * step + T] = _mask_future(weights[layer, head])
    side = min(2.0, max(0.5, 11 / H))  # inches per head
    has_labels = side >= 0.75
    figure = _make_figure(side * H + 1.6, side * n_layer + 0.9)
    axes = figure.subplots()
    image = _show_image(axes, mosaic, (0, mosaic.shape[1], mosaic.shape[0], 0))
    if has_labels:
        style = {"ha": "right", "va": "top", "fontsize": min(9, 7 * side), "color": GREY}
        for (layer, head), value in np.ndenumerate(entropies):
            axes.text(head * step + 0.95 * T, layer * step + 0.06 * T, f"{value:.2f}", **style)
    centers = np.arange(max(n_layer, H)) * step + T / 2
    axes.set_xticks(centers[:H], [f"head {h}" if has_labels else str(h) for h in range(1, H + 1)], fontsize=9)
    axes.set_yticks(centers[:n_layer], [f"layer {layer}" for layer in range(1, n_layer + 1)], fontsize=9)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    numbers = "; numbers: entropy, nats" if has_labels else ""
    axes.set_xlabel(f"{T} tokens\nrows: queries, columns: keys{numbers}", fontsize=9, color=GREY)
    _add_color_bar(figure, image, axes)
    figure.savefig(path)
    return path


def write_entropies(entropies: np.ndarray, uniform: float, path: Path) -> None:
    """Save the entropies as CSV, one row per head. uniform: entropy of uniform attention, the maximum, in nats."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["layer", "head", "entropy_nats", "uniform_nats"])
        for (layer, head), value in np.ndenumerate(entropies):
            writer.writerow([layer + 1, head + 1, f"{value:.6f}", f"{uniform:.6f}"])


def entropy_table(entropies: np.ndarray, uniform: float) -> Table:
    """Table of entropies: one row per layer, one column per head; for many heads, their minimum, mean and maximum."""
    H = entropies.shape[1]
    if H <= MAX_TABLE_HEADS:
        columns, rows = [f"head {head}" for head in range(1, H + 1)], entropies
    else:
        columns = ["minimum", "mean", "maximum"]
        rows = np.stack([entropies.min(1), entropies.mean(1), entropies.max(1)], axis=1)
    table = make_table("entropy, nats", *columns)
    for layer, row in enumerate(rows, start=1):
        table.add_row(f"layer {layer}", *(f"{value:.2f}" for value in row))
    table.add_section()
    table.add_row("uniform", *[f"{uniform:.2f}"] * len(columns))
    return table


def format_label(word: str, drawable: set[int]) -> str:
    """A token as an axis label: visible whitespace, at most MAX_LABEL_CHARS long. drawable: the font's code points."""
    shown = "".join(WHITESPACE_SYMBOLS.get(c, c if ord(c) in drawable else "�") for c in word)
    return shown if len(shown) <= MAX_LABEL_CHARS else shown[: MAX_LABEL_CHARS - 1] + "…"


def _plot_layer(weights: np.ndarray, entropies: np.ndarray, words: list[str], title: str, path: Path) -> None:
    """Plot one panel per head. weights (H, T, T), entropies (H,)."""
    H, T, _ = weights.shape
    columns = min(H, 4)
    rows = ceil(H / columns)
    labels, side, margin = None, 3.2, 0.4  # inches
    if T <= MAX_LABELED_TOKENS:
        drawable = _font_code_points()
        labels = [format_label(word, drawable) for word in words]
        side, margin = max(2.6, 0.125 * T), 0.2 + 0.07 * max(map(len, labels))
    figure = _make_figure(side * columns + margin + 1.2, (side + 0.3) * rows + margin + 0.3)
    grid = figure.subplots(rows, columns, squeeze=False)
    panels = list(grid.flat[:H])
    for unused in grid.flat[H:]:
        unused.remove()
    image = None
    for head, axes in enumerate(panels):
        image = _show_image(axes, _mask_future(weights[head]), (0.5, T + 0.5, T + 0.5, 0.5))
        axes.set_title(f"head {head + 1}, {entropies[head]:.2f} nats", fontsize=10)
        axes.tick_params(length=0, labelsize=7.5)
        for axis, is_outer in ((axes.xaxis, head + columns >= H), (axes.yaxis, head % columns == 0)):
            if not is_outer:
                axis.set_ticks([])
            elif labels is not None:
                axis.set_ticks(range(1, T + 1), labels, family=FONT, parse_math=False)
        if labels is not None:
            axes.tick_params(axis="x", rotation=90)
    figure.suptitle(title, fontsize=12)
    figure.supxlabel("key (attended token)", fontsize=9, color=GREY)
    figure.supylabel("query (attending token)", fontsize=9, color=GREY)
    _add_color_bar(figure, image, panels)
    figure.savefig(path)


def _make_figure(width: float, height: float):
    """Make an empty figure. width, height: in inches. Does not use pyplot, which keeps all figures in memory."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), dpi=150, layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.06))


def _mask_future(weights: np.ndarray) -> np.ma.MaskedArray:
    """Mask the keys after their query. weights (T, T)."""
    return np.ma.masked_where(np.triu(np.ones_like(weights, dtype=bool), k=1), weights)


def _show_image(axes, weights: np.ma.MaskedArray, extent: tuple[float, ...]):
    """Draw weights with a square-root color scale, because most weights are small. extent: left, right, bottom, top."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    colors = LinearSegmentedColormap.from_list("weights", COLORS).with_extremes(bad=MASKED_COLOR)
    axes.spines[:].set_visible(False)
    return axes.imshow(weights, cmap=colors, norm=PowerNorm(0.5, 0, 1), extent=extent)


def _add_color_bar(figure, image, panels) -> None:
    ticks = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1]
    bar = figure.colorbar(image, ax=panels, ticks=ticks, shrink=0.9, aspect=40, pad=0.02)
    bar.ax.set_yticklabels([f"{tick:g}" for tick in ticks])
    bar.set_label("weight", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)


def _font_code_points() -> set[int]:
    from matplotlib.font_manager import findfont, get_font

    return set(get_font(findfont(FONT)).get_charmap())
