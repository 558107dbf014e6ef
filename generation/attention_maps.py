"""Attention weights of a model for given tokens, and statistics of each head.

T tokens, H query heads.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from generation.head_statistics import STATISTICS, head_statistics
from model.attention.backends import attention_scores, repeat_kv
from model.attention.linear import linear_attention_scores
from model.gpt import GPT

SCORES = {"softmax": attention_scores, "linear": linear_attention_scores}  # by model.attention_type


@torch.no_grad()
def record_attention(
    model: GPT, tokens: Tensor, doc_ids: Tensor | None, measure: Callable[[Tensor], Tensor]
) -> Tensor:
    """Measure each layer's attention scores, without dropout.

    The kernels do not store the scores, so the reference formula replaces them meanwhile.

    tokens (1, T): one sequence.
    doc_ids (1, T): document of each token, as for GPT.backbone.
    measure: called with the scores (H, T, T) of a layer, in float32, also under autocast.
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
    was_training = model.training
    model.eval()
    try:
        for layer in layers:
            layer.attend = partial(attend, SCORES[layer.attention_type])
        model.backbone(tokens, doc_ids=doc_ids)
    finally:
        for layer, kernel in zip(layers, kernels, strict=True):
            layer.attend = kernel
        model.train(was_training)
    return torch.stack(results)


def softmax_on_cpu(scores: Tensor) -> Tensor:
    """Attention weights of scores, in float32 on the CPU."""
    return scores.softmax(-1).float().cpu()


def attention_maps(model: GPT, tokens: Tensor, doc_ids: Tensor | None = None) -> Tensor:
    """Causal attention weights of all layers and heads: tokens (1, T) -> (n_layer, H, T, T).

    Row i has the weights of the keys j <= i for query i, and sums to 1. The weights are in float32
    on the CPU. Arguments and errors: see record_attention.
    """
    return record_attention(model, tokens, doc_ids, softmax_on_cpu)


def attention_statistics(model: GPT, tokens: Tensor, doc_ids: Tensor | None = None) -> Tensor:
    """All STATISTICS of each head, as means over sequences (n_layer, 5, H).

    tokens (B, T); doc_ids (B, T): see GPT.backbone.
    A value is NaN if no query sees an earlier key; means ignore it.
    """
    per_sequence = []
    for i in range(len(tokens)):  # one sequence at a time, to save memory
        ids = None if doc_ids is None else doc_ids[i : i + 1]
        per_sequence.append(record_attention(model, tokens[i : i + 1], ids, head_statistics))
    return torch.stack(per_sequence).nanmean(0)


def name_statistics(values: Tensor) -> dict[str, float]:
    """The statistics of all heads as metrics: {"attention/entropy/layer_1/head_1": 2.3, ...}.

    values (n_layer, 5, H).
    "attention/entropy" and so on are the means over layers and heads.
    """
    metrics = {}
    for i, name in enumerate(STATISTICS):
        metrics[f"attention/{name}"] = values[:, i].nanmean().item()
        for layer, heads in enumerate(values[:, i].tolist(), start=1):
            for head, value in enumerate(heads, start=1):
                metrics[f"attention/{name}/layer_{layer}/head_{head}"] = value
    return metrics
