"""Plots of attention weights. T tokens, H query heads. Layers, heads and tokens are numbered from 1."""

import warnings
from math import ceil
from pathlib import Path

import numpy as np
import tiktoken
import torch
from torch import Tensor

from common.console import print_text
from common.errors import UserError
from common.plots import GREY, MASKED_COLOR, make_figure
from data.tokenizer import encode, token_strings
from generation.attention_maps import attention_maps
from generation.head_statistics import entropy, uniform_entropy
from model.gpt import GPT

MAX_MAP_TOKENS = 256  # with more, a weight is smaller than a pixel
MAX_LABELED_TOKENS = 40  # with more, the axes show no tokens
MAX_LABEL_CHARS = 14


def draw_attention_maps(model: GPT, tokenizer: tiktoken.Encoding, text: str, folder: Path) -> None:
    """Plot the attention weights for the last tokens of a text. Raises UserError if it has fewer than two tokens.

    overview.png shows all heads; layer-01.png, ... show one layer.
    """
    tokens = encode(tokenizer, text, "the prompt")[
        -min(model.config.block_size, MAX_MAP_TOKENS) :
    ].tolist()
    if len(tokens) < 2:
        raise UserError(
            "attention_map=true needs at least two tokens; set a longer prompt, or none"
        )
    weights = attention_maps(model, torch.tensor([tokens], device=model.wte.weight.device))
    plot_attention(weights, folder / "overview.png")
    words = token_strings(tokenizer, tokens)
    for layer in range(1, len(weights) + 1):
        plot_attention(
            weights[layer - 1 : layer], folder / f"layer-{layer:02d}.png", words, first=layer
        )
    written = f"written  {folder}/layer-*.png, overview.png of the last {len(tokens)} tokens"
    print_text(
        f"{written}; entropy of uniform attention: {uniform_entropy(len(tokens)):.2f} nats",
        stderr=True,
    )


def plot_attention(
    weights: Tensor, path: Path, words: list[str] | None = None, first: int = 1
) -> None:
    """Plot the attention weights of all heads in one picture, with the entropy of each head.

    weights (n_layer, H, T, T): row i has the weights of all keys for query i.
    path: picture to write.
    words: tokens that label the axes, from token_strings. Without them, each layer is a row of heads.
    first: number of the first layer.
    """
    from matplotlib import colormaps  # a slow import
    from matplotlib.colors import PowerNorm

    n_layer, H, T, _ = weights.shape
    labels = (
        [f"'{word}'"[:MAX_LABEL_CHARS] for word in words]
        if words is not None and T <= MAX_LABELED_TOKENS
        else []
    )
    columns = min(H, 4) if labels else H
    rows, step = ceil(n_layer * H / columns), T + max(1, round(0.08 * T))
    side = max(2.6, 0.125 * T) if labels else min(2.0, max(0.5, 11 / columns))  # inches per head
    figure = make_figure(side * columns + 1.6, side * rows + 0.9)
    axes = figure.subplots()
    # One image for all heads: with one panel per head, matplotlib takes twice as long (3.5 s for 12 x 12 heads).
    mosaic, entropies = np.zeros((rows * step, columns * step)), entropy(weights)
    for index, (layer, head) in enumerate(np.ndindex(n_layer, H)):
        y, x = index // columns * step, index % columns * step
        mosaic[y : y + T, x : x + T] = np.where(np.tri(T), weights[layer, head], np.nan)
        title = f"layer {first + layer}\nhead {head + 1}\n{entropies[layer, head]:.2f}"
        axes.text(
            x + 0.95 * T,
            y + 0.06 * T,
            title,
            ha="right",
            va="top",
            fontsize=min(9, 5 * side),
            color=GREY,
        )
    # a square-root color scale, because most weights are small; keys after their query are grey
    colors, extent = (
        colormaps["Blues"].with_extremes(bad=MASKED_COLOR),
        (0, columns * step, rows * step, 0),
    )
    image = axes.imshow(mosaic, cmap=colors, norm=PowerNorm(0.5, 0, 1), extent=extent)
    axes.spines[:].set_visible(False)
    for axis, count in ((axes.xaxis, columns), (axes.yaxis, rows)):
        ticks = [
            panel * step + token + 0.5 for panel in range(count) for token in range(len(labels))
        ]
        axis.set_ticks(ticks, labels * count, family="DejaVu Sans Mono", parse_math=False)
    axes.tick_params(length=0, labelsize=7.5)
    axes.tick_params(axis="x", rotation=90)
    axes.set_xlabel(
        f"{T} tokens\nrows: queries, columns: keys; numbers: entropy, nats", fontsize=9, color=GREY
    )
    figure.colorbar(
        image,
        ax=axes,
        ticks=[0, 0.01, 0.1, 0.25, 0.5, 1],
        format="{x:g}",
        aspect=40,
        label="weight",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", message="Glyph"
        )  # characters that the font lacks become boxes
        figure.savefig(path)
