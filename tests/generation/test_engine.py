"""The engine: a sequence has the same sample alone and in a batch."""

from unittest.mock import patch

import pytest
import torch
from generation_helpers import BYTES, WINDOWED, greedy, make_random_model
from helpers import sampling
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import GPT2, MODERN

from common.errors import UserError
from generation.engine import Prompt, TextChunk, generate


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_refused(temperature):
    model = make_random_model(MODERN)
    model.norm.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="the model's logits are NaN"):
        list(
            generate(
                model, BYTES, [Prompt([1], 0)], sampling(temperature=temperature), batch_size=1
            )
        )


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=7),
    batch_size=st.integers(1, 4),
    variant=st.sampled_from([GPT2, MODERN, WINDOWED]),
    temperature=st.sampled_from([0.0, 1.0]),
    end=st.sampled_from([None, 17, 100]),
)
def test_sample_is_the_same_alone_and_in_a_batch(lengths, batch_size, variant, temperature, end):
    """Covers reuse of cache rows, and moves of the last sequence to a free row."""
    model = make_random_model(variant, dtype=torch.float64)
    prompts = [Prompt([(i * 7 + j) % 250 for j in range(n)], seed=i) for i, n in enumerate(lengths)]
    settings = sampling(temperature=temperature, max_new_tokens=40)

    def sample(prompts, batch_size):
        texts, ends = [""] * len(prompts), {}
        with patch("generation.engine.end_of_text", return_value=end):
            for chunk in generate(model, BYTES, prompts, settings, batch_size):
                assert chunk.index not in ends
                texts[chunk.index] += chunk.text
                if chunk.finish_reason:
                    ends[chunk.index] = chunk.finish_reason, chunk.n_tokens
        return [(text, ends[index]) for index, text in enumerate(texts)]

    assert sample(prompts, batch_size) == [sample([prompt], 1)[0] for prompt in prompts]


def test_sample_depends_only_on_its_seed():
    model = make_random_model(MODERN).train()
    state = torch.get_rng_state()

    def sample(seed, max_new_tokens=20):
        settings = sampling(max_new_tokens=max_new_tokens)
        return "".join(
            chunk.text
            for chunk in generate(model, BYTES, [Prompt([1], seed)], settings, batch_size=1)
        )

    assert sample(1) == sample(1) != sample(2)
    assert sample(1, 40).startswith(sample(1)[:-1])
    assert torch.equal(state, torch.get_rng_state()), "the global generator is not used"
    assert model.training


def test_end_of_text_token_ends_the_sample_without_text():
    model = make_random_model(MODERN)
    with patch("generation.engine.end_of_text", return_value=greedy(model, [1], 1)[0]):
        chunks = list(
            generate(model, BYTES, [Prompt([1], 0)], sampling(temperature=0.0), batch_size=1)
        )
    assert chunks == [TextChunk(0, "", 0, "end")]


def test_zero_tokens_give_empty_samples_and_zero_prompts_give_none():
    model = make_random_model(MODERN)
    chunks = list(
        generate(model, BYTES, [Prompt([1], 0)] * 2, sampling(max_new_tokens=0), batch_size=1)
    )
    assert chunks == [TextChunk(0, "", 0, "length"), TextChunk(1, "", 0, "length")]
    assert list(generate(model, BYTES, [], sampling(), batch_size=4)) == []
