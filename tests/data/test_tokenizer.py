"""Tokenizers: text to ids and back, training of a vocabulary, and text that does not fit."""

import json
import os
import pickle
import signal
import threading
from dataclasses import replace

import numpy as np
import pytest
from data_helpers import UNUSUAL_TEXTS, any_text, build, write_documents
from helpers import BPE, BYTE, CHAR, GPT2, TEXT
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data import DataConfig
from data.prepare import prepare
from data.tokenizer import (
    TEXT_OVERHEAD_CHARS,
    encode,
    end_of_text,
    from_spec,
    sample_texts,
    to_spec,
    token_bytes,
)

documents = st.lists(any_text.filter(bool), min_size=1, max_size=3)
configs = st.sampled_from([CHAR, BYTE, BPE])
ALL = [text for text in UNUSUAL_TEXTS if text]

# Text to ids and back


@settings(max_examples=15, deadline=None)
@example(ALL, BPE)
@given(documents, configs)
def test_decoding_inverts_encoding_also_after_the_spec_was_saved(documents, config):
    tokenizer = build(documents, config)
    again = from_spec(json.loads(json.dumps(to_spec(tokenizer))))
    for text in documents:
        ids = encode(tokenizer, text)
        assert tokenizer.decode(ids.tolist()) == text
        assert token_bytes(tokenizer)[ids].sum() == len(text.encode())
        assert np.array_equal(encode(again, text), ids)


@pytest.mark.parametrize("text", ALL)
def test_char_and_byte_have_one_token_per_character_and_byte(text):
    assert len(encode(build([text], CHAR), text)) == len(text)
    assert len(encode(build([text], BYTE), text)) == len(text.encode())


@pytest.mark.parametrize("config", [CHAR, BYTE, BPE], ids=lambda config: config.name)
def test_only_a_vocabulary_of_several_documents_has_an_end_of_text_token(config):
    assert end_of_text(build([TEXT], config)) is None
    tokenizer = build([TEXT, TEXT], config)
    assert end_of_text(tokenizer) == tokenizer.n_vocab - 1


def test_gpt2_tokenizer_matches_gpt2():
    try:
        tokenizer = build(["x"], GPT2)
    except UserError as error:
        pytest.skip(f"NOT RUN: {error}")
    assert encode(tokenizer, "Hello, world").tolist() == [15496, 11, 995]
    assert (tokenizer.n_vocab, end_of_text(tokenizer)) == (50257, 50256)


# Training of a BPE vocabulary

CATS = ["the cat and the hat <|endoftext|> " * 50, "the end"]


def test_bpe_joins_frequent_characters_up_to_the_size_of_the_vocabulary():
    tokenizer = build(CATS, replace(BPE, vocab_size=270))
    assert tokenizer.n_vocab == 270  # including the end-of-text token
    assert len(encode(tokenizer, CATS[0])) < len(CATS[0]) / 2


def test_copy_has_the_ids_and_the_start_token():
    tokenizer = build(["ab", "c"], CHAR)
    copied = pickle.loads(pickle.dumps(tokenizer))
    assert copied.encode("cab") == tokenizer.encode("cab")
    assert copied.start_token == 3  # the end-of-text token


@pytest.mark.parametrize("count", [280, 1000])
def test_vocabulary_of_long_text_is_trained_on_all_parts(monkeypatch, count):
    monkeypatch.setattr("data.tokenizer.MAX_TRAIN_CHARS", 10_000)
    sample = sample_texts(map(str, range(count)))
    stride = int(sample[1])
    assert sample == [str(number) for number in range(0, count, stride)]
    assert stride % 2 == 1  # prompts and completions alternate
    assert 3_000 < sum(len(text) + TEXT_OVERHEAD_CHARS for text in sample) <= 10_000


def test_interrupt_does_not_wait_for_the_training_of_a_vocabulary(monkeypatch):
    may_end = threading.Event()

    class SlowTokenizer:
        def train_from_iterator(self, texts, vocab_size, pattern):
            os.kill(os.getpid(), signal.SIGINT)
            may_end.wait()

    monkeypatch.setattr("rustbpe.Tokenizer", SlowTokenizer)
    with pytest.raises(KeyboardInterrupt):
        build(["a text"], BPE)
    may_end.set()


# Characters and tokenizers that do not fit


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("Ü", "'Ü'; remove them"),
        ("\udce9", r"'\\udce9'; remove them"),
        ("0123456789áéíóú", "'0', .*'8'; remove them"),
    ],
)
def test_characters_without_a_token_are_listed(text, listed):
    tokenizer = build(["abcde"], CHAR)
    with pytest.raises(UserError, match=f"the prompt has characters .* vocabulary: {listed}"):
        encode(tokenizer, text, "the prompt")


@pytest.mark.parametrize("config", [BYTE, BPE], ids=["byte", "bpe"])
def test_half_a_character_is_refused(config):
    with pytest.raises(UserError, match=r"the prompt cannot be encoded .*correct the text"):
        encode(build(["abcde"], config), "a\udce9", "the prompt")


RUN = replace(CHAR, name="run", run="x")


def test_character_without_a_token_in_the_vocabulary_of_another_run_is_refused(workdir):
    spec = to_spec(build(["ab"], CHAR))
    config = DataConfig(path=write_documents("b/*.txt", ["ab" * 30, "ab\u2603"]))
    with pytest.raises(UserError, match=r"\u2603.* tokenizer=byte"):
        prepare(config, RUN, 4, spec)
