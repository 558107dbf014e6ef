"""Attention weights of a model for given tokens, and statistics of each head. T tokens, H query heads."""

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
    """Measure each layer's attention scores, without dropout. Returns the results of all layers, stacked.

    tokens (1, T): one sequence.
    doc_ids (1, T): document of each token, as for GPT.backbone.
    measure: called with the scores (H, T, T) of a layer, in float32, also under autocast.
    Raises UserError if T exceeds block_size.
    """
    results = []

    # Kernels do not store the scores, so the reference formula computes them.
    def record(
        compute_scores, q, k, v, *, dropout_p=0.0, **options
    ) -> Tensor:  # window, positions, doc_ids, softcap
        dtype = torch.promote_types(q.dtype, torch.float32)
        with torch.autocast(q.device.type, enabled=False):
            scores = compute_scores(q.to(dtype), k.to(dtype), **options)
            results.append(measure(scores[0]))
            y = scores.softmax(-1) @ repeat_kv(v, q.shape[2]).to(dtype).transpose(1, 2)
        return y.transpose(1, 2).to(v.dtype)

    layers = [block.attn for block in model.blocks]
    functions, was_training = [layer.attend for layer in layers], model.training
    model.eval()
    try:
        for layer in layers:
            layer.attend = partial(record, SCORES[layer.attention_type])
        model.backbone(tokens, doc_ids=doc_ids)
    finally:
        for layer, attend in zip(layers, functions, strict=True):
            layer.attend = attend
        model.train(was_training)
    return torch.stack(results)


def attention_maps(model: GPT, tokens: Tensor, doc_ids: Tensor | None = None) -> Tensor:
    """Causal attention weights of all layers and heads: tokens (1, T) -> (n_layer, H, T, T), float32 on the CPU.

    Row i has the weights of the keys j <= i for query i, and sums to 1. Arguments and errors: see record_attention.
    """
    return record_attention(model, tokens, doc_ids, lambda scores: scores.softmax(-1).float().cpu())


def attention_statistics(
    model: GPT, tokens: Tensor, doc_ids: Tensor | None = None
) -> dict[str, float]:
    """Statistics of each head as metrics: tokens (B, T) -> {"attention/entropy/layer-1/head-1": 2.3, ...}.

    Values are means over the B sequences. "attention/entropy" and so on are the means over layers and heads. A value
    is NaN if no query sees an earlier key; means ignore it.
    """
    documents = [None] * len(tokens) if doc_ids is None else doc_ids.split(1)
    sequences = zip(tokens.split(1), documents, strict=True)  # one at a time, to save memory
    values = [record_attention(model, x, ids, head_statistics) for x, ids in sequences]
    values = torch.stack(values).nanmean(0)  # (n_layer, 5, H)
    metrics = {}
    for i, name in enumerate(STATISTICS):
        metrics[f"attention/{name}"] = values[:, i].nanmean().item()
        for layer, heads in enumerate(values[:, i].tolist(), start=1):
            for head, value in enumerate(heads, start=1):
                metrics[f"attention/{name}/layer-{layer}/head-{head}"] = value
    return metrics
