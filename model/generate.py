"""Next-token sampling: filter the distribution, draw, append, repeat."""

from collections.abc import Iterator

import torch
from torch import Tensor

from model.config import SamplingConfig
from model.gpt import GPT


def filtered(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Next-token probabilities (B, V) from logits (B, V), after temperature, then top-k, then top-p.

    temperature: logits are divided by it; 0 is greedy, all probability on the most likely token.
    top_k: only the k most likely stay. top_p: the fewest tokens whose probabilities reach p stay, at least one
    (nucleus sampling, Holtzman et al., arXiv:1904.09751).
    """
    logits, top_k, top_p = logits.float(), sampling.top_k, sampling.top_p
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature  # shifted, or a low one would overflow
    if top_k is not None and top_k < logits.shape[-1]:
        kept = logits.topk(top_k, dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter_(-1, kept.indices, kept.values)
    probabilities = logits.softmax(-1)
    if top_p is not None and top_p < 1:
        ordered, order = probabilities.sort(dim=-1, descending=True)
        before = ordered.cumsum(-1) - ordered  # the mass of what is more likely
        ordered = ordered.masked_fill(before >= top_p, 0.0)
        probabilities = torch.zeros_like(probabilities).scatter_(-1, order, ordered)
        probabilities = probabilities / probabilities.sum(-1, keepdim=True)
    return probabilities


@torch.no_grad()
def generate(model: GPT, prompt: list[int], sampling: SamplingConfig, *, seed: int, end: int | None) -> Iterator[int]:
    """Yield new tokens one by one, until `end` (an end-of-text id, not yielded) or max_new_tokens.

    Past block_size the model sees the last block_size tokens. The seed alone decides the draws: they come from a
    generator of their own, on the CPU, so that the text does not depend on the device's generator.
    """
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    was_training = model.training
    model.eval()
    tokens = torch.tensor([prompt], device=device)
    try:
        for _ in range(sampling.max_new_tokens):
            logits = model(tokens[:, -model.config.block_size :])[:, -1]
            probabilities = filtered(logits, sampling)
            token = int(torch.multinomial(probabilities.cpu(), 1, generator=generator))
            if token == end:
                return
            yield token
            tokens = torch.cat((tokens, torch.tensor([[token]], device=device)), dim=1)
    finally:
        model.train(was_training)
