"""The engine generates what GPT.generate does, and a sample is the same alone and in a batch."""

from unittest.mock import patch

import pytest
import torch
from generation_helpers import BYTES, MIXED, VARIANTS, WINDOWED, greedy, make_random_model
from helpers import sampling
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import GPT2, MODERN

from common.errors import UserError
from generation.engine import Engine, Prompt, TextChunk, generate, in_prompt_order

ONE_PROMPT = [Prompt([1], seed=0)]


def generate_sample(model, seed, **settings) -> str:
    """A sample of 20 tokens after the prompt [1]."""
    chunks = generate(model, BYTES, [Prompt([1], seed)], sampling(**settings), batch_size=1)
    return "".join(chunk.text for chunk in chunks)


@pytest.mark.parametrize("name", sorted(set(VARIANTS) - {"one"}))
def test_engine_generates_the_tokens_of_gpt_generate(name):
    """Within block_size, where GPT.generate computes all positions again for each token."""
    model = make_random_model(VARIANTS[name], dtype=torch.float64)
    prompts = [[7], [3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1, 8, 2]]
    num_tokens = model.config.block_size - len(prompts[-1]) + 1
    settings = sampling(top_k=1)
    engine = Engine(model, settings, batch_size=3, max_length=model.config.block_size + 1)
    engine.add([Prompt(tokens, seed=0) for tokens in prompts])
    for _ in range(num_tokens):
        engine.step()
    for sequence, prompt in zip(engine.sequences, prompts, strict=True):
        (expected,) = model.generate(torch.tensor([prompt]), num_tokens, top_k=1).tolist()
        assert sequence.tokens == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_refused(temperature):
    model = make_random_model(MODERN)
    model.norm.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="the model's logits are NaN"):
        generate_sample(model, seed=0, temperature=temperature)


@settings(max_examples=12, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=7),
    batch_size=st.integers(1, 4),
    variant=st.sampled_from([GPT2, MODERN, WINDOWED, MIXED]),
    temperature=st.sampled_from([0.0, 1.0]),
    end=st.sampled_from([None, 17, 100]),
)
def test_sample_is_the_same_alone_and_in_a_batch(lengths, batch_size, variant, temperature, end):
    """Covers reuse of cache rows, and moves of the last sequence to a free row."""
    model = make_random_model(variant, dtype=torch.float64)
    prompts = []
    for i, length in enumerate(lengths):
        prompts.append(Prompt([(i * 7 + j) % 250 for j in range(length)], seed=i))
    settings = sampling(temperature=temperature, max_new_tokens=30)

    def generate_all(prompts, batch_size):
        texts = [""] * len(prompts)
        ends = {}
        with patch("generation.engine.end_of_text", return_value=end):
            for chunk in generate(model, BYTES, prompts, settings, batch_size):
                assert chunk.index not in ends
                texts[chunk.index] += chunk.text
                if chunk.finish_reason is not None:
                    ends[chunk.index] = (chunk.finish_reason, chunk.n_tokens)
        return [(text, ends[index]) for index, text in enumerate(texts)]

    alone = [generate_all([prompt], batch_size=1)[0] for prompt in prompts]
    assert generate_all(prompts, batch_size) == alone


def test_sample_depends_on_its_seed():
    model = make_random_model(MODERN)
    assert generate_sample(model, seed=1) == generate_sample(model, seed=1)
    assert generate_sample(model, seed=1) != generate_sample(model, seed=2)


def test_generate_does_not_use_the_global_random_numbers():
    model = make_random_model(MODERN)
    state = torch.get_rng_state()
    generate_sample(model, seed=1)
    assert torch.equal(state, torch.get_rng_state())


def test_end_of_text_token_ends_the_sample_without_text():
    model = make_random_model(MODERN)
    with patch("generation.engine.end_of_text", return_value=greedy(model, [1], 1)[0]):
        chunks = list(generate(model, BYTES, ONE_PROMPT, sampling(temperature=0.0), batch_size=1))
    assert chunks == [TextChunk(0, "", 0, "end")]


def test_zero_tokens_give_no_samples():
    model = make_random_model(MODERN)
    assert not list(generate(model, BYTES, ONE_PROMPT, sampling(max_new_tokens=0), batch_size=1))


def test_invalid_sampling_settings_are_refused():
    with pytest.raises(UserError, match=r"top_p=3\.0 must be above 0"):
        generate_sample(make_random_model(MODERN), seed=1, top_p=3.0)


def make_chunks(*chunks: str) -> list[TextChunk]:
    """Chunks from strings such as "0a" (text a of sample 0) and "1b." (b, the end of sample 1)."""
    return [
        TextChunk(int(chunk[0]), chunk[1:], 1, "stop" if chunk.endswith(".") else None)
        for chunk in chunks
    ]


def test_chunks_are_sorted_by_sample():
    arriving = make_chunks("1b", "2c.", "0a", "1d.", "0e.", "3f.")
    texts = [chunk.text for chunk in in_prompt_order(arriving)]
    assert texts == ["a", "e.", "b", "d.", "c.", "f."]


def test_chunks_of_the_current_sample_are_shown_as_they_arrive():
    arriving = iter(make_chunks("1b", "0a", "1c", "0d"))
    assert next(in_prompt_order(arriving)).text == "a"
    assert len(list(arriving)) == 2  # which were not waited for
