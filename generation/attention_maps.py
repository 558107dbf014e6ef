"""Attention maps: the attention weights of a model for given tokens, their statistics and plots.

B sequences, T tokens, H query heads. Layers, heads and tokens are numbered from 1.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from math import ceil
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from common.console import print_text
from common.errors import UserError
from common.plots import GREY, MASKED_COLOR, make_figure, save_figure
from data.tokenizer import Tokenizer, encode, token_strings
from model.attention import NON_SOFTMAX
from model.attention.backends import attention_scores, repeat_kv
from model.gpt import GPT

MAX_MAP_TOKENS = 256  # with more, a weight is smaller than a pixel
MAX_LABELED_TOKENS = 40  # with more, the axes show no tokens
MAX_LABEL_CHARS = 14


@torch.no_grad()
def record_attention(
    model: GPT, tokens: Tensor, doc_ids: Tensor | None, measure: Callable[[Tensor], Tensor]
) -> Tensor:
    """Measure each layer's attention scores. The model must be in eval mode.

    The kernels do not store the scores, so the reference formula replaces them meanwhile.

    tokens (1, T): one sequence.
    doc_ids (1, T): document of each token, as for GPT.backbone.
    measure: called with the scores (H, T, T) of a layer, in float32, also under autocast. They are
        the logarithms of the weights, up to a constant per query, and -inf for masked keys.
    Returns the results of all layers, stacked. Raises UserError if T exceeds block_size.
    """
    results = []

    def attend(compute_scores, q, k, v, *, dropout_p=0.0, **masks) -> Tensor:
        dtype = torch.promote_types(q.dtype, torch.float32)
        with torch.autocast(q.device.type, enabled=False):
            scores = compute_scores(q.to(dtype), k.to(dtype), **masks)  # (1, H, T, T)
            results.append(measure(scores[0]))
            values = repeat_kv(v, q.shape[2]).to(dtype).transpose(1, 2)
            y = scores.softmax(-1) @ values
        return y.transpose(1, 2).to(v.dtype)

    layers = [block.attn for block in model.blocks]
    kernels = [layer.attend for layer in layers]
    try:
        for layer in layers:
            other_type = NON_SOFTMAX.get(layer.attention_type)
            compute_scores = attention_scores if other_type is None else other_type.scores
            layer.attend = partial(attend, compute_scores)
        model.backbone(tokens, doc_ids=doc_ids)
    finally:
        for layer, kernel in zip(layers, kernels, strict=True):
            layer.attend = kernel
    return torch.stack(results)


def attention_maps(model: GPT, tokens: Tensor, doc_ids: Tensor | None = None) -> Tensor:
    """Causal attention weights of all layers and heads: tokens (1, T) -> (n_layer, H, T, T).

    Row i has the weights of the keys j <= i for query i, and sums to 1. The weights are in float32
    on the CPU. Arguments and errors: see record_attention.
    """
    scores = record_attention(model, tokens, doc_ids, torch.clone)
    return scores.softmax(-1).float().cpu()


def entropy(weights: Tensor) -> Tensor:
    """Mean entropy of the weights over queries, in nats: -sum_j w_ij log w_ij.

    (..., T, T) -> (...)
    It is 0 if each query attends to one key. exp(entropy) is roughly the number of keys that a
    query attends to. The maximum is the mean of log(i + 1), i < T: uniform attention.
    """
    return torch.special.entr(weights).sum(-1).mean(-1)


def score_variance(scores: Tensor) -> Tensor:
    """Variance of the scores of all visible pairs: (H, T, T) -> (H).

    It is 1 if the components of queries and keys are independent with mean 0 and variance 1
    ("Attention Is All You Need", section 3.2.1).
    """
    is_visible = (scores > -torch.inf).any(0)  # (T, T)
    return scores[:, is_visible].var(-1, correction=0)


def attention_statistics(
    model: GPT, tokens: Tensor, doc_ids: Tensor | None = None
) -> dict[str, float]:
    """Score variance and entropy, as means over layers, heads and sequences.

    tokens (B, T); doc_ids (B, T): see GPT.backbone.
    """

    def measure(scores: Tensor) -> Tensor:
        return torch.stack([score_variance(scores), entropy(scores.softmax(-1))])  # (2, H)

    sequences = []
    for i in range(len(tokens)):  # one sequence at a time, to save memory
        ids = None if doc_ids is None else doc_ids[i : i + 1]
        sequences.append(record_attention(model, tokens[i : i + 1], ids, measure))
    means = torch.stack(sequences).mean(dim=(0, 1, 3)).tolist()
    return {"attention/score_variance": means[0], "attention/entropy": means[1]}


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
    for layer, layer_weights in enumerate(weights.split(1), start=1):
        plot_attention(layer_weights, folder / f"layer-{layer:02d}.png", words, layer)
    files = f"{folder}/layer-*.png, overview.png"
    print_text(f"written  {files} of the last {len(tokens)} tokens", stderr=True)


def plot_attention(
    weights: Tensor, path: Path, words: Sequence[str] = (), first_layer: int = 1
) -> None:
    """Plot the attention weights of all heads in one picture, with the entropy of each head.

    weights (n_layer, H, T, T): row i has the weights of all keys for query i.
    path: picture to write.
    words: tokens that label the axes, from token_strings. Without them, or with too many, each
        layer is a row of small panels.
    first_layer: number of the first layer.
    """
    from matplotlib import colormaps  # a slow import
    from matplotlib.colors import PowerNorm

    n_layer, H, T, _ = weights.shape
    labels = [f"'{word}'"[:MAX_LABEL_CHARS] for word in words if T <= MAX_LABELED_TOKENS]
    columns = min(H, 4) if labels else H
    panel_inches = max(2.6, 0.125 * T) if labels else min(2.0, max(0.5, 11 / H))
    rows = ceil(n_layer * H / columns)
    figure = make_figure(panel_inches * columns + 1.6, panel_inches * rows + 0.9)
    # Most weights are small, so the color scale is their square root.
    scale = PowerNorm(0.5, 0, 1)
    colors = colormaps["Blues"].with_extremes(bad=MASKED_COLOR)
    font = {"fontsize": 7.5, "family": "DejaVu Sans Mono", "parse_math": False}
    for panel, head_weights in enumerate(weights.flatten(0, 1)):
        axes = figure.add_subplot(rows, columns, panel + 1)
        masked = np.where(np.tri(T), head_weights, np.nan)  # keys after their query are grey
        image = axes.imshow(masked, cmap=colors, norm=scale)
        axes.spines[:].set_visible(False)
        axes.set_xticks(range(len(labels)), labels, rotation=90, **font)
        axes.set_yticks(range(len(labels)), labels, **font)
        axes.tick_params(length=0)
        layer = first_layer + panel // H
        title = f"layer {layer}\nhead {panel % H + 1}\n{entropy(head_weights):.2f}"
        place = {"x": 0.95, "y": 0.94, "ha": "right", "va": "top", "transform": axes.transAxes}
        axes.text(s=title, fontsize=min(9, 5 * panel_inches), color=GREY, **place)
    figure.supxlabel(
        f"{T} tokens\nrows: queries, columns: keys; numbers: entropy, nats", fontsize=9, color=GREY
    )
    figure.colorbar(
        image,
        ax=figure.axes,
        ticks=[0, 0.01, 0.1, 0.25, 0.5, 1],
        format="{x:g}",
        aspect=40,
        label="weight",
    )
    with warnings.catch_warnings():
        # Characters that the font lacks become boxes.
        warnings.filterwarnings("ignore", message="Glyph")
        save_figure(figure, path)
