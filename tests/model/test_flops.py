"""Numbers of parameters and FLOPs."""

from dataclasses import replace

import pytest
import torch
from model_helpers import GPT2, GROUPED, MODERN, VARIANTS, make_model, random_tokens
from torch.utils.flop_counter import FlopCounterMode

from model import GPTConfig
from model.attention import naive
from model.flops import (
    PARTS,
    flops_per_token,
    n_params,
    params_by_part,
)
from model.gpt import GPT

GPT2_124M = GPTConfig(**GPT2 | dict(n_layer=12, n_head=12, n_embd=768, block_size=1024))


@VARIANTS
def test_flops_equal_those_that_torch_counts_with_naive(variant):
    model = make_model(variant | dict(n_embd=64, block_size=32), vocab_size=300)
    x = random_tokens(4, 32, 300)
    y = random_tokens(4, 32, 300, seed=1)
    with FlopCounterMode(display=False) as counter:
        model(x, y).backward()
    counted = pytest.approx(counter.get_total_flops(), rel=0.02)
    assert flops_per_token(model.config, 300, 32) * x.numel() == counted


def test_window_saves_the_flops_of_the_other_keys():
    full = flops_per_token(GPT2_124M, 50257, 1024)
    windowed = flops_per_token(replace(GPT2_124M, window=256), 50257, 1024)
    assert full - windowed == 12 * 12 * 768 * (1024 - 256)


@pytest.fixture(scope="module")
def gpt2_124m() -> GPT:
    with torch.device("meta"):
        return GPT(GPT2_124M, 50257, naive)


def test_parameters_of_gpt2_124m_are_counted(gpt2_124m):
    assert n_params(gpt2_124m) == 124_439_808


@pytest.mark.parametrize(
    ("part", "expected"),
    [
        ("token embedding", 50257 * 768),
        ("position embedding", 1024 * 768),
        ("head", 0),  # tied
        ("norms", 25 * 2 * 768),
    ],
)
def test_parameters_of_a_part_of_gpt2_124m_are_counted(gpt2_124m, part, expected):
    assert params_by_part(gpt2_124m)[part] == expected


@pytest.mark.parametrize("variant", [GPT2, MODERN, GROUPED], ids=["gpt2", "modern", "grouped"])
def test_every_parameter_belongs_to_one_part(variant):
    model = make_model(variant)
    assert sum(params_by_part(model).values()) == n_params(model)
    assert list(params_by_part(model)) == list(PARTS.values())
