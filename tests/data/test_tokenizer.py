"""Tokenizers: text to ids and back."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from data_helpers import build
from helpers import BPE, BYTE, CHAR, GPT2, TEXT_SOURCE
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data.prepare import prepare
from data.tokenizer import encode, end_of_text, from_spec, to_spec, token_bytes

any_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200)


@settings(max_examples=50, deadline=None)
@given(documents=st.lists(any_text, min_size=1, max_size=3), config=st.sampled_from([CHAR, BYTE, BPE]))
def test_decoding_inverts_encoding(documents, config):
    tokenizer = build(documents, config)
    for text in documents:
        ids = encode(tokenizer, text)
        assert tokenizer.decode(ids.tolist()) == text
        assert token_bytes(tokenizer)[ids].sum() == len(text.encode())
        if config is CHAR:
            assert len(ids) == len(text)
        if config is BYTE:
            assert ids.tolist() == list(text.encode())
    again = from_spec(json.loads(json.dumps(to_spec(tokenizer))))
    assert again.encode(documents[0], disallowed_special=()) == encode(tokenizer, documents[0]).tolist()
    assert again.n_vocab == tokenizer.n_vocab
    assert (end_of_text(tokenizer) is None) == (len(documents) == 1)


def test_bpe_respects_vocab_size_and_encodes_special_tokens_as_text():
    documents = ["the cat and the hat <|endoftext|> " * 50, "the end"]
    tokenizer = build(documents, replace(BPE, vocab_size=270))
    assert tokenizer.n_vocab == 270
    ids = encode(tokenizer, documents[0])
    assert len(ids) < len(documents[0]) / 2
    assert end_of_text(tokenizer) not in ids
    assert build(["abab"], replace(BPE, vocab_size=5000)).n_vocab < 300  # there are no more pairs to merge


def test_unknown_character_is_reported_with_position():
    tokenizer = build(["abc"], CHAR)
    with pytest.raises(UserError, match="the prompt has the character 'é' at position 2"):
        encode(tokenizer, "abé", "the prompt")


def test_gpt2_tokenizer_matches_gpt2():
    try:
        tokenizer = build(["x"], GPT2)
    except UserError as error:
        pytest.skip(f"NOT RUN: {error}")
    assert encode(tokenizer, "Hello, world").tolist() == [15496, 11, 995]
    assert (tokenizer.n_vocab, end_of_text(tokenizer)) == (50257, 50256)
    again = from_spec(to_spec(tokenizer))
    assert again.encode("Hello, world") == [15496, 11, 995]


def test_tokenizer_without_end_of_text_prints_a_warning(workdir, capsys):
    for n in range(3):
        Path(f"{n}.txt").write_text("The 1th line says 1.\n" * 30)
    spec = to_spec(build(["".join(map(chr, range(128)))], CHAR))
    prepare(replace(TEXT_SOURCE, path="?.txt"), replace(CHAR, name="run", run="x"), 4, spec)
    assert "the tokenizer of run x has no <|endoftext|>" in capsys.readouterr().out


def test_unknown_character_is_reported_with_its_document(workdir):
    for n in range(5):
        (workdir / f"{n}.txt").write_text("a" * 100 + "\u2603" * (n == 3))
    spec = to_spec(build(["a", "a"], CHAR))
    with pytest.raises(UserError, match=r"document 4 of text has the character '\u2603' at position 100"):
        prepare(replace(TEXT_SOURCE, path="?.txt"), replace(CHAR, name="run", run="x"), 4, spec)
