"""From logits to the next token: what is left out, and the draw.

n texts, V vocabulary.
"""

import torch
from torch import Tensor

from model.generation.config import SamplingConfig


def apply_repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits (n, V), those of tokens that a text already has (seen (n, V) bool) divided by `penalty` where positive
    and times it where negative: less likely either way (CTRL, Keskar et al., arXiv:1909.05858).
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def filtered_probs(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Next-token probabilities (n, V) from logits (n, V), after temperature, then top-k, top-p and min-p.

    temperature: logits are divided by it; 0 is greedy, all probability on the most likely token.
    top_k: only the k most likely stay. top_p: the fewest tokens whose probabilities reach p stay, at least one
    (nucleus sampling, Holtzman et al., arXiv:1904.09751). min_p: those stay that are at least this fraction as likely
    as the most likely one (Nguyen et al., arXiv:2407.01082).
    """
    logits, top_k, top_p, min_p = logits.float(), sampling.top_k, sampling.top_p, sampling.min_p
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    if top_k is not None and top_k < logits.shape[-1]:
        kept = logits.topk(top_k, dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter_(-1, kept.indices, kept.values)
    logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature  # shifted, or a low one would overflow
    probabilities = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # the mass of what is more likely
        ordered = ordered.masked_fill(before >= top_p, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter_(-1, order, ordered)
    if min_p is not None:
        probabilities = probabilities.masked_fill(probabilities < min_p * probabilities.amax(-1, keepdim=True), 0.0)
    return probabilities / probabilities.sum(-1, keepdim=True)


def sample_inverse_cdf(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The token at which the sum of probabilities (n, V) exceeds uniform (n), float32 numbers from 0 to below 1 -> (n).

    So a number decides a draw, the same on every device, alone or beside others. One of probability 0 is never drawn.
    """
    below = probabilities.double().cumsum(-1)
    reached = uniform.double().unsqueeze(1) * below[:, -1:]
    return torch.searchsorted(below, reached, right=True)[:, 0]


def sample_next_token(logits: Tensor, sampling: SamplingConfig, uniform: Tensor, seen: Tensor | None) -> Tensor:
    """The next tokens (n) from logits (n, V). seen None: no penalty."""
    logits = logits.float()
    if logits.device.type == "mps" or torch.are_deterministic_algorithms_enabled():
        # MPS has no float64, and CUDA no sums in the same order each time.
        logits, uniform, seen = logits.cpu(), uniform.cpu(), None if seen is None else seen.cpu()
    if seen is not None:
        logits = apply_repetition_penalty(logits, seen, sampling.repetition_penalty)
    return (
        logits.argmax(-1)
        if sampling.temperature == 0
        else sample_inverse_cdf(filtered_probs(logits, sampling), uniform)
    )
