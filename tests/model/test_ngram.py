"""Embeddings of the last few tokens together: which row each has, and that nothing else can reach it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import MODERN, make, some_tokens

from model.ngram import NgramEmbedding

tokens_lists = st.lists(st.integers(0, 60_000), min_size=4, max_size=12)


def drawn(n=4, rows=1000, C=8) -> NgramEmbedding:
    ngrams = NgramEmbedding(n, rows, C)
    torch.nn.init.normal_(ngrams.table.weight)
    return ngrams


@settings(max_examples=50, deadline=None)
@given(before=tokens_lists, gram=st.lists(st.integers(0, 60_000), min_size=4, max_size=4), other=tokens_lists)
def test_a_row_depends_on_the_tokens_of_its_ngram_alone(before, gram, other):
    ngrams = drawn()
    here = ngrams.ngram_hashes(torch.tensor([[*before, *gram, 7]]), None)[0, -2]
    there = ngrams.ngram_hashes(torch.tensor([[*other, *gram]]), None)[0, -1]
    assert here.tolist() == there.tolist()
    assert ((here >= 0) & (here < 1000)).all()


@settings(max_examples=50, deadline=None)
@given(tokens=tokens_lists)
def test_the_embedding_is_the_sum_over_its_ngrams(tokens):
    """By hand: the 2-gram, the 3-gram and the 4-gram that end at the last token, in exact integers."""
    ngrams = drawn()
    expected, key = torch.zeros(8), tokens[-1]
    for before in (tokens[-2], tokens[-3], tokens[-4]):
        key = (key * NgramEmbedding.FACTOR + before + 1) % NgramEmbedding.PRIME
        expected += ngrams.table.weight[key % 1000]
    torch.testing.assert_close(ngrams(torch.tensor([tokens]), None)[0, -1], expected)


def test_different_ngrams_spread_over_all_rows():
    """65 characters have 4,225 pairs: in as many rows about 1 - 1/e of the rows are met, and none by many."""
    pairs = torch.cartesian_prod(torch.arange(65), torch.arange(65))
    met = NgramEmbedding(2, 4225, 1).ngram_hashes(pairs, None)[:, 1, 0].bincount(minlength=4225)
    assert (met > 0).float().mean() == pytest.approx(0.632, abs=0.05)
    assert met.max() < 10
    begins = NgramEmbedding(2, 4225, 1).ngram_hashes(torch.arange(65).unsqueeze(1), None)[:, 0, 0]
    assert begins.unique().numel() > 60, "a first token's 2-gram, with nothing before it, is its own"


def test_a_later_token_changes_no_earlier_logits():
    model = make(MODERN)
    torch.nn.init.normal_(model.ngrams.table.weight)
    tokens = some_tokens(1)
    changed = tokens.clone()
    changed[0, 10] += 1
    same = (model(tokens) == model(changed)).all(-1)[0]
    assert same[:10].all()
    same = (model.ngrams(tokens, None) == model.ngrams(changed, None)).all(-1)[0]
    assert same.tolist() == [not 10 <= i < 14 for i in range(24)], "those that it ends, and three more that it is in"


def test_a_document_is_embedded_as_if_it_stood_alone():
    ngrams = drawn()
    tokens, doc_ids = some_tokens(1, 12), torch.tensor([[0] * 5 + [1] * 7])
    together = ngrams(tokens, doc_ids)
    torch.testing.assert_close(together[:, :5], ngrams(tokens[:, :5], None))
    torch.testing.assert_close(together[:, 5:], ngrams(tokens[:, 5:], None))
    assert not torch.allclose(together[:, 5:8], ngrams(tokens, None)[:, 5:8])


def test_without_ngrams_there_is_no_table():
    assert make(MODERN | dict(max_ngram=1)).ngrams is None
