"""Scores of texts: in windows, in batches, and of documents with prompts."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from generation_helpers import BYTES, GPT2, WINDOWED, make_random_model
from hypothesis import given
from hypothesis import strategies as st
from model_helpers import MODERN, random_tokens

from data.readers import Piece
from generation.perplexity import cut_into_windows, score_documents, score_texts
from model.gpt import GPT


@given(length=st.integers(1, 40), block_size=st.integers(1, 12), data=st.data())
def test_windows_score_each_target_once_with_context(length, block_size, data):
    first_target = data.draw(st.integers(1, length))
    cuts = sorted(
        {0, first_target, length, *data.draw(st.lists(st.integers(0, length), max_size=4))}
    )
    parts = [(np.arange(start, end), start >= first_target) for start, end in pairwise(cuts)]
    windows = list(cut_into_windows(7, parts, block_size))
    targets = [int(token) for window in windows for token in window.tokens[-window.num_targets :]]
    assert targets == list(range(first_target, length))
    for number, tokens, num_targets in windows:
        assert number == 7
        assert 0 < num_targets < len(tokens) <= block_size + 1
        assert len(tokens) == min(length, block_size + 1), (
            "the last window overlaps the one before it"
        )


@pytest.mark.parametrize("variant", [GPT2, MODERN, WINDOWED], ids=["gpt2", "modern", "windowed"])
def test_scores_in_a_batch_equal_those_of_one_forward_pass_per_token(variant):
    model = make_random_model(variant, dtype=torch.float64)
    sizes = [(2, 1), (9, 4), (25, 24), (5, 0), (25, 3), (1, 0)]  # block_size is 24
    texts = [(random_tokens(1, length, 256, seed=i)[0], n) for i, (length, n) in enumerate(sizes)]
    scores = score_texts(
        model, [(tokens.tolist(), len(tokens) - n) for tokens, n in texts], batch_size=4
    )
    for (tokens, n), (nats, is_greedy) in zip(texts, scores, strict=True):
        logits = [
            model(tokens[None, :i])[0, -1].double() for i in range(len(tokens) - n, len(tokens))
        ]
        targets = tokens[len(tokens) - n :].tolist()
        expected = -sum(
            row.log_softmax(0)[token].item() for row, token in zip(logits, targets, strict=True)
        )
        assert nats == pytest.approx(expected, rel=1e-5)
        assert is_greedy == all(
            row.argmax() == token for row, token in zip(logits, targets, strict=True)
        )


def test_long_document_is_not_read_into_memory(monkeypatch):
    """Scoring begins before the document has been read to its end."""
    monkeypatch.setattr("generation.perplexity.SORTED_BATCHES", 2)
    model = make_random_model(MODERN)
    read_before_first_score = []
    pieces_read = 0

    def iter_pieces():
        nonlocal pieces_read
        for number in range(1000):
            pieces_read += 1
            yield Piece("the cat sat ", ends_document=number == 999, is_prompt=False)

    def backbone(*arguments):
        read_before_first_score.append(pieces_read)
        return GPT.backbone(model, *arguments)

    monkeypatch.setattr(model, "backbone", backbone)
    (row, _) = score_documents(model, BYTES, [iter_pieces()], batch_size=4, text_bytes=None)
    assert read_before_first_score[0] < 100
    assert (row["tokens"], row["bytes"], pieces_read) == (12_000, 12_000, 1000)


def test_document_with_a_prompt_is_scored_after_it():
    model = make_random_model(MODERN, dtype=torch.float64)
    document = [
        Piece("a question? ", False, True),
        Piece("an ", False, False),
        Piece("answer", True, False),
    ]
    row, total = score_documents(model, BYTES, [document], batch_size=4, text_bytes=None)
    tokens = torch.tensor([[BYTES.start_token, *b"a question? an answer"]])
    logits = model(tokens[:, :-1])[0, -9:].double()
    expected = torch.nn.functional.cross_entropy(logits, tokens[0, -9:]).item()
    assert (row["tokens"], row["bytes"], row["beginning"]) == (9, 9, "a question? an answ…")
    assert row["loss"] == pytest.approx(expected, rel=1e-5)
    assert total == row | {"document": "all", "beginning": ""}
