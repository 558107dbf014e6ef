"""Plots and tables of attention weights and head entropies.

weights (n_layer, H, T, T): row i has the weights of all keys for query i. entropies (n_layer, H), in nats. T tokens,
H query heads. Plots and tables number layers, heads and tokens from 1.
"""

import sys
import warnings
from math import ceil
from pathlib import Path

import numpy as np
import tiktoken
import torch
from rich.table import Table

from common.console import make_console, make_table
from common.errors import UserError
from common.plots import GREY, make_figure
from data.tokenizer import encode, initial_tokens, token_strings
from model.attention.attention_maps import attention_maps, entropy, uniform_entropy
from model.gpt import GPT

MAX_MAP_TOKENS = 256  # with more, a weight is smaller than a pixel
MAX_LABELED_TOKENS = 40  # with more, the axes show numbers instead of tokens
MAX_LABEL_CHARS = 12
MAX_TABLE_HEADS = 7  # as many columns fit into 80 characters
WHITESPACE_SYMBOLS = {" ": "·", "\n": "⏎", "\r": "↵", "\t": "⇥"}
COLORS = ("#ffffff", "#cfe1f2", "#6aaed6", "#1764ab", "#08264d")
MASKED_COLOR = "#eceff3"  # keys after their query; white is weight 0


def draw_attention_maps(model: GPT, tokenizer: tiktoken.Encoding, prompt: str, sample: str, folder: Path) -> None:
    """Plot the attention weights for the prompt, or for the sample if the prompt has fewer than two tokens.

    Also prints the entropies. Raises UserError if there are fewer than two tokens.
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
    entropies = entropy(weights).numpy()
    plot_maps(weights.numpy(), entropies, token_strings(tokenizer, tokens), folder)
    make_console(stderr=True).print(entropy_table(entropies, uniform_entropy(T)))
    print(f"written  {folder}/layer-*.png, overview.png", file=sys.stderr)


def plot_maps(weights: np.ndarray, entropies: np.ndarray, words: list[str], folder: Path) -> None:
    """Save overview.png, and layer-01.png, ... with one panel per head. words: the tokens as strings."""
    plot_overview(weights, entropies, folder / "overview.png")
    for layer in range(len(weights)):
        path = folder / f"layer-{layer + 1:02d}.png"
        _plot_layer(weights[layer], entropies[layer], words, f"layer {layer + 1}", path)


def plot_overview(weights: np.ndarray, entropies: np.ndarray, path: Path) -> None:
    """Plot all heads in one picture, one row per layer, without token labels."""
    n_layer, H, T, _ = weights.shape
    step = T + max(1, round(0.08 * T))
    # One image for all heads: with one panel per head, matplotlib takes twice as long (3.5 s for 12 x 12 heads).
    mosaic = np.zeros((n_layer * step, H * step))
    side = min(2.0, max(0.5, 11 / H))  # inches per head
    fontsize = min(9, 9 * side)
    figure = make_figure(side * H + 1.6, side * n_layer + 0.9)
    axes = figure.subplots()
    for (layer, head), value in np.ndenumerate(entropies):
        x, y = head * step, layer * step
        mosaic[y : y + T, x : x + T] = _mask_future(weights[layer, head])
        axes.text(x + 0.95 * T, y + 0.06 * T, f"{value:.2f}", ha="right", va="top", fontsize=fontsize, color=GREY)
    image = _draw_weights(axes, mosaic, (0, mosaic.shape[1], mosaic.shape[0], 0))
    axes.set_xticks(np.arange(H) * step + T / 2, [f"head {head}" for head in range(1, H + 1)], fontsize=fontsize)
    axes.set_yticks(np.arange(n_layer) * step + T / 2, [f"layer {i}" for i in range(1, n_layer + 1)], fontsize=fontsize)
    axes.tick_params(length=0, labeltop=True, labelbottom=False)
    axes.set_xlabel(f"{T} tokens\nrows: queries, columns: keys; numbers: entropy, nats", fontsize=9, color=GREY)
    _save_with_color_bar(figure, image, axes, path)


def entropy_table(entropies: np.ndarray, uniform: float) -> Table:
    """Table of entropies: one row per layer, one column per head; for many heads, their minimum, mean and maximum.

    uniform: entropy of uniform attention, the maximum, in nats.
    """
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


def format_label(word: str) -> str:
    """A token as an axis label: visible whitespace, no control characters, at most MAX_LABEL_CHARS long."""
    shown = "".join(WHITESPACE_SYMBOLS.get(c, c if c.isprintable() else "�") for c in word)
    return shown if len(shown) <= MAX_LABEL_CHARS else shown[: MAX_LABEL_CHARS - 1] + "…"


def _plot_layer(weights: np.ndarray, entropies: np.ndarray, words: list[str], title: str, path: Path) -> None:
    """Plot one panel per head. weights (H, T, T), entropies (H,)."""
    H, T, _ = weights.shape
    columns = min(H, 4)
    rows = ceil(H / columns)
    labels, side, margin = None, 3.2, 0.4  # inches
    if T <= MAX_LABELED_TOKENS:
        labels = [format_label(word) for word in words]
        side, margin = max(2.6, 0.125 * T), 0.2 + 0.07 * max(map(len, labels))
    figure = make_figure(side * columns + margin + 1.2, (side + 0.3) * rows + margin + 0.3)
    panels = [figure.add_subplot(rows, columns, head + 1) for head in range(H)]
    for head, axes in enumerate(panels):
        image = _draw_weights(axes, _mask_future(weights[head]), (0.5, T + 0.5, T + 0.5, 0.5))
        axes.set_title(f"head {head + 1}, {entropies[head]:.2f} nats", fontsize=10)
        axes.tick_params(length=0, labelsize=7.5)
        for axis, is_outer in ((axes.xaxis, head + columns >= H), (axes.yaxis, head % columns == 0)):
            if not is_outer:
                axis.set_ticks([])
            elif labels is not None:
                axis.set_ticks(range(1, T + 1), labels, family="DejaVu Sans Mono", parse_math=False)
        if labels is not None:
            axes.tick_params(axis="x", rotation=90)
    figure.suptitle(title, fontsize=12)
    figure.supxlabel("key (attended token)", fontsize=9, color=GREY)
    figure.supylabel("query (attending token)", fontsize=9, color=GREY)
    _save_with_color_bar(figure, image, panels, path)


def _mask_future(weights: np.ndarray) -> np.ndarray:
    """Replace the weights of keys after their query by NaN, which is drawn in MASKED_COLOR. weights (..., T, T)."""
    return np.where(np.tri(weights.shape[-1]), weights, np.nan)


def _draw_weights(axes, weights: np.ndarray, extent: tuple[float, ...]):
    """Draw weights with a square-root color scale, because most weights are small. extent: left, right, bottom, top."""
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    colors = LinearSegmentedColormap.from_list("weights", COLORS).with_extremes(bad=MASKED_COLOR)
    axes.spines[:].set_visible(False)
    return axes.imshow(weights, cmap=colors, norm=PowerNorm(0.5, 0, 1), extent=extent)


def _save_with_color_bar(figure, image, panels, path: Path) -> None:
    bar = figure.colorbar(image, ax=panels, ticks=[0, 0.01, 0.05, 0.1, 0.25, 0.5, 1], format="{x:g}", aspect=40)
    bar.set_label("weight", fontsize=9)
    bar.ax.tick_params(labelsize=8)
    bar.outline.set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # characters that the font lacks become boxes
        figure.savefig(path)
