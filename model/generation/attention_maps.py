"""Attention weights of a model for given tokens, and statistics of each head. T tokens, H query heads.

model, tokenizer = load_run("mine")  # model/generation/load.py
weights = attention_maps(model, torch.tensor([tokenizer.encode("def main(x):")]))
weights[2, 0]  # third layer, first head: (T, T), rows are queries and columns are keys
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from model.attention.backends import attention_scores, repeat_kv
from model.attention.head_statistics import STATISTICS, entropy, head_statistics
from model.attention.linear import linear_attention_scores
from model.gpt import GPT

SCORES = {"softmax": attention_scores, "linear": linear_attention_scores}  # by model.attention_type


@torch.no_grad()
def record_attention(model: GPT, tokens: Tensor, doc_ids: Tensor | None, measure: Callable[[Tensor], Tensor]) -> Tensor:
    """Call measure(scores) for each layer, with the scores (H, T, T) for tokens (1, T) -> the results, stacked.

    The reference formula computes the scores, because kernels do not store them. They are float32, also under autocast.
    There is no dropout.
    doc_ids (1, T): document of each token, as for GPT.backbone.
    Raises UserError if T exceeds block_size.
    """
    results = []

    def record(compute_scores, q, k, v, *, dropout_p=0.0, **options) -> Tensor:  # window, positions, doc_ids, softcap
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


def attention_statistics(model: GPT, tokens: Tensor, doc_ids: Tensor | None = None) -> dict[str, float]:
    """Statistics of each head as metrics, means over sequences: tokens (B, T) -> {"attention/entropy/layer-1/head-1"}.

    "attention/entropy" and so on are the means over layers and heads. One sequence at a time is in memory. A value is
    NaN, and not part of a mean, if no query sees an earlier key.
    """
    documents = [None] * len(tokens) if doc_ids is None else doc_ids.split(1)
    sequences = zip(tokens.split(1), documents, strict=True)
    values = [record_attention(model, x, ids, head_statistics) for x, ids in sequences]
    values = torch.stack(values).nanmean(0)  # (n_layer, 5, H)
    metrics = {}
    for i, name in enumerate(STATISTICS):
        metrics[f"attention/{name}"] = values[:, i].nanmean().item()
        for layer, heads in enumerate(values[:, i].tolist(), start=1):
            for head, value in enumerate(heads, start=1):
                metrics[f"attention/{name}/layer-{layer}/head-{head}"] = value
    return metrics


def layer_entropies(weights: Tensor) -> dict[str, float]:
    """Mean entropy of each layer's heads, as metrics: (n_layer, H, T, T) -> {"entropy/layer-1": nats, ...}."""
    return {f"entropy/layer-{i}": value for i, value in enumerate(entropy(weights).mean(-1).tolist(), start=1)}
