"""N-gram embeddings: the hash, the sum, causality and document masks."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_helpers import random_tokens

from model.layers import HASH_FACTOR, HASH_PRIME, NgramEmbedding

ids = st.integers(0, 60_000)
token_lists = st.lists(ids, min_size=4, max_size=12)


def random_ngrams(n=4, rows=1000, C=8) -> NgramEmbedding:
    ngrams = NgramEmbedding(n, rows, C)
    torch.nn.init.normal_(ngrams.table.weight)
    return ngrams


@settings(max_examples=50, deadline=None)
@given(before=token_lists, gram=st.lists(ids, min_size=4, max_size=4), other=token_lists)
def test_row_depends_only_on_the_tokens_of_the_ngram(before, gram, other):
    ngrams = random_ngrams()
    here = ngrams.ngram_hashes(torch.tensor([[*before, *gram, 7]]), None)[0, -2]
    there = ngrams.ngram_hashes(torch.tensor([[*other, *gram]]), None)[0, -1]
    assert here.tolist() == there.tolist()


@settings(max_examples=50, deadline=None)
@given(tokens=token_lists)
def test_embedding_is_the_sum_over_all_ngrams(tokens):
    """Computes the hashes of the last 2-gram, 3-gram and 4-gram in Python integers."""
    ngrams = random_ngrams()
    expected = torch.zeros(8)
    value = tokens[-1]
    for before in (tokens[-2], tokens[-3], tokens[-4]):
        value = (value * HASH_FACTOR + before + 1) % HASH_PRIME
        expected += ngrams.table.weight[value % 1000]
    torch.testing.assert_close(ngrams(torch.tensor([tokens]), None)[0, -1], expected)


def test_previous_tokens_continue_the_ngrams():
    ngrams = random_ngrams()
    tokens = random_tokens(2, 12)
    continued = ngrams(tokens[:, 5:], None, previous_tokens=tokens[:, 2:5])
    torch.testing.assert_close(continued, ngrams(tokens, None)[:, 5:])


def test_token_is_part_of_the_next_ngrams_only():
    ngrams = random_ngrams()
    tokens = random_tokens(1)
    changed = tokens.clone()
    changed[0, 10] += 1
    is_same = (ngrams(tokens, None) == ngrams(changed, None)).all(-1)[0]
    assert is_same.tolist() == [not 10 <= i < 14 for i in range(24)]


def test_masked_documents_are_embedded_like_single_documents():
    ngrams = random_ngrams()
    tokens = random_tokens(1, 12)
    doc_ids = torch.tensor([[0] * 5 + [1] * 7])
    single = torch.cat((ngrams(tokens[:, :5], None), ngrams(tokens[:, 5:], None)), dim=1)
    torch.testing.assert_close(ngrams(tokens, doc_ids), single)
    assert not torch.allclose(ngrams(tokens, None), single)
