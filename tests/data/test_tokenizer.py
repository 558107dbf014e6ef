"""Tokenizers: text to ids and back. FastBPE (data/fast_bpe.py) gives the same ids as tiktoken."""

import json
import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from data_helpers import GPT2S, GPT4, UNUSUAL_TEXTS, any_text, build, write_documents
from helpers import BPE, BYTE, CHAR, GPT2, TEXT
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import TrainingFailed, UserError
from data import DataConfig
from data.fast_bpe import FastBPE, remove_lookahead
from data.prepare import prepare
from data.tokenizer import (
    BPE_PATTERN,
    TEXT_OVERHEAD_CHARS,
    _make_tokenizer,
    encode,
    end_of_text,
    from_spec,
    sample_texts,
    to_spec,
    token_bytes,
)

OLD_GPT2S = r"'s|'t|'re|'ve|'m|'ll|'d| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
documents = st.lists(any_text.filter(bool), min_size=1, max_size=3)
configs = st.sampled_from([CHAR, BYTE, BPE])
ALL = [text for text in UNUSUAL_TEXTS if text]

# Text to ids and back


@settings(max_examples=50, deadline=None)
@example(ALL, BPE)
@given(documents, configs)
def test_decoding_inverts_encoding(documents, config):
    tokenizer = build(documents, config)
    for text in documents:
        assert tokenizer.decode(encode(tokenizer, text).tolist()) == text


@settings(max_examples=30, deadline=None)
@example(ALL, BPE)
@given(documents, configs)
def test_bytes_of_tokens_are_the_bytes_of_the_text(documents, config):
    tokenizer = build(documents, config)
    ids = encode(tokenizer, "".join(documents))
    assert token_bytes(tokenizer)[ids].sum() == len("".join(documents).encode())


@settings(max_examples=30, deadline=None)
@example(ALL, BPE)
@given(documents, configs)
def test_spec_is_json_of_which_the_same_tokenizer_can_be_built(documents, config):
    tokenizer = build(documents, config)
    again = from_spec(json.loads(json.dumps(to_spec(tokenizer))))
    for text in documents:
        assert np.array_equal(encode(again, text), encode(tokenizer, text))


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


def test_bpe_has_vocab_size_tokens_including_the_end_of_text_token():
    assert build(CATS, replace(BPE, vocab_size=270)).n_vocab == 270


def test_bpe_stops_when_there_are_no_more_pairs_to_merge():
    assert build(["abab"], replace(BPE, vocab_size=5000)).n_vocab < 300


def test_bpe_joins_frequent_characters():
    tokenizer = build(CATS, replace(BPE, vocab_size=270))
    assert len(encode(tokenizer, CATS[0])) < len(CATS[0]) / 2


def test_special_tokens_in_a_text_are_encoded_as_text():
    tokenizer = build(CATS, replace(BPE, vocab_size=270))
    assert end_of_text(tokenizer) not in encode(tokenizer, CATS[0])


@pytest.mark.parametrize("count", [280, 1000])
def test_vocabulary_of_long_text_is_trained_on_all_parts(monkeypatch, count):
    monkeypatch.setattr("data.tokenizer.MAX_TRAIN_CHARS", 10_000)
    sample = sample_texts(map(str, range(count)))
    stride = int(sample[1])
    assert sample == [str(number) for number in range(0, count, stride)]
    assert 3_000 < sum(len(text) + TEXT_OVERHEAD_CHARS for text in sample) <= 10_000


def test_vocabulary_of_long_text_is_trained_on_prompts_and_completions(monkeypatch):
    """They alternate, so the sample takes every third text, every ninth, and so on."""
    monkeypatch.setattr("data.tokenizer.MAX_TRAIN_CHARS", 10_000)
    sample = sample_texts(map(str, range(1000)))
    assert {int(text) % 2 for text in sample} == {0, 1}


def test_interrupt_ends_the_training_of_a_vocabulary_at_once(workdir, monkeypatch):
    """The process that trains the vocabulary would not end by itself."""
    started = workdir / "started"
    script = workdir / "endless.py"
    script.write_text(
        "import os, pathlib, time\n"
        "pathlib.Path('started').write_text(str(os.getpid()))\n"
        "time.sleep(10**6)\n",
        encoding="utf-8",
    )
    monkeypatch.setattr("data.tokenizer.TRAIN_BPE", script)

    def interrupt():
        while not started.exists() or not started.read_text(encoding="utf-8"):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        build(["a text"], BPE)
    child = int(started.read_text(encoding="utf-8"))
    with suppress(ChildProcessError):  # subprocess has waited for it
        os.waitpid(child, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_vocabulary_whose_process_fails_is_reported_in_one_sentence(workdir, monkeypatch):
    script = workdir / "killed.py"
    script.write_text("import os; os.kill(os.getpid(), 9)", encoding="utf-8")
    monkeypatch.setattr("data.tokenizer.TRAIN_BPE", script)
    with pytest.raises(TrainingFailed, match=r"failed \(exit code -9\); .* tokenizer=byte"):
        build(["a text"], BPE)


# Characters and tokenizers that do not fit


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("Ü", "'Ü'; remove them"),
        ("e\u0301", "'\u0301'; remove them"),
        ("\x1b\u2028", r"'\\x1b', '\\u2028'; remove them"),
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


def test_documents_are_encoded_with_a_tokenizer_without_an_end_of_text_token(workdir):
    spec = to_spec(build(["ab"], CHAR))
    config = DataConfig(path=write_documents("a/*.txt", ["ab" * 30] * 3))
    assert prepare(config, RUN, 4, spec).meta["tokens"] == {"train": 120, "val": 60}


def test_character_without_a_token_in_the_vocabulary_of_another_run_is_refused(workdir):
    spec = to_spec(build(["ab"], CHAR))
    config = DataConfig(path=write_documents("b/*.txt", ["ab" * 30, "ab\u2603"]))
    with pytest.raises(UserError, match=r"\u2603.* tokenizer=byte"):
        prepare(config, RUN, 4, spec)


# FastBPE


@pytest.fixture(scope="module")
def merges() -> list[bytes]:
    """Tokens of a text with many spaces, so that another division into words gives other ids."""
    text = ""
    for word in ("ab", "abc", "9", "99 "):
        text += f" {word}\n  {word}'s\t\t{word} \r\n\n{word}.\n\n"
    tokenizer = build([text * 20], replace(BPE, vocab_size=400))
    tokens = [tokenizer.decode_single_token_bytes(i) for i in range(tokenizer.n_vocab)]
    return [*tokens, b"\n ", b"\n  "]


FILLER = "abc " * 250  # FastBPE leaves shorter texts to tiktoken
SPACES_AND_WORDS = st.sampled_from(list("  \n\r\tabc9.,'sé/\u3000\xa0\x85\x1e\x1c\x0b"))


@pytest.mark.parametrize(
    "pattern", [BPE_PATTERN, GPT2S, OLD_GPT2S, *GPT4], ids=["ours", "gpt2", "older", "cl", "o2"]
)
@settings(max_examples=60, deadline=None)
@given(text=st.text(SPACES_AND_WORDS, max_size=14))
@example(text="a\n" + " " * 1001)
def test_fast_bpe_gives_the_ids_of_tiktoken(merges, pattern, text):
    tokenizer = _make_tokenizer("x", pattern, merges, {})
    fast = FastBPE.from_tokenizer(tokenizer)
    for long in (text + FILLER, FILLER + text, text * 100):
        assert np.array_equal(fast.encode(long), encode(tokenizer, long))


@pytest.mark.parametrize("pattern", [r"(?s).", r"a(?=b)|\s+(?!\S)|\s", r"\w+|\s+(?!\S)|x"])
def test_unsupported_pattern_is_not_rewritten(pattern):
    assert remove_lookahead(pattern) is None
