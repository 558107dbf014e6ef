"""lm-eval's requests give the log-likelihoods of plain forward passes."""

import math
from types import SimpleNamespace

import pytest
import torch
from generation_helpers import BYTES, make_random_model
from helpers import BPE
from model_helpers import MODERN

from common.errors import UserError
from data import tokenizer
from data.readers import Piece
from generation.perplexity import score_documents

lm_eval = pytest.importorskip("lm_eval", reason="NOT RUN: needs lm-eval")
WORDS = tokenizer.build_tokenizer(BPE, ["the cat and the hat and the bat sat\n" * 20], True)
ENCODINGS = pytest.mark.parametrize("encoding", [BYTES, WORDS], ids=["byte", "bpe"])
SHORT = "the cat"
LONG = "the cat sat on the mat, and the hat " * 3


def make_adapter(encoding):
    from generation.lm_eval_adapter import ModelAdapter

    model = make_random_model(MODERN, dtype=torch.float64, V=encoding.n_vocab)
    return model, ModelAdapter(model, encoding, batch_size=4)


def make_requests(*args):
    return [SimpleNamespace(args=arguments) for arguments in args]


def log_prob(model, tokens, first):
    """Sum of the log-probabilities of tokens[first:], and whether each is the most likely token."""
    total = 0.0
    is_greedy = True
    for i in range(first, len(tokens)):
        logits = model(torch.tensor([tokens[:i]]))[0, -1].double()
        total += logits.log_softmax(0)[tokens[i]].item()
        is_greedy = is_greedy and logits.argmax().item() == tokens[i]
    return total, is_greedy


PAIRS = [
    ("the cat sat", " on the mat"),
    ("the ", "hat"),
    ("", "the bat"),
    (" ", "x"),
    ("the hat and the bat " * 20, "é"),
]


@ENCODINGS
def test_log_likelihoods_equal_those_of_plain_forward_passes(encoding):
    """After the token from which samples start. The last context does not fit into block_size."""
    model, adapter = make_adapter(encoding)
    results = adapter.loglikelihood(make_requests(*PAIRS))
    for (context, continuation), result in zip(PAIRS, results, strict=True):
        tokens = [encoding.start_token, *encoding.encode(context + continuation)]
        num_targets = len(tokens) - 1 - len(encoding.encode(context.rstrip()))
        tokens = tokens[-model.config.block_size - 1 :]
        score, is_greedy = log_prob(model, tokens, len(tokens) - num_targets)
        assert result == (pytest.approx(score, rel=1e-5), is_greedy), context


@ENCODINGS
def test_continuation_that_is_longer_than_the_context_of_the_model_is_scored(encoding):
    _, adapter = make_adapter(encoding)
    ((score, _),) = adapter.loglikelihood(make_requests(("the cat", " and the hat" * 10)))
    assert score < 0


@pytest.mark.parametrize(
    ("context", "continuation"),
    [
        ("the h", "at"),
        ("the c", "at and"),
        ("the hat", "s"),
        ("the b", "at"),
        ("the cat", "s and the hat"),
    ],
)
def test_continuation_within_a_token_of_its_context_is_scored(context, continuation):
    """The reference scores all tokens after those that both texts begin with."""
    model, adapter = make_adapter(WORDS)
    (result,) = adapter.loglikelihood(make_requests((context, continuation)))
    tokens = WORDS.encode(context + continuation)
    context_tokens = WORDS.encode(context)
    first = 0
    while first < len(context_tokens) and tokens[first] == context_tokens[first]:
        first += 1
    score, is_greedy = log_prob(model, [WORDS.start_token, *tokens], 1 + first)
    assert score < 0
    assert result == (pytest.approx(score, rel=1e-5), is_greedy)


def rolling_score(adapter, text):
    (score,) = adapter.loglikelihood_rolling(make_requests((text,)))
    return score


def test_rolling_log_likelihood_of_a_short_text_is_that_of_all_its_tokens():
    model, adapter = make_adapter(BYTES)
    expected, _ = log_prob(model, [10, *SHORT.encode()], 1)
    assert rolling_score(adapter, SHORT) == pytest.approx(expected, rel=1e-5)


def test_rolling_log_likelihood_of_a_long_text_counts_every_token_once():
    """The reference is computed window by window."""
    model, adapter = make_adapter(BYTES)
    tokens = [10, *LONG.encode()]
    T = model.config.block_size
    expected = 0.0
    for start in range(0, len(tokens) - 1, T):
        end = min(start + T, len(tokens) - 1)
        window = tokens[max(0, end - T) : end + 1]
        num_targets = end - start
        score, _ = log_prob(model, window, len(window) - num_targets)
        expected += score
    assert rolling_score(adapter, LONG) == pytest.approx(expected, rel=1e-5)


def test_rolling_log_likelihood_of_an_empty_text_is_zero():
    _, adapter = make_adapter(BYTES)
    assert rolling_score(adapter, "") == 0


@pytest.mark.parametrize("text", [SHORT, LONG], ids=["short", "long"])
def test_text_has_the_same_loss_in_eval_and_in_lm_eval(text):
    """Also without an end-of-text token."""
    model, adapter = make_adapter(BYTES)
    document = [Piece(text, ends_document=True, is_prompt=False)]
    row, _ = score_documents(model, BYTES, [document], batch_size=4)
    bits_per_byte = -rolling_score(adapter, text) / math.log(2) / len(text)
    assert bits_per_byte == pytest.approx(row["bits_per_byte"], rel=1e-5)


def test_task_that_generates_text_is_refused():
    _, adapter = make_adapter(BYTES)
    with pytest.raises(UserError, match="tasks that generate text are not supported"):
        adapter.generate_until(make_requests(("the cat", {})))
