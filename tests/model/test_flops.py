"""Numbers of parameters and FLOPs."""

from dataclasses import replace

import pytest
import torch
from model_helpers import GPT2, VARIANTS, make_model, random_tokens
from torch.utils.flop_counter import FlopCounterMode

from model import GPTConfig
from model.attention import naive
from model.flops import flops_per_token, n_params, params_by_part
from model.gpt import GPT


@VARIANTS
def test_flops_equal_those_that_torch_counts_with_naive(variant):
    variant = variant | dict(n_embd=64, block_size=32)
    model = make_model(variant, vocab_size=300)
    x, y = random_tokens(4, 32, 300), random_tokens(4, 32, 300, seed=1)
    with FlopCounterMode(display=False) as counter:
        model(x, y).backward()
    assert flops_per_token(model.config, 300, 32) * 128 == pytest.approx(
        counter.get_total_flops(), rel=0.02
    )


def test_parameters_and_flops_of_gpt2_124m_are_counted():
    config = GPTConfig(**GPT2 | dict(n_layer=12, n_head=12, n_embd=768, block_size=1024))
    full, windowed = (
        flops_per_token(c, 50257, 1024) for c in (config, replace(config, window=256))
    )
    assert full - windowed == 12 * 12 * 768 * (1024 - 256)
    with torch.device("meta"):
        model = GPT(config, 50257, naive)
    assert n_params(model) == 124_439_808
    parts = params_by_part(model)
    assert parts["token embedding"] == 50257 * 768 and parts["position embedding"] == 1024 * 768
    assert sum(parts.values()) == n_params(model) and parts["head"] == 0, "the head is tied"
