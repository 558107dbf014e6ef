"""FastBPE gives the same ids as tiktoken."""

from dataclasses import replace

import numpy as np
import pytest
from data_helpers import GPT2S, GPT4, build
from helpers import BPE
from hypothesis import example, given, settings
from hypothesis import strategies as st

from data.fast_bpe import FastBPE, remove_lookahead
from data.tokenizer import BPE_PATTERN, CHARACTER_PATTERN, _make_tokenizer, encode

OLD_GPT2S = r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


@pytest.fixture(scope="module")
def merges() -> list[bytes]:
    """Tokens of a text with many spaces, so that another division into words gives other ids."""
    text = "".join(f" {word}\n  {word}'s\t\t{word} \r\n\n{word}.\n\n" for word in ("ab", "abc", "9", "99 ")) * 20
    tokenizer = build([text], replace(BPE, vocab_size=400))
    return [tokenizer.decode_single_token_bytes(i) for i in range(tokenizer.n_vocab)]


@pytest.mark.parametrize("pattern", [BPE_PATTERN, GPT2S, OLD_GPT2S, *GPT4], ids=["ours", "gpt2", "older", "cl", "o2"])
@settings(max_examples=150, deadline=None)
@given(text=st.text(st.sampled_from(list("  \n\r\tabc9.,'sé/\u3000\xa0\x85\x1e\x1c\x0b")), max_size=14))
@example(text="a\n" + " " * 1001)
def test_fast_bpe_gives_the_ids_of_tiktoken(merges, pattern, text):
    tokenizer = _make_tokenizer("x", pattern, merges, {})
    fast = FastBPE.from_tokenizer(tokenizer)
    assert fast is not None
    for long in (text, text * 9):
        assert np.array_equal(encode(tokenizer, long, fast=fast), encode(tokenizer, long))


@pytest.mark.parametrize("pattern", [CHARACTER_PATTERN, r"a(?=b)|\s+(?!\S)|\s", r"\w+|\s+(?!\S)|x"])
def test_unsupported_pattern_is_not_rewritten(pattern):
    assert remove_lookahead(pattern) is None
