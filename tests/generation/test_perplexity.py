"""Scores of texts: in windows, in batches, and of documents with prompts."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from generation_helpers import BYTES, GPT2, WINDOWED, make_random_model
from hypothesis import given
from hypothesis import strategies as st
from model_helpers import MODERN, random_tokens

from data.readers import Piece
from generation.perplexity import Text, cut_into_windows, score_documents, score_texts


def make_windows(length, first_target, block_size):
    """The windows of a text whose tokens are their positions."""
    return list(cut_into_windows(Text(np.arange(length), first_target), block_size))


WINDOW_CASES = given(
    length=st.integers(1, 40), first_target=st.integers(1, 40), block_size=st.integers(1, 12)
)


@WINDOW_CASES
def test_windows_score_each_target_once(length, first_target, block_size):
    targets = []
    for _, tokens, num_targets in make_windows(length, first_target, block_size):
        targets += tokens[-num_targets:].tolist()
    assert targets == list(range(first_target, length))


@WINDOW_CASES
def test_windows_have_a_full_context(length, first_target, block_size):
    for _, tokens, num_targets in make_windows(length, first_target, block_size):
        assert len(tokens) == min(length, block_size + 1)
        assert 0 < num_targets < len(tokens)


# number of tokens and number of targets; block_size is 24
TEXT_SIZES = [(2, 1), (9, 4), (25, 24), (5, 0), (25, 3), (1, 0)]


@pytest.mark.parametrize("variant", [GPT2, MODERN, WINDOWED], ids=["gpt2", "modern", "windowed"])
def test_scores_in_a_batch_equal_those_of_one_forward_pass_per_token(variant):
    model = make_random_model(variant, dtype=torch.float64)
    texts = []
    for seed, (length, num_targets) in enumerate(TEXT_SIZES):
        tokens = random_tokens(1, length, 256, seed)[0].numpy()
        texts.append(Text(tokens, first_target=length - num_targets))
    score_texts(model, texts, batch_size=4)
    for text in texts:
        tokens = torch.from_numpy(text.tokens)
        nats = 0.0
        is_greedy = True
        for i in range(text.first_target, len(tokens)):
            logits = model(tokens[None, :i])[0, -1].double()
            nats -= logits.log_softmax(0)[tokens[i]].item()
            is_greedy = is_greedy and bool(logits.argmax() == tokens[i])
        assert text.nats == pytest.approx(nats, rel=1e-5)
        assert text.is_greedy == is_greedy


def test_greedy_text_is_recognized():
    model = make_random_model(GPT2, dtype=torch.float64)
    tokens = model.generate(torch.tensor([[1, 2, 3]]), 8, top_k=1)[0].numpy()
    text = Text(tokens, first_target=3)
    score_texts(model, [text], batch_size=1)
    assert text.is_greedy


def test_text_with_a_greedy_end_is_not_greedy():
    """Its targets are in two windows, and greedy decoding generates only the second."""
    model = make_random_model(GPT2, dtype=torch.float64)
    tokens = random_tokens(1, 25, 256).tolist()[0]
    for _ in range(24):
        second_window = torch.tensor([tokens[24:]])
        tokens.append(int(model(second_window)[0, -1].argmax()))
    end = Text(np.array(tokens), first_target=25)
    complete = Text(np.array(tokens), first_target=1)
    score_texts(model, [end, complete], batch_size=1)
    assert end.is_greedy
    assert not complete.is_greedy


PROMPTED = [
    Piece("a question? ", ends_document=False, is_prompt=True),
    Piece("an ", ends_document=False, is_prompt=False),
    Piece("answer", ends_document=True, is_prompt=False),
]


def test_document_with_a_prompt_is_scored_after_it():
    model = make_random_model(MODERN, dtype=torch.float64)
    row, _ = score_documents(model, BYTES, [PROMPTED], batch_size=4)
    tokens = torch.tensor([[BYTES.start_token, *b"a question? an answer"]])
    logits = model(tokens[:, :-1])[0, -9:].double()
    expected = F.cross_entropy(logits, tokens[0, -9:]).item()
    assert row["loss"] == pytest.approx(expected, rel=1e-5)
    assert (row["tokens"], row["bytes"]) == (9, 9)


def test_row_of_a_document_has_its_beginning():
    row, _ = score_documents(make_random_model(MODERN), BYTES, [PROMPTED], batch_size=4)
    assert row["beginning"] == "a question? an answ…"


def test_row_of_one_document_equals_the_row_of_all():
    row, total = score_documents(make_random_model(MODERN), BYTES, [PROMPTED], batch_size=4)
    assert total == row | {"document": "all", "beginning": ""}


def test_document_without_text_has_no_loss():
    empty = [Piece("", ends_document=True, is_prompt=False)]
    row, _ = score_documents(make_random_model(MODERN), BYTES, [empty], batch_size=4)
    assert row["tokens"] == 0
    assert row["loss"] is row["perplexity"] is row["bits_per_byte"] is None
