"""Filters compared with their definitions, draws with their distribution; the detokenizer."""

import math

import pytest
import torch
from generation_helpers import BYTES
from helpers import sampling
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from common.settings import check
from data import tokenizer
from generation.sampling import (
    IncrementalDetokenizer,
    filtered_probs,
    sample_inverse_cdf,
    sample_next_token,
)

# Logits on a grid: float32 would round close values to equal ones, and the order of equal values is
# undefined.
rows = st.lists(st.integers(-800, 800).map(lambda i: i / 100), min_size=2, max_size=12)
EXACT = settings(max_examples=100, deadline=None)


def plain(row, temperature=1.0):
    return (torch.tensor([row], dtype=torch.float64) / temperature).softmax(-1)[0]


def filter_row(row, **settings):
    return filtered_probs(torch.tensor([row]), sampling(**settings))[0]


def assert_renormalized(kept, row):
    """The remaining probabilities keep their ratios, and sum to one."""
    assert kept.sum().item() == pytest.approx(1, abs=1e-5)
    ratio = kept[kept > 0].double() / plain(row)[kept > 0]
    torch.testing.assert_close(ratio, ratio[0].expand_as(ratio), rtol=1e-3, atol=0)


@EXACT
@given(row=rows, temperature=st.floats(0.05, 20))
def test_temperature_divides_the_logits(row, temperature):
    probs = filter_row(row, temperature=temperature)
    torch.testing.assert_close(probs.double(), plain(row, temperature), atol=1e-5, rtol=1e-3)


@EXACT
@given(row=rows, k=st.integers(1, 12))
def test_top_k_keeps_the_k_most_likely_tokens(row, k):
    kept = filter_row(row, top_k=k)
    assert_renormalized(kept, row)
    assert (kept > 0).sum() == min(k, len(row))
    left_out = torch.tensor(row)[kept == 0]
    assert len(left_out) == 0 or left_out.max() <= torch.tensor(row)[kept > 0].min()


@EXACT
@given(row=rows, p=st.floats(0.05, 1.0))
def test_top_p_keeps_the_smallest_set_that_sums_to_p(row, p):
    kept = filter_row(row, top_p=p)
    assert_renormalized(kept, row)
    mass = plain(row)[kept > 0]
    assert mass.sum() >= p - 1e-5
    assert mass.sum() - mass.min() < p + 1e-5  # the sum without the least likely token
    assert (kept == 0).sum() == 0 or plain(row)[kept == 0].max() <= mass.min()


@EXACT
@given(row=rows, p=st.floats(0.01, 1.0))
def test_min_p_keeps_tokens_above_a_fraction_of_the_largest_probability(row, p):
    kept = filter_row(row, min_p=p)
    assert_renormalized(kept, row)
    share = plain(row) / plain(row).max()
    assert (share[kept > 0] >= p * (1 - 1e-4)).all()
    assert (share[kept == 0] <= p * (1 + 1e-4)).all()


def test_temperature_zero_is_greedy():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    tokens = sample_next_token(logits, sampling(temperature=0, top_k=2), torch.tensor([0.999]))
    assert tokens.tolist() == [1]


@EXACT
@given(row=rows, k=st.integers(1, 3), number=st.floats(0, 1, exclude_max=True, width=32))
def test_draw_inverts_the_cumulative_distribution(row, k, number):
    probs = filter_row(row, top_k=k)
    token = sample_inverse_cdf(probs[None], torch.tensor([number]))[0]
    assert probs[token] > 0
    cdf = probs.double().cumsum(-1)
    assert cdf[token] > number * cdf[-1] * (1 - 1e-12)
    assert token == 0 or cdf[token - 1] <= number * cdf[-1] * (1 + 1e-12)


def test_deterministic_mode_draws_the_same_token():
    """It computes on the CPU, because cumsum on CUDA is not deterministic."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))
    uniform = torch.tensor([0.1, 0.4, 0.6, 0.9])
    expected = sample_next_token(logits, sampling(), uniform)
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(sample_next_token(logits, sampling(), uniform), expected)
    finally:
        torch.use_deterministic_algorithms(False)


INVALID = [
    (dict(temperature=-0.1), "temperature=-0.1 must be at least 0"),
    (dict(temperature=1e-46), "temperature=1e-46 is too small; set 0"),
    (dict(top_k=0), "top_k=0 must be at least 1"),
    (dict(top_p=1.1), "top_p=1.1 must be above 0 and at most 1"),
    (dict(min_p=math.nan), "min_p=nan must be above 0"),
    (dict(stop=""), "stop= must be a string that is not empty"),
    (dict(stop=[]), r"stop=\[\] must be a string that is not empty"),
    (dict(stop=["a", 3]), r"stop=\[a,3\] must be a string"),
    (dict(max_new_tokens=-1), "max_new_tokens=-1 must be at least 0"),
]


@pytest.mark.parametrize(("setting", "message"), INVALID)
def test_settings_out_of_range_are_refused(setting, message):
    with pytest.raises(UserError, match=message):
        check(sampling(**setting))


# The detokenizer, compared with decoding all tokens at once


def make_detokenizer(end_token=None, encoding=BYTES, **settings):
    return IncrementalDetokenizer(encoding, sampling(**settings), end_token)


def push_all(detokenizer, tokens):
    """Push tokens until the sample ends -> (all text, finish reason)."""
    shown = ""
    for token in tokens:
        text, finish_reason = detokenizer.push(token)
        shown += text
        if finish_reason:
            return shown, finish_reason
    return shown, None


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_incomplete_characters_are_never_shown(text):
    """Each token is one byte."""
    detokenizer = make_detokenizer(max_new_tokens=10_000)
    shown = ""
    for token in text.encode():
        shown += detokenizer.push(token)[0]
        assert text.startswith(shown)
    assert shown == text


def text_before_first_stop(text, stops):
    """The text before the stop string that is complete first, or None without a stop string."""
    for size in range(len(text) + 1):
        found = [size - len(stop) for stop in stops if text[:size].endswith(stop)]
        if found:
            return text[: min(found)]
    return None


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.text("abc", min_size=1, max_size=5), max_size=10),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
@example(pieces=["aa", "b"], stops=["aab", "ac"])  # "aa" may begin both, with different lengths
def test_sample_ends_before_the_stop_string_that_is_complete_first(pieces, stops):
    """With any division of the text into tokens. No part of a stop string is ever shown."""
    vocabulary = [piece.encode() for piece in dict.fromkeys(pieces)] or [b"a"]
    encoding = tokenizer.Tokenizer("words", r"(?s).", vocabulary, {})
    detokenizer = make_detokenizer(encoding=encoding, stop=stops, max_new_tokens=10_000)
    complete = "".join(pieces)
    expected = text_before_first_stop(complete, stops)
    shown = ""
    for piece in pieces:
        text, finish_reason = detokenizer.push(encoding.encode_single_token(piece.encode()))
        shown += text
        assert (complete if expected is None else expected).startswith(shown)
        if finish_reason is not None:
            assert (shown, finish_reason) == (expected, "stop")
            return
    assert expected is None
    assert shown + detokenizer.pending == complete


@pytest.mark.parametrize(
    ("text", "settings", "expected"),
    [
        (b"axy", dict(max_new_tokens=3), ("axy", "length")),
        (b"ax\0", dict(end_token=0), ("ax", "end")),
    ],
    ids=["length", "end"],
)
def test_pending_text_is_shown_when_the_sample_ends(text, settings, expected):
    assert push_all(make_detokenizer(stop="xyz", **settings), text) == expected


def test_incomplete_character_at_the_end_is_dropped():
    assert push_all(make_detokenizer(max_new_tokens=4), "aé€".encode()) == ("aé", "length")


def test_invalid_bytes_are_replaced():
    assert push_all(make_detokenizer(max_new_tokens=3), b"a\xffb") == ("a\ufffdb", "length")
