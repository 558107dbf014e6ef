"""Plots of attention weights.

T tokens, H query heads. Layers, heads and tokens are numbered from 1.
"""

import warnings
from math import ceil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.console import print_text
from common.errors import UserError
from common.plots import GREY, MASKED_COLOR, make_figure, save_figure
from data.tokenizer import Tokenizer, encode, token_strings
from generation.attention_maps import attention_maps
from generation.head_statistics import STATISTICS, entropy
from model.gpt import GPT

MAX_MAP_TOKENS = 256  # with more, a weight is smaller than a pixel
MAX_LABELED_TOKENS = 40  # with more, the axes show no tokens
MAX_LABEL_CHARS = 14


def draw_attention_maps(model: GPT, tokenizer: Tokenizer, text: str, folder: Path) -> None:
    """Plot the attention weights for the last tokens of a text, and print where the plots are.

    overview.png shows all heads; layer-01.png, layer-02.png, ... show one layer.
    Raises UserError if the text has fewer than two tokens.
    """
    length = min(model.config.block_size, MAX_MAP_TOKENS)
    tokens = encode(tokenizer, text, "the prompt")[-length:].tolist()
    if len(tokens) < 2:
        raise UserError("attention_map=true needs at least two tokens; set a longer prompt")
    weights = attention_maps(model, torch.tensor([tokens], device=model.wte.weight.device))
    plot_attention(weights, folder / "overview.png")
    words = token_strings(tokenizer, tokens)
    for index, layer_weights in enumerate(weights.split(1)):
        path = folder / f"layer-{index + 1:02d}.png"
        plot_attention(layer_weights, path, words, first_layer=index + 1)
    files = f"{folder}/layer-*.png, overview.png"
    print_text(f"written  {files} of the last {len(tokens)} tokens", stderr=True)


def plot_attention(
    weights: Tensor, path: Path, words: list[str] | None = None, first_layer: int = 1
) -> None:
    """Plot the attention weights of all heads in one picture, with the entropy of each head.

    weights (n_layer, H, T, T): row i has the weights of all keys for query i.
    path: picture to write.
    words: tokens that label the axes, from token_strings. Without them, each layer is a row of
        small panels.
    first_layer: number of the first layer.
    """
    from matplotlib import colormaps  # a slow import
    from matplotlib.colors import PowerNorm

    n_layer, H, T, _ = weights.shape
    labels = []
    columns = H
    panel_inches = min(2.0, max(0.5, 11 / H))
    if words is not None and T <= MAX_LABELED_TOKENS:
        labels = [f"'{word}'"[:MAX_LABEL_CHARS] for word in words]
        columns = min(H, 4)
        panel_inches = max(2.6, 0.125 * T)
    rows = ceil(n_layer * H / columns)
    step = T + max(1, round(0.08 * T))  # from a panel to the next one, in weights
    figure = make_figure(panel_inches * columns + 1.6, panel_inches * rows + 0.9)
    axes = figure.subplots()
    # All panels are one image: with one image per panel, matplotlib takes twice as long (3.5 s for
    # 12 x 12 heads).
    image = np.full((rows * step, columns * step), -1.0)
    entropies = entropy(weights)
    style = {"ha": "right", "va": "top", "fontsize": min(9, 5 * panel_inches), "color": GREY}
    for panel, (layer, head) in enumerate(np.ndindex(n_layer, H)):
        row, column = divmod(panel, columns)
        y = row * step
        x = column * step
        image[y : y + T, x : x + T] = np.where(np.tri(T), weights[layer, head], np.nan)
        title = f"layer {first_layer + layer}\nhead {head + 1}\n{entropies[layer, head]:.2f}"
        axes.text(x + 0.95 * T, y + 0.06 * T, title, **style)
    # Most weights are small, so the color scale is their square root. Keys after their query (NaN)
    # are grey, and the gaps between panels (-1) are white.
    mesh = axes.imshow(
        image,
        cmap=colormaps["Blues"].with_extremes(bad=MASKED_COLOR, under="white"),
        norm=PowerNorm(0.5, 0, 1),
        extent=(0, columns * step, rows * step, 0),
    )
    axes.spines[:].set_visible(False)
    for axis, count in ((axes.xaxis, columns), (axes.yaxis, rows)):
        panel_starts = step * np.arange(count)[:, None]
        ticks = panel_starts + np.arange(len(labels)) + 0.5
        axis.set_ticks(ticks.ravel(), labels * count, family="DejaVu Sans Mono", parse_math=False)
    axes.tick_params(length=0, labelsize=7.5)
    axes.tick_params(axis="x", rotation=90)
    axes.set_xlabel(
        f"{T} tokens\nrows: queries, columns: keys; numbers: entropy, nats", fontsize=9, color=GREY
    )
    figure.colorbar(
        mesh,
        ax=axes,
        ticks=[0, 0.01, 0.1, 0.25, 0.5, 1],
        format="{x:g}",
        aspect=40,
        label="weight",
    )
    with warnings.catch_warnings():
        # Characters that the font lacks become boxes.
        warnings.filterwarnings("ignore", message="Glyph")
        save_figure(figure, path)


def plot_head_statistics(values: Tensor, path: Path) -> None:
    """Plot the statistics of all heads: one heat map per statistic, layers over heads.

    values (n_layer, 5, H): of attention_statistics.
    path: picture to write.
    """
    n_layer, _, H = values.shape
    figure = make_figure(11, 1.6 + 0.18 * n_layer)
    panels = figure.subplots(1, len(STATISTICS), sharey=True)
    tables = values.numpy().swapaxes(0, 1)  # (5, n_layer, H)
    for axes, name, table in zip(panels, STATISTICS, tables, strict=True):
        heat_map = axes.imshow(table, aspect="auto", extent=(0.5, H + 0.5, n_layer + 0.5, 0.5))
        axes.set_title(name.replace("_", " "), fontsize=9)
        axes.set_xlabel("head")
        for axis in (axes.xaxis, axes.yaxis):
            axis.get_major_locator().set_params(integer=True)
        figure.colorbar(heat_map, ax=axes, location="top", format="{x:.2g}")
    panels[0].set_ylabel("layer")
    save_figure(figure, path)
