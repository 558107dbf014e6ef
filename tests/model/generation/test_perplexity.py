"""Scores of texts: in windows, in batches, and of documents with prompts."""

import pytest
import torch
from generation_helpers import GPT2, WINDOWED, make_random_model
from hypothesis import given
from hypothesis import strategies as st
from model_helpers import MODERN, random_tokens

from model.generation.perplexity import score_texts, split_into_windows


@given(length=st.integers(1, 40), block_size=st.integers(1, 12), data=st.data())
def test_windows_score_each_token_once_with_context(length, block_size, data):
    n = data.draw(st.integers(0, length - 1))
    windows = list(split_into_windows(torch.arange(length), n, block_size))
    assert [int(token) for tokens, scored in windows for token in tokens[-scored:]] == list(range(length - n, length))
    for tokens, scored in windows:
        assert 0 < scored < len(tokens) <= block_size + 1
        assert len(tokens) == min(length, block_size + 1) or tokens[0] % block_size == 0


@pytest.mark.parametrize("variant", [GPT2, MODERN, WINDOWED], ids=["gpt2", "modern", "windowed"])
def test_scores_in_a_batch_equal_those_of_one_forward_pass_per_token(variant):
    model = make_random_model(variant, dtype=torch.float64)
    sizes = [(2, 1), (9, 4), (25, 24), (5, 0), (25, 3), (1, 0)]  # block_size is 24
    texts = [(random_tokens(1, length, 256, seed=i)[0], n) for i, (length, n) in enumerate(sizes)]
    for (tokens, n), (nats, is_greedy) in zip(texts, score_texts(model, texts, batch_size=4), strict=True):
        logits = [model(tokens[None, :i])[0, -1].double() for i in range(len(tokens) - n, len(tokens))]
        targets = tokens[len(tokens) - n :].tolist()
        expected = -sum(row.log_softmax(0)[token].item() for row, token in zip(logits, targets, strict=True))
        assert nats == pytest.approx(expected, rel=1e-5)
        assert is_greedy == all(row.argmax() == token for row, token in zip(logits, targets, strict=True))
