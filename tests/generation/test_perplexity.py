"""Scores of texts: in windows, in batches, and of documents with prompts."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from generation_helpers import BYTES, GPT2, WINDOWED, log_prob, make_random_model
from hypothesis import given
from hypothesis import strategies as st
from model_helpers import MODERN, random_tokens

from data.readers import Piece
from generation.perplexity import cut_into_windows, score_documents, score_texts


@given(length=st.integers(1, 40), block_size=st.integers(1, 12), data=st.data())
def test_windows_score_each_target_once_with_context(length, block_size, data):
    """The last window overlaps the one before it."""
    num_targets = data.draw(st.integers(0, length - 1))
    windows = list(cut_into_windows(7, (np.arange(length), num_targets), block_size))
    targets = [int(token) for window in windows for token in window.tokens[-window.num_targets :]]
    assert targets == list(range(length - num_targets, length))
    for index, tokens, num_scored in windows:
        assert index == 7
        assert 0 < num_scored < len(tokens)
        assert len(tokens) == min(length, block_size + 1)


@pytest.mark.parametrize("variant", [GPT2, MODERN, WINDOWED], ids=["gpt2", "modern", "windowed"])
def test_scores_in_a_batch_equal_those_of_one_forward_pass_per_token(variant):
    model = make_random_model(variant, dtype=torch.float64)
    sizes = [(2, 1), (9, 4), (25, 24), (5, 0), (25, 3), (1, 0)]  # block_size is 24
    texts = [
        (random_tokens(1, length, 256, seed=i)[0].tolist(), n)
        for i, (length, n) in enumerate(sizes)
    ]
    scores, total = score_texts(model, BYTES, texts, batch_size=4)
    for (tokens, n), score in zip(texts, scores, strict=True):
        expected, _ = log_prob(model, tokens, len(tokens) - n)
        assert -score.nats == pytest.approx(expected, rel=1e-5)
        assert score.tokens == n
    assert total.nats == pytest.approx(sum(score.nats for score in scores))


def test_document_with_a_prompt_is_scored_after_it():
    model = make_random_model(MODERN, dtype=torch.float64)
    document = [Piece("a question? ", False, True), Piece("an ", False, False)]
    document += [Piece("answer", True, False)]
    row, total = score_documents(model, BYTES, [document], batch_size=4)
    tokens = torch.tensor([[BYTES.start_token, *b"a question? an answer"]])
    logits = model(tokens[:, :-1])[0, -9:].double()
    expected = F.cross_entropy(logits, tokens[0, -9:]).item()
    assert (row["tokens"], row["bytes"], row["beginning"]) == (9, 9, "a question? an answ…")
    assert row["loss"] == pytest.approx(expected, rel=1e-5)
    assert total == row | {"document": "all", "beginning": ""}
