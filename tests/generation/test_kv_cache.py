"""Logits with the KV cache equal logits without it."""

import pytest
import torch
from generation_helpers import VARIANTS, WINDOWED, logits_without_cache, make_random_model
from helpers import ON_CPU, sampling

from generation.engine import Engine, Prompt
from model.attention import BACKENDS

BACKEND_NAMES = [
    pytest.param(
        name,
        marks=[pytest.mark.compiles, pytest.mark.slow] if BACKENDS[name].needs_compiler else [],
    )
    for name in ON_CPU
]


@pytest.mark.parametrize("name", BACKEND_NAMES)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_logits_with_cache_equal_logits_without(name, variant):
    """Prompts of different lengths in one batch, compared at every step, well past block_size."""
    if BACKENDS[name].needs_compiler and variant is not WINDOWED:
        pytest.skip("compiling is slow; the windowed variant has all features")
    model = make_random_model(variant, attend=BACKENDS[name].attend)
    T = model.config.block_size
    engine = Engine(model, sampling(temperature=0.0), batch_size=4, max_length=100)
    recorded = []  # the logits (B, V) of each step
    model.lm_head.register_forward_hook(lambda module, inputs, logits: recorded.append(logits))
    prompts = [[7], list(range(3, 3 + T // 2 + 1)), list(range(40, 40 + T)), [9, 8]]
    if not BACKENDS[name].on["cpu"].positions:
        prompts = prompts[1:2]
    engine.add([Prompt(tokens, seed=0) for tokens in prompts])
    for _ in range(T + 5 if T > 1 else 6):
        before = [list(sequence.tokens) for sequence in engine.sequences]
        engine.step()
        for logits, tokens in zip(recorded[-1], before, strict=True):
            torch.testing.assert_close(
                logits, logits_without_cache(model, tokens), atol=2e-4, rtol=1e-4
            )
