"""Scores of documents: in windows, in batches, and with prompts."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from generation_helpers import BYTES, GPT2, WINDOWED, log_prob, make_random_model
from hypothesis import given
from hypothesis import strategies as st
from model_helpers import MODERN

from data.readers import Piece
from generation.perplexity import cut_into_windows, score_documents


@given(length=st.integers(1, 40), block_size=st.integers(1, 12), data=st.data())
def test_windows_score_each_target_once_with_context(length, block_size, data):
    """The last window overlaps the one before it."""
    num_targets = data.draw(st.integers(0, length - 1))
    windows = list(cut_into_windows(7, np.arange(length), num_targets, block_size))
    targets = [int(token) for window in windows for token in window.tokens[-window.num_targets :]]
    assert targets == list(range(length - num_targets, length))
    for index, tokens, num_scored in windows:
        assert index == 7
        assert 0 < num_scored < len(tokens)
        assert len(tokens) == min(length, block_size + 1)


@pytest.mark.parametrize("variant", [GPT2, MODERN, WINDOWED], ids=["gpt2", "modern", "windowed"])
def test_scores_in_a_batch_equal_those_of_one_forward_pass_per_token(variant):
    model = make_random_model(variant, dtype=torch.float64)
    sizes = [(0, 1), (4, 4), (0, 24), (4, 0), (21, 3), (0, 0)]  # block_size is 24
    letters = "a prompt or a completion"
    documents = [
        [Piece(letters[:length], False, True), Piece(letters[:num_targets], True, False)]
        for length, num_targets in sizes
    ]
    *rows, total = score_documents(model, BYTES, documents, batch_size=4)
    nats = 0.0
    for (length, num_targets), row in zip(sizes, rows, strict=True):
        text = letters[:length] + letters[:num_targets]
        tokens = [BYTES.start_token, *text.encode()]
        expected, _ = log_prob(model, tokens, len(tokens) - num_targets)
        assert row["tokens"] == num_targets
        assert -num_targets * (row["loss"] or 0.0) == pytest.approx(expected, rel=1e-5)
        nats -= expected
    assert total["loss"] * total["tokens"] == pytest.approx(nats)


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
