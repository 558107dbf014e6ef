"""The incremental detokenizer, compared with decoding all tokens at once."""

import pytest
from generation_helpers import BYTES
from helpers import sampling
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data import tokenizer
from generation.detokenizer import IncrementalDetokenizer


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
    encoding = tokenizer._make_tokenizer("words", r"(?s).", vocabulary, {})
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


def test_stop_string_can_contain_a_carriage_return():
    detokenizer = make_detokenizer(stop="\r\n", max_new_tokens=99)
    assert push_all(detokenizer, b"a\rb\nc\r\nd") == ("a\rb\nc", "stop")


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


def test_end_of_text_token_is_not_counted():
    detokenizer = make_detokenizer(end_token=0)
    push_all(detokenizer, b"ab\0")
    assert detokenizer.n_tokens == 2


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("stop", ["\n", "\n\n", "x\ny"])
def test_stop_string_matches_both_kinds_of_line_ends(stop, line_end):
    """The text before a Windows line end has no carriage return at its end."""
    text = "a\rb" + stop.replace("\n", line_end) + "c"
    detokenizer = make_detokenizer(stop=stop, max_new_tokens=99)
    assert push_all(detokenizer, text.encode()) == ("a\rb", "stop")
