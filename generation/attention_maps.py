"""Attention maps: the attention weights of a model for given tokens, their statistics and plots.

B sequences, T tokens, H query heads. Layers and heads are numbered from 1 in plots.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from common.plots import make_figure, save_figure
from data.tokenizer import Tokenizer, token_strings
from model.attention import NON_SOFTMAX
from model.attention.backends import attention_scores
from model.attention.linear import at_least_float32
from model.gpt import GPT

MAX_MAP_TOKENS = 256  # with more, a weight is smaller than a pixel
MAX_LABELED_TOKENS = 32  # with more, the axes show no tokens
MAX_LABEL_CHARS = 14


@torch.no_grad()
def record_attention(
    model: GPT, tokens: Tensor, doc_ids: Tensor | None, measure: Callable[[Tensor], Tensor]
) -> Tensor:
    """Measure each layer's attention scores. The model must be in eval mode.

    The kernels do not store the scores, so the reference formula computes them again.

    tokens, doc_ids (B, T): as for GPT.backbone.
    measure: called with the scores (B, H, T, T) of a layer, in float32, also under autocast. They
        are the logarithms of the weights, up to a constant per query, and -inf for masked keys.
    Returns the results of all layers, stacked. Raises UserError if T exceeds block_size.
    """
    results = []

    def attend(kernel, compute_scores, q, k, v, *, dropout_p, **masks) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            scores = compute_scores(at_least_float32(q), at_least_float32(k), **masks)
            results.append(measure(scores))
        return kernel(q, k, v, dropout_p=dropout_p, **masks)

    layers = [block.attn for block in model.blocks]
    kernels = [layer.attend for layer in layers]
    try:
        for layer in layers:
            other_type = NON_SOFTMAX.get(layer.attention_type)
            compute_scores = attention_scores if other_type is None else other_type.scores
            layer.attend = partial(attend, layer.attend, compute_scores)
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
    return scores[:, 0].softmax(-1).float().cpu()


def entropy(weights: Tensor) -> Tensor:
    """Mean entropy of the weights over queries, in nats: -sum_j w_ij log w_ij.

    (..., T, T) -> (...)
    It is 0 if each query attends to one key. exp(entropy) is roughly the number of keys that a
    query attends to. The maximum is the mean of log(i + 1), i < T: uniform attention.
    """
    return torch.special.entr(weights).sum(-1).mean(-1)


def score_variance(scores: Tensor) -> Tensor:
    """Variance of the scores of all visible pairs of all sequences: (B, H, T, T) -> (H).

    It is 1 if the components of queries and keys are independent with mean 0 and variance 1
    ("Attention Is All You Need", section 3.2.1).
    """
    is_visible = (scores > -torch.inf).any(1)  # (B, T, T)
    return scores.transpose(0, 1)[:, is_visible].var(-1, correction=0)


def attention_statistics(
    model: GPT, tokens: Tensor, doc_ids: Tensor | None = None
) -> dict[str, float]:
    """Score variance and entropy, as means over layers, heads and sequences.

    tokens, doc_ids (B, T): as for GPT.backbone.
    """

    def measure(scores: Tensor) -> Tensor:
        weights = scores.softmax(-1)
        return torch.stack([score_variance(scores).mean(), entropy(weights).mean()])

    sequences = []
    for i in range(len(tokens)):  # one sequence at a time, to save memory
        ids = None if doc_ids is None else doc_ids[i : i + 1]
        sequences.append(record_attention(model, tokens[i : i + 1], ids, measure))
    means = torch.stack(sequences).mean(dim=(0, 1)).tolist()
    return {"attention/score_variance": means[0], "attention/entropy": means[1]}


def draw_attention(model: GPT, tokenizer: Tokenizer, tokens: list[int], path: Path) -> None:
    """Plot the attention weights for the last tokens of a prompt."""
    tokens = tokens[-min(model.config.block_size, MAX_MAP_TOKENS) :]
    weights = attention_maps(model, torch.tensor([tokens], device=model.wte.weight.device))
    plot_attention(weights, path, token_strings(tokenizer, tokens))


def plot_attention(weights: Tensor, path: Path, words: Sequence[str] = ()) -> None:
    """Plot attention weights: a row of panels per layer, and a panel with its entropy per head.

    weights (n_layer, H, T, T): row i has the weights of all keys for query i.
    path: picture to write.
    words: tokens that label the axes, from token_strings. Without them, or with too many, the axes
        have no labels.
    """
    from matplotlib.colors import PowerNorm  # a slow import

    n_layer, H, T, _ = weights.shape
    labels = [f"'{word}'"[:MAX_LABEL_CHARS] for word in words if T <= MAX_LABELED_TOKENS]
    font = {"fontsize": 7.5, "family": "DejaVu Sans Mono", "parse_math": False}
    panel_inches = max(2.0, len(labels) / 8) if labels else min(2.0, max(0.5, 11 / H))
    figure = make_figure(panel_inches * H + 2, panel_inches * n_layer + 1)
    panels = figure.subplots(n_layer, H, sharex=True, sharey=True, squeeze=False)
    for layer in range(n_layer):
        for head in range(H):
            axes = panels[layer, head]
            head_weights = weights[layer, head]
            # Most weights are small, so the color scale is their square root.
            image = axes.imshow(head_weights.numpy(), cmap="Blues", norm=PowerNorm(0.5, 0, 1))
            title = f"layer {layer + 1}, head {head + 1}: {entropy(head_weights):.2f} nats"
            axes.set_title(title, fontsize=min(7, 5 * panel_inches))
            axes.set_xticks(range(len(labels)), labels, rotation=90, **font)
            axes.set_yticks(range(len(labels)), labels, **font)
    figure.supxlabel("rows: queries, columns: keys; numbers: entropy", fontsize=9)
    figure.colorbar(image, ax=panels, label="weight")
    save_figure(figure, path)
