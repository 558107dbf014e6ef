"""Decode steps of fixed shapes, as CUDA graphs replay them, give the same samples as eager steps."""

import pytest
import torch
from generation_helpers import VARIANTS, WINDOWED, EagerStep, make_random_model
from helpers import sampling
from model_helpers import GPT2, GROUPED, MODERN

from model.attention import BACKENDS
from model.generation.cuda_graph import supports_cuda_graphs
from model.generation.engine import Engine, Prompt

LENGTHS = (1, 5, 3, 20, 2, 9, 4)
PROMPTS = [Prompt([(i * 7 + j) % 250 for j in range(n)], seed=i) for i, n in enumerate(LENGTHS)]


SOFTMAX = {name: variant for name, variant in VARIANTS.items() if variant["mixer"] == "softmax"}


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_models_with_linear_attention_use_no_cuda_graphs(variant):
    assert supports_cuda_graphs(make_random_model(variant)) == (variant["mixer"] == "softmax")


@pytest.mark.parametrize("variant", SOFTMAX.values(), ids=SOFTMAX)
def test_fixed_shapes_give_the_same_samples(variant, monkeypatch):
    """Covers padded batches, and slots that no sequence has filled."""
    monkeypatch.setattr("model.generation.cuda_graph.MIN_SLOTS", 4)
    model = make_random_model(variant, dtype=torch.float64)

    def generate(fixed_shapes):
        engine = Engine(model, sampling(max_new_tokens=30, repetition_penalty=1.2), batch_size=5, max_length=60)
        step = EagerStep(engine._decode, 5)
        engine.graph_step = step if fixed_shapes else None
        engine.add(PROMPTS[:5])
        tokens = [engine.step() for _ in range(6)]
        for row in (1, 3, 2):
            engine.remove(row)
        tokens += [engine.step() for _ in range(3)]
        engine.add(PROMPTS[5:])
        tokens += [engine.step() for _ in range(21)]
        if fixed_shapes and model.config.block_size == 24:
            assert set(step.graphs) <= {4, 8, 16, 32}, "block_size=24 is rounded up to 32"
        return tokens

    assert generate(fixed_shapes=True) == generate(fixed_shapes=False)


@pytest.mark.gpu
@pytest.mark.parametrize("variant", [GPT2, MODERN, GROUPED, WINDOWED])
def test_cuda_graphs_give_the_same_samples(variant):
    model = make_random_model(variant, attend=BACKENDS["sdpa"].attend, dtype=torch.float64).to("cuda")

    def generate(cuda_graphs):
        engine = Engine(model, sampling(max_new_tokens=30), 4, 60, cuda_graphs)
        assert (engine.graph_step is not None) == cuda_graphs
        engine.add(PROMPTS[:4])
        tokens = [engine.step() for _ in range(10)]
        engine.remove(1)
        return tokens + [engine.step() for _ in range(20)]

    assert generate(cuda_graphs=True) == generate(cuda_graphs=False)
