"""Requests of lm-eval give log-likelihoods of forward passes, and text up to a stop string."""

import math
from types import SimpleNamespace

import pytest
import torch
from generation_helpers import BYTES, greedy, make_random_model
from helpers import BPE
from model_helpers import MODERN

from data import tokenizer
from data.readers import Piece
from generation.perplexity import score_documents

lm_eval = pytest.importorskip("lm_eval", reason="NOT RUN: needs lm-eval")
WORDS = tokenizer.build_tokenizer(BPE, ["the cat and the hat and the bat sat\n" * 20], True)
PAIRS = [("the cat sat", " on the mat"), ("the ", "hat"), ("", "the bat"), (" ", "x")]
PAIRS += [("the hat and the bat " * 20, "é"), ("the cat", " and the hat" * 10)]


def make_adapter(encoding):
    from generation.lm_eval_adapter import ModelAdapter

    model = make_random_model(MODERN, dtype=torch.float64, V=encoding.n_vocab)
    return model, ModelAdapter(model, encoding, batch_size=4)


def requests(*args):
    return [SimpleNamespace(args=arguments) for arguments in args]


def log_prob(model, tokens, first):
    """Sum of the log-probabilities of tokens[first:], and whether each is the most likely token."""
    total, is_greedy = 0.0, True
    for i in range(first, len(tokens)):
        logits = model(torch.tensor([tokens[:i]]))[0, -1].double()
        total += logits.log_softmax(0)[tokens[i]].item()
        is_greedy &= logits.argmax().item() == tokens[i]
    return total, is_greedy


@pytest.mark.parametrize("encoding", [BYTES, WORDS], ids=["byte", "bpe"])
def test_log_likelihoods_equal_those_of_plain_forward_passes(encoding):
    """The token before a document precedes each context."""
    model, adapter = make_adapter(encoding)
    T, start = model.config.block_size, encoding.start_token
    for (context, continuation), result in zip(
        PAIRS, adapter.loglikelihood(requests(*PAIRS)), strict=True
    ):
        tokens, first = (
            [start, *encoding.encode(context + continuation)],
            1 + len(encoding.encode(context.rstrip())),
        )
        n = len(tokens) - first
        if n <= T:
            tokens = tokens[-T - 1 :]
            expected = log_prob(model, tokens, len(tokens) - n)
            assert result == (pytest.approx(expected[0], rel=1e-5), expected[1]), context
        else:
            assert result[0] < 0, "a long continuation is scored in windows"


def test_rolling_log_likelihood_counts_every_token_once():
    model, adapter = make_adapter(BYTES)
    short, long = "the cat", "the cat sat on the mat, and the hat " * 3
    short_score, long_score, empty = adapter.loglikelihood_rolling(
        requests((short,), (long,), ("",))
    )
    assert short_score == pytest.approx(log_prob(model, [10, *short.encode()], 1)[0], rel=1e-5)
    tokens, T, expected = [10, *long.encode()], model.config.block_size, 0.0
    for start in range(0, len(tokens) - 1, T):
        end = min(start + T, len(tokens) - 1)
        expected += log_prob(
            model, tokens[max(0, end - T) : end + 1], min(T, end) - (end - start) + 1
        )[0]
    assert long_score == pytest.approx(expected, rel=1e-5)
    assert empty == 0


def test_documents_have_the_same_loss_in_eval_and_in_lm_eval():
    """Also without an end-of-text token."""
    model, adapter = make_adapter(BYTES)
    texts = ["the cat", "the cat sat on the mat, and the hat " * 3]
    documents = [[Piece(text, ends_document=True, is_prompt=False)] for text in texts]
    *rows, _ = score_documents(model, BYTES, documents, batch_size=4, text_bytes=None)
    for text, row in zip(texts, rows, strict=True):
        (log_likelihood,) = adapter.loglikelihood_rolling(requests((text,)))
        assert -log_likelihood / math.log(2) / len(text) == pytest.approx(
            row["bits_per_byte"], rel=1e-5
        )


def test_generation_is_greedy_and_ends_at_a_stop_string():
    model, adapter = make_adapter(BYTES)
    contexts, settings = ["the cat", "a", ""], {"max_gen_toks": 12}
    full = adapter.generate_until(
        requests(*((context, settings | {"until": []}) for context in contexts))
    )
    stopped = adapter.generate_until(
        requests(*((context, settings | {"until": ["e"]}) for context in contexts))
    )
    for context, text, before_stop in zip(contexts, full, stopped, strict=True):
        tokens = greedy(model, [10, *context.encode()], 12)
        assert bytes(tokens).decode(errors="replace").startswith(text)
        assert before_stop == text.split("e")[0]


SPANNING = [
    ("the h", "at"),
    ("the c", "at and"),
    ("the hat", "s"),
    ("the b", "at"),
    ("the cat", "s and the hat"),
]


@pytest.mark.parametrize(("context", "continuation"), SPANNING)
def test_continuation_within_a_token_of_its_context_is_scored(context, continuation):
    """The reference: log-probability of the tokens after those with which both texts begin."""
    model, adapter = make_adapter(WORDS)
    ((score, is_greedy),) = adapter.loglikelihood(requests((context, continuation)))
    tokens = WORDS.encode(context + continuation)
    common = [a == b for a, b in zip(tokens, WORDS.encode(context), strict=False)]
    first = common.index(False) if False in common else len(common)
    expected, is_expected_greedy = log_prob(model, [WORDS.start_token, *tokens], 1 + first)
    assert score == pytest.approx(expected, rel=1e-5)
    assert score < 0
    assert is_greedy == is_expected_greedy


@pytest.mark.parametrize("key", ["max_gen_toks", "max_new_tokens", "max_tokens"])
def test_generated_text_has_the_length_of_any_of_its_names(key):
    _, adapter = make_adapter(BYTES)
    (text,) = adapter.generate_until(requests(("the cat", {key: 5, "until": [""]})))
    assert 0 < len(text) <= 5


@pytest.mark.parametrize(
    "settings", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"do_sample": False}]
)
def test_sampling_that_leaves_one_token_is_greedy(settings):
    _, adapter = make_adapter(BYTES)
    common = {"max_gen_toks": 8, "do_sample": True, "temperature": 5.0}
    (text,) = adapter.generate_until(requests(("the cat", common | settings)))
    assert text == adapter.generate_until(requests(("the cat", {"max_gen_toks": 8})))[0]
