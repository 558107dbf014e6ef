"""Requests of lm-eval give log-likelihoods of forward passes, and text up to a stop string."""

from types import SimpleNamespace

import pytest
import torch
from generation_helpers import BYTES, greedy, log_prob, make_random_model
from helpers import BPE
from model_helpers import MODERN

from data import tokenizer
from data.readers import Piece
from generation.perplexity import score_documents

lm_eval = pytest.importorskip("lm_eval", reason="NOT RUN: needs lm-eval")
WORDS = tokenizer.build_tokenizer(BPE, ["the cat and the hat and the bat sat\n" * 20], True)
PAIRS = [("the cat sat", " on the mat"), ("the ", "hat"), ("", "the bat"), (" ", "x")]
PAIRS += [("the hat and the bat " * 20, "é")]
# the continuation begins within a token of WORDS
SPANNING = [("the h", "at"), ("the c", "at and"), ("the hat", "s"), ("the cat", "s and the hat")]


def make_adapter(encoding):
    from generation.lm_eval_adapter import ModelAdapter

    model = make_random_model(MODERN, dtype=torch.float64, V=encoding.n_vocab)
    return model, ModelAdapter(model, encoding, batch_size=4)


def requests(*args):
    return [SimpleNamespace(args=arguments) for arguments in args]


@pytest.mark.parametrize("encoding", [BYTES, WORDS], ids=["byte", "bpe"])
def test_log_likelihoods_equal_those_of_plain_forward_passes(encoding):
    """From the first token that the continuation changes. A long context loses its beginning."""
    model, adapter = make_adapter(encoding)
    pairs = PAIRS + SPANNING
    for (context, continuation), result in zip(
        pairs, adapter.loglikelihood(requests(*pairs)), strict=True
    ):
        tokens = encoding.encode(context + continuation)
        context_tokens = encoding.encode(context.rstrip())
        equal = [a == b for a, b in zip(tokens, context_tokens, strict=False)]
        num_targets = len(tokens) - [*equal, False].index(False)
        tokens = [encoding.start_token, *tokens][-model.config.block_size - 1 :]
        expected, is_greedy = log_prob(model, tokens, len(tokens) - num_targets)
        assert result == (pytest.approx(expected, rel=1e-5), is_greedy), context
        assert expected < 0


def test_rolling_log_likelihoods_are_those_of_documents():
    """Also without an end-of-text token."""
    model, adapter = make_adapter(BYTES)
    texts = ["the cat", "the cat sat on the mat, and the hat " * 3, ""]
    documents = [[Piece(text, ends_document=True, is_prompt=False)] for text in texts]
    *rows, _ = score_documents(model, BYTES, documents, batch_size=4)
    scores = adapter.loglikelihood_rolling(requests(*((text,) for text in texts)))
    for score, row in zip(scores, rows, strict=True):
        assert -score == pytest.approx((row["loss"] or 0) * row["tokens"], rel=1e-5)


def test_generation_is_greedy_and_ends_at_a_stop_string():
    model, adapter = make_adapter(BYTES)
    contexts = ["the cat", "a", ""]
    texts = {}
    for until in ("", "e"):
        settings = {"max_gen_toks": 12, "until": [until]}
        texts[until] = adapter.generate_until(
            requests(*((context, settings) for context in contexts))
        )
    for context, text, before_stop in zip(contexts, texts[""], texts["e"], strict=True):
        tokens = greedy(model, [10, *context.encode()], 12)
        assert bytes(tokens).decode(errors="replace").startswith(text)
        assert before_stop == text.split("e")[0]


@pytest.mark.parametrize(
    "settings", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"do_sample": False}]
)
def test_sampling_that_leaves_one_token_is_greedy(settings):
    _, adapter = make_adapter(BYTES)
    common = {"max_gen_toks": 8, "do_sample": True, "temperature": 5.0}
    (text,) = adapter.generate_until(requests(("the cat", common | settings)))
    assert text == adapter.generate_until(requests(("the cat", {"max_gen_toks": 8})))[0]
