"""Small models for generation tests, and references that generate without a KV cache."""

from dataclasses import replace

import torch
from helpers import BYTE, sampling
from model_helpers import GPT2, GROUPED, MODERN, make_model

from data import tokenizer
from generation.engine import Engine, Prompt
from generation.load import model_from_weights
from model import GPTConfig
from model.attention import linear_attention_scores, naive
from model.attention.backends import repeat_kv
from model.gpt import GPT

BYTES = tokenizer.build_tokenizer(BYTE, [], has_several_documents=False)
WINDOWED = GROUPED | dict(window=[5, None])
MIXED = GROUPED | dict(attention_type=["linear", "softmax"])
VARIANTS = {
    "gpt2": GPT2,
    "modern": MODERN,
    "grouped": GROUPED,
    "windowed": WINDOWED,
    "half rotated": GROUPED | dict(key_offset=False, rotary_fraction=0.5),
    "offset, all rotated": WINDOWED | dict(rotary_fraction=1.0),
    "offset": GPT2 | dict(key_offset=True),
    "one": GPT2 | dict(block_size=1, key_offset=True),
    "linear": GPT2 | dict(attention_type="linear"),
    "mixed": MIXED,
}


def make_random_model(variant, attend=naive, dtype=torch.float32, V=256):
    """A model in eval mode with large random weights, so that logits differ widely.

    N-grams and biases are nonzero.
    """
    torch.manual_seed(0)
    model = GPT(GPTConfig(**variant), V, attend).requires_grad_(False)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    return model.to(dtype).eval()


def make_peaked_model(variant, **options):
    """A model whose attention is not uniform, as it nearly is at initialisation."""
    model = make_model(variant, **options)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                torch.nn.init.normal_(p, std=0.3)
    return model


def windowed_linear_attention(q, k, v, *, dropout_p, softcap, **masks):
    """Linear attention by its weights, for any mask."""
    weights = linear_attention_scores(q, k, **masks).softmax(-1)
    return (weights @ repeat_kv(v, q.shape[2]).transpose(1, 2)).transpose(1, 2)


def logits_without_cache(model, tokens, first):
    """Next-token logits (N, V) after tokens[:first] and all longer prefixes.

    The definition is in generation/engine.py. With rotary positions, each layer sees at most
    block_size tokens, or its window. With learned positions, the last half of block_size is read
    again when the context is full.
    """
    T = model.config.block_size
    if model.wpe is None:
        windows = [window or T for window in model.config.windows]
        config = replace(model.config, block_size=4 * T, window=windows)
        longer = model_from_weights(config, model.vocab_size, naive, model.state_dict())
        for block in longer.blocks:
            if block.attn.attention_type == "linear":
                block.attn.attend = windowed_linear_attention
        return longer(torch.tensor([tokens]))[0, first - 1 :]
    logits = []
    for end in range(first, len(tokens) + 1):
        length = min(end, T)
        if end > T:
            half = max(1, T // 2)
            length = half + (end - T - 1) % (T - half + 1)
        logits.append(model(torch.tensor([tokens[end - length : end]]))[0, -1])
    return torch.stack(logits)


def greedy(model, prompt, n):
    """The n tokens that greedy decoding appends to the prompt."""
    engine = Engine(model, sampling(temperature=0.0), batch_size=1, max_length=len(prompt) + n)
    engine.add([Prompt(prompt, seed=0)])
    return [engine.step()[0] for _ in range(n)]


def log_prob(model, tokens, first):
    """Sum of the log-probabilities of tokens[first:], and whether each is the most likely token."""
    total, is_greedy = 0.0, True
    for i in range(first, len(tokens)):
        logits = model(torch.tensor([tokens[:i]]))[0, -1].double()
        total += logits.log_softmax(0)[tokens[i]].item()
        is_greedy &= logits.argmax().item() == tokens[i]
    return total, is_greedy
