"""Parameter and FLOP counts, compared with PyTorch's FLOP counter."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from configs.cli import parse_config
from model.attention import naive
from model.config import GPTConfig
from model.flops import (
    attention_flops_per_token,
    crossover,
    flops_per_token,
    linear_flops_per_token,
    n_params,
    params_by_part,
)
from model.gpt import GPT

VARIANTS = {
    "gpt2": ["model=gpt2"],
    "untied": ["model=gpt2", "model.tie_embeddings=false"],
    "modern": ["model=modern"],
    "grouped": ["model=modern", "model.n_kv_head=1", "model.tie_embeddings=true"],
}


def make_config(*overrides: str) -> GPTConfig:
    small = ["model.n_layer=2", "model.n_head=4", "model.n_embd=64", "model.block_size=257", "data=python_stdlib"]
    return parse_config("train", "", [*small, *overrides]).model


@pytest.mark.parametrize("T", [64, 257])
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_flops_equal_those_counted_by_torch_with_naive_attention(variant, T):
    config = make_config(*variant)
    tokens = torch.zeros(2, T, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        GPT(config, 300, naive)(tokens, tokens).backward()
    assert flops_per_token(config, 300, T) * 2 * T == pytest.approx(counter.get_total_flops(), rel=0.02)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_parts_sum_to_all_parameters(variant):
    model = GPT(make_config(*variant), 300, naive)
    parts = params_by_part(model)
    assert sum(parts.values()) == n_params(model)
    assert (parts["head"] == 0) == model.config.tie_embeddings
    assert (parts["position embedding"] == 0) == (model.config.position == "rotary")


def test_crossover_is_the_shortest_context_where_attention_needs_more_flops():
    config = make_config()
    T, linear = crossover(config, 300), linear_flops_per_token(config, 300)
    assert attention_flops_per_token(config, T) >= linear > attention_flops_per_token(config, T - 1)


def test_windows_limit_attention_flops_and_can_remove_the_crossover():
    config = make_config()
    full = crossover(config, 300)
    config = replace(config, window=[16, None])
    assert attention_flops_per_token(config, 100) == 12 * 64 * 116
    T, linear = crossover(config, 300), linear_flops_per_token(config, 300)
    assert full < T
    assert attention_flops_per_token(config, T) >= linear > attention_flops_per_token(config, T - 1)
    assert crossover(replace(config, window=16), 300) is None
