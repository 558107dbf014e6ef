"""The incremental detokenizer, compared with decoding all tokens at once."""

import pytest
from generation_helpers import BYTES
from helpers import sampling
from hypothesis import given, settings
from hypothesis import strategies as st

from common.settings import unescape
from data import tokenizer
from generation.detokenizer import IncrementalDetokenizer


def detokenizer(end_token=None, encoding=BYTES, **settings):
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
    incremental, shown = detokenizer(max_new_tokens=10_000), ""
    for token in text.encode():
        shown += incremental.push(token)[0]
        assert text.startswith(shown)
    assert shown == text


@settings(max_examples=200, deadline=None)
@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(1, 5), max_size=30),
)
def test_sample_ends_before_the_stop_string_that_is_complete_first(text, stops, cuts):
    """Tests any division of the text into tokens. The beginning of a stop string is never shown."""
    ends = (
        [size - len(stop) for stop in stops if text[:size].endswith(stop)]
        for size in range(len(text) + 1)
    )
    end = next((min(found) for found in ends if found), None)
    expected = text[:end]
    pieces, rest = [], text
    for cut in cuts:
        pieces, rest = [*pieces, rest[:cut]], rest[cut:]
    pieces = [piece for piece in [*pieces, *rest] if piece]
    vocabulary = [piece.encode() for piece in dict.fromkeys(pieces)] or [b"a"]
    encoding = tokenizer._make_tokenizer("words", r"(?s).", vocabulary, {})
    incremental = detokenizer(encoding=encoding, stop=stops, max_new_tokens=10_000)
    shown, finish_reason = "", None
    for piece in pieces:
        text, finish_reason = incremental.push(encoding.encode_single_token(piece.encode()))
        shown += text
        assert expected.startswith(shown), "the beginning of a stop string was shown"
        if finish_reason:
            break
    if end is None:
        assert shown + incremental.pending == expected
    else:
        assert (shown, finish_reason) == (expected, "stop")


@pytest.mark.parametrize("stop", ["\n", "\n\n", "x\ny", ["z", "\n"]])
def test_stop_string_matches_both_kinds_of_line_ends(stop):
    """The text before a Windows line end has no carriage return at its end."""
    stop_string = stop if isinstance(stop, str) else stop[-1]
    for line_end in ("\n", "\r\n"):
        text = "a\rb" + stop_string.replace("\n", line_end) + "c"
        assert push_all(detokenizer(stop=stop, max_new_tokens=99), text.encode()) == (
            "a\rb",
            "stop",
        )


def test_stop_string_can_be_a_carriage_return():
    assert push_all(detokenizer(stop=unescape(r"\r\n"), max_new_tokens=99), b"a\rb\nc\r\nd") == (
        "a\rb\nc",
        "stop",
    )


def test_escapes_are_replaced_once():
    assert unescape([r"\r\n\t", r"\\n", r"\x", 1]) == ["\r\n\t", r"\n", r"\x", 1]


def test_pending_text_is_shown_when_the_sample_ends():
    assert push_all(detokenizer(stop="xyz", max_new_tokens=3), b"axy") == ("axy", "length")
    assert push_all(detokenizer(stop="xyz", end_token=0), b"ax\0") == ("ax", "end")


def test_incomplete_character_at_the_end_is_dropped_and_invalid_bytes_are_replaced():
    assert push_all(detokenizer(max_new_tokens=4), "aé€".encode()) == ("aé", "length")
    assert push_all(detokenizer(max_new_tokens=3), b"a\xffb") == ("a\ufffdb", "length")
