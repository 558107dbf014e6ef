"""Logits with the KV cache equal logits without it."""

import pytest
import torch
from generation_helpers import VARIANTS, WINDOWED, logits_without_cache, make_random_model
from helpers import ON_CPU, sampling

from generation.engine import Engine, Prompt
from generation.kv_cache import KVCache
from model.attention import BACKENDS
from model.flops import kv_cache_bytes_per_token

# tests/model/attention/test_backends.py compares compiled backends with naive, also for one query
BACKEND_NAMES = [name for name in ON_CPU if not BACKENDS[name].needs_compiler]


def assert_logits_equal_without_cache(model, prompts):
    """Generate from prompts in one batch, and compare the logits of every step.

    The sequences become longer than block_size.
    """
    T = model.config.block_size
    engine = Engine(model, sampling(temperature=0.0), batch_size=4, max_length=100)
    recorded = []  # logits
    model.lm_head.register_forward_hook(lambda module, inputs, logits: recorded.append(logits))
    engine.add([Prompt(tokens, seed=0) for tokens in prompts])
    steps = []
    for _ in range(max(6, T + 5)):
        engine.step()
        steps.append(recorded[-1])  # (B, V)
    for i, prompt in enumerate(prompts):
        logits = torch.stack([step[i] for step in steps])
        tokens = engine.sequences[i].tokens[:-1]  # the last one is not read
        expected = logits_without_cache(model, tokens, len(prompt))
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("name", BACKEND_NAMES)
@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_logits_of_sequences_of_different_lengths_equal_logits_without_cache(name, variant):
    backend = BACKENDS[name]
    if backend.needs_compiler and variant is not WINDOWED:
        pytest.skip("compiling is slow; the windowed variant has all features")
    model = make_random_model(variant, attend=backend.attend)
    T = model.config.block_size
    prompts = [[7], list(range(3, 3 + T // 2 + 1)), list(range(40, 40 + T)), [9, 8]]
    if "arbitrary positions" in backend.on["cpu"].lacks:
        prompts = prompts[1:2]  # the backend needs sequences of the same length
    assert_logits_equal_without_cache(model, prompts)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_logits_of_sequences_of_the_same_length_equal_logits_without_cache(variant):
    """These need no attention mask."""
    assert_logits_equal_without_cache(make_random_model(variant), [[7, 1, 8], [2, 8, 1]])


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_cache_has_the_computed_size(variant):
    model = make_random_model(variant)
    T = model.config.block_size
    cache = KVCache(model, num_rows=1, max_length=T)
    with torch.inference_mode():
        cache.prefill(0, [list(range(T - 1))])
    size = sum(layer.k.nbytes + layer.v.nbytes for layer in cache.layers)
    assert size == kv_cache_bytes_per_token(model.config, torch.float32) * T
