"""The engine: a sequence has the same sample alone and in a batch."""

from unittest.mock import patch

import pytest
import torch
from generation_helpers import BYTES, VARIANTS, WINDOWED, greedy, logits_without_cache, make_random_model
from helpers import sampling
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import GPT2, MODERN

from common.errors import UserError
from model.generation.engine import Engine, Prompt, TextChunk, generate, in_prompt_order
from model.generation.sampling import apply_repetition_penalty


def end_token(token):
    """Patch: the tokenizer has this end-of-text token."""
    return patch("model.generation.engine.end_of_text", return_value=token)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_greedy_decoding_equals_decoding_without_cache(variant):
    model = make_random_model(variant)
    for prompt in ([3], [3, 4, 5, 6, 7]):
        tokens = prompt[-model.config.block_size :]
        for token in greedy(model, tokens, 60):
            assert token == logits_without_cache(model, tokens).argmax()
            tokens = [*tokens, token]


def test_repetition_penalty_applies_to_prompt_and_sample():
    """Greedy decoding, compared with a loop without a cache."""
    model = make_random_model(MODERN)
    engine = Engine(model, sampling(temperature=0.0, repetition_penalty=1.5), batch_size=2, max_length=60)
    prompts = [[3, 4, 5], [200, 7]]
    engine.add([Prompt(tokens, seed=0) for tokens in prompts])
    steps = [engine.step() for _ in range(40)]
    for row, tokens in enumerate(prompts):
        for step in steps:
            seen = torch.zeros(1, 256, dtype=torch.bool)
            seen[0, tokens] = True
            logits = logits_without_cache(model, tokens).unsqueeze(0)
            assert apply_repetition_penalty(logits, seen, 1.5).argmax() == step[row]
            tokens = [*tokens, step[row]]
    assert len(set(greedy(model, [3, 4, 5], 40))) < len({step[0] for step in steps}), "it repeats itself less"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_refused(temperature):
    model = make_random_model(MODERN)
    model.norm.weight.fill_(torch.nan)
    with pytest.raises(UserError, match="the model's logits are NaN"):
        list(generate(model, BYTES, [Prompt([1], 0)], sampling(temperature=temperature), batch_size=1))


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=7),
    batch_size=st.integers(1, 4),
    variant=st.sampled_from([GPT2, MODERN, WINDOWED]),
    temperature=st.sampled_from([0.0, 1.0]),
    penalty=st.sampled_from([1.0, 1.3]),
    end=st.sampled_from([None, 17, 100]),
)
def test_sample_is_the_same_alone_and_in_a_batch(lengths, batch_size, variant, temperature, penalty, end):
    """Covers reuse of cache rows, and moves of the last sequence to a free row."""
    model = make_random_model(variant, dtype=torch.float64)
    prompts = [Prompt([(i * 7 + j) % 250 for j in range(n)], seed=i) for i, n in enumerate(lengths)]
    settings = sampling(temperature=temperature, repetition_penalty=penalty, max_new_tokens=40)

    def sample(prompts, batch_size):
        texts, ends = [""] * len(prompts), {}
        with end_token(end):
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
        return "".join(chunk.text for chunk in generate(model, BYTES, [Prompt([1], seed)], settings, batch_size=1))

    assert sample(1) == sample(1) != sample(2)
    assert sample(1, 40).startswith(sample(1)[:-1])
    assert torch.equal(state, torch.get_rng_state()), "the global generator is not used"
    assert model.training


def test_end_of_text_token_ends_the_sample_without_text():
    model = make_random_model(MODERN)
    with end_token(greedy(model, [1], 1)[0]):
        chunks = list(generate(model, BYTES, [Prompt([1], 0)], sampling(temperature=0.0), batch_size=1))
    assert chunks == [TextChunk(0, "", 0, "end")]


def test_zero_tokens_give_empty_samples_and_zero_prompts_give_none():
    model = make_random_model(MODERN)
    chunks = list(generate(model, BYTES, [Prompt([1], 0)] * 2, sampling(max_new_tokens=0), batch_size=1))
    assert chunks == [TextChunk(0, "", 0, "length"), TextChunk(1, "", 0, "length")]
    assert list(generate(model, BYTES, [], sampling(), batch_size=4)) == []


def test_in_prompt_order_yields_chunks_as_early_as_possible():
    texts, ends = [(1, "c"), (0, "a"), (1, "d"), (0, "b"), (2, "e")], {"b": "length", "d": "length", "e": "length"}
    arriving = iter([TextChunk(index, text, 1, ends.get(text)) for index, text in texts])
    ordered = in_prompt_order(arriving)
    assert next(ordered).text == "a" and len(list(arriving)) == 3, "two chunks were read"
    ordered = in_prompt_order(TextChunk(index, text, 1, ends.get(text)) for index, text in texts)
    assert "".join(chunk.text for chunk in ordered) == "abcde"
