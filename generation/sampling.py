"""From logits to tokens (temperature, top-k, top-p, min-p, one draw), and from tokens to text.

B batch, V vocabulary.
"""

import codecs

import torch
from torch import Tensor

from data.tokenizer import Tokenizer, token_to_bytes
from generation.config import SamplingConfig


def filtered_probs(logits: Tensor, sampling: SamplingConfig) -> Tensor:
    """Next-token probabilities after temperature (not 0), top-k, top-p and min-p: (B, V) -> (B, V).

    top_k: keeps the k most likely tokens.
    top_p: keeps the smallest set whose probabilities sum to p (nucleus sampling, Holtzman et al.,
        arXiv:1904.09751).
    min_p: keeps tokens whose probability is at least min_p times the largest one (Nguyen et al.,
        arXiv:2407.01082).
    """
    if sampling.top_k is not None and sampling.top_k < logits.shape[-1]:
        kept = logits.topk(sampling.top_k, dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter_(-1, kept.indices, kept.values)
    # Subtract the maximum first: otherwise, a low temperature overflows.
    logits = (logits - logits.amax(-1, keepdim=True)) / sampling.temperature
    probs = logits.softmax(-1)
    if sampling.top_p is not None and sampling.top_p < 1:
        sorted_probs, order = probs.sort(dim=-1, descending=True)
        mass_before = sorted_probs.cumsum(-1) - sorted_probs  # of all more likely tokens
        sorted_probs = sorted_probs.masked_fill(mass_before >= sampling.top_p, 0.0)
        probs = torch.zeros_like(probs).scatter_(-1, order, sorted_probs)
    if sampling.min_p is not None:
        smallest_kept = sampling.min_p * probs.amax(-1, keepdim=True)
        probs = probs.masked_fill(probs < smallest_kept, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def sample_inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """Draw a token from each row of probs (B, V) by inverse transform sampling -> (B).

    A token of probability 0 is never drawn.
    uniform (B): random numbers in [0, 1), one per draw, so a sample depends only on its seed.
    """
    cdf = probs.double().cumsum(-1)
    threshold = uniform.double().unsqueeze(1) * cdf[:, -1:]
    return torch.searchsorted(cdf, threshold, right=True)[:, 0]


def sample_next_token(logits: Tensor, sampling: SamplingConfig, uniform: Tensor) -> Tensor:
    """Sample the next tokens (B) from logits (B, V). A row with NaN gives the invalid token V.

    uniform (B): a random number in [0, 1) for each row.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        return logits.argmax(-1).masked_fill(logits.isnan().any(-1), logits.shape[-1])
    # MPS has no float64, and cumsum on CUDA is not deterministic.
    if logits.device.type == "mps" or torch.are_deterministic_algorithms_enabled():
        logits = logits.cpu()
        uniform = uniform.cpu()
    return sample_inverse_cdf(filtered_probs(logits, sampling), uniform)


class IncrementalDetokenizer:
    """Converts tokens to complete characters, one token at a time, and finds the end of the sample.

    With stop strings, the last characters are held back until the following tokens decide.
    end_token: id of the end-of-text token, or None.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingConfig, end_token: int | None):
        self.tokenizer = tokenizer
        self.end_token = end_token
        self.max_new_tokens = sampling.max_new_tokens
        self.stop_strings = sampling.stop_strings
        # the last characters, which may begin the longest stop string
        self.num_held_back = max(map(len, self.stop_strings), default=1) - 1
        self.utf8_decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.pending = ""  # may be the beginning of a stop string
        self.n_tokens = 0  # so far, without the end-of-text token

    def push(self, token: int) -> tuple[str, str | None]:
        """Add a token. Returns the text that can be shown now, and TextChunk's finish reason.

        An incomplete character at the end of a sample is dropped.
        """
        if token == self.end_token:
            return self.pending, "end"
        self.n_tokens += 1
        self.pending += self.utf8_decoder.decode(token_to_bytes(self.tokenizer, token))
        found = []  # (end, start) of stop strings
        for stop in self.stop_strings:
            start = self.pending.find(stop)
            if start >= 0:
                found.append((start + len(stop), start))
        if found:
            _, start = min(found)  # of the stop string that ends first
            return self.pending[:start], "stop"
        if self.n_tokens == self.max_new_tokens:
            return self.pending, "length"
        shown = max(0, len(self.pending) - self.num_held_back)
        text = self.pending[:shown]
        self.pending = self.pending[shown:]
        return text, None
