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
from data_helpers import GPT2S, GPT4, any_text, build, write_documents
from helpers import BPE, BYTE, CHAR, GPT2
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


@settings(max_examples=50, deadline=None)
@given(
    documents=st.lists(any_text.filter(bool), min_size=1, max_size=3),
    config=st.sampled_from([CHAR, BYTE, BPE]),
)
def test_decoding_inverts_encoding(documents, config):
    tokenizer = build(documents, config)
    for text in documents:
        ids = encode(tokenizer, text)
        assert tokenizer.decode(ids.tolist()) == text
        assert token_bytes(tokenizer)[ids].sum() == len(text.encode())
        assert (
            len(ids)
            == {"char": len(text), "byte": len(text.encode()), "bpe": len(ids)}[config.name]
        )
    again = from_spec(json.loads(json.dumps(to_spec(tokenizer))))
    assert (
        again.encode(documents[0], disallowed_special=())
        == encode(tokenizer, documents[0]).tolist()
    )
    assert (end_of_text(tokenizer) is None) == (len(documents) == 1)


def test_bpe_respects_vocab_size_and_encodes_special_tokens_as_text():
    documents = ["the cat and the hat <|endoftext|> " * 50, "the end"]
    tokenizer = build(documents, replace(BPE, vocab_size=270))
    ids = encode(tokenizer, documents[0])
    assert (
        tokenizer.n_vocab == 270
        and len(ids) < len(documents[0]) / 2
        and end_of_text(tokenizer) not in ids
    )
    assert (
        build(["abab"], replace(BPE, vocab_size=5000)).n_vocab < 300
    )  # there are no more pairs to merge


def test_vocabulary_of_long_text_is_trained_on_all_parts_and_on_prompts_and_completions(
    monkeypatch,
):
    monkeypatch.setattr("data.tokenizer.MAX_TRAIN_CHARS", 10_000)
    for count in (280, 1000):
        sample = sample_texts(map(str, range(count)))
        stride = int(sample[1])
        assert stride % 2 == 1 and sample == [str(n) for n in range(0, count, stride)]
        assert 3_000 < sum(len(text) + TEXT_OVERHEAD_CHARS for text in sample) <= 10_000


def test_interrupt_ends_the_training_of_a_vocabulary_at_once(workdir, monkeypatch):
    """The process that trains the vocabulary would not end by itself."""
    code = "import os, pathlib, time; pathlib.Path('started').write_text(str(os.getpid())); time.sleep(10**6)"
    (workdir / "endless.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr("data.tokenizer.TRAIN_BPE", workdir / "endless.py")
    started = workdir / "started"

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
    (workdir / "killed.py").write_text("import os; os.kill(os.getpid(), 9)", encoding="utf-8")
    monkeypatch.setattr("data.tokenizer.TRAIN_BPE", workdir / "killed.py")
    with pytest.raises(
        TrainingFailed, match=r"training the vocabulary failed \(exit code -9\); .* tokenizer=byte"
    ):
        build(["a text"], BPE)


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("Ü", "'Ü'; remove them"),
        ("e\u0301", r"U\+0301; normalize the text to NFC, remove them"),
        ("\x1b\u2028", r"U\+001B, U\+2028; remove"),
        ("\udce9", r"U\+DCE9; remove"),
        ("0123456789áéíóú", r"'0', .*'8' and 6 more; remove"),
    ],
)
def test_characters_without_a_token_are_listed(text, listed):
    tokenizer = build(["abcde"], CHAR)
    with pytest.raises(
        UserError, match=f"the prompt has characters that are not in the vocabulary: {listed}"
    ) as error:
        encode(tokenizer, text, "the prompt")
    assert "cannot be encoded" not in str(error.value)


def test_gpt2_tokenizer_matches_gpt2():
    try:
        tokenizer = build(["x"], GPT2)
    except UserError as error:
        pytest.skip(f"NOT RUN: {error}")
    assert encode(tokenizer, "Hello, world").tolist() == [15496, 11, 995]
    assert (tokenizer.n_vocab, end_of_text(tokenizer)) == (50257, 50256)
    assert from_spec(to_spec(tokenizer)).encode("Hello, world") == [15496, 11, 995]


def test_text_is_encoded_with_the_tokenizer_of_another_run(workdir):
    """Its vocabulary may lack the end-of-text token, or a character."""
    spec, tokenizer = to_spec(build(["ab"], CHAR)), replace(CHAR, name="run", run="x")
    config = DataConfig(path=write_documents("a/*.txt", ["ab" * 30] * 3))
    assert prepare(config, tokenizer, 4, spec).meta["tokens"] == {"train": 120, "val": 60}
    config = DataConfig(path=write_documents("b/*.txt", ["ab" * 30, "ab\u2603"]))
    with pytest.raises(UserError, match=r"\u2603.* tokenizer=byte"):
        prepare(config, tokenizer, 4, spec)


@pytest.fixture(scope="module")
def merges() -> list[bytes]:
    """Tokens of a text with many spaces, so that another division into words gives other ids."""
    text = (
        "".join(
            f" {word}\n  {word}'s\t\t{word} \r\n\n{word}.\n\n" for word in ("ab", "abc", "9", "99 ")
        )
        * 20
    )
    tokenizer = build([text], replace(BPE, vocab_size=400))
    return [
        *(tokenizer.decode_single_token_bytes(i) for i in range(tokenizer.n_vocab)),
        b"\n ",
        b"\n  ",
    ]


@pytest.mark.parametrize(
    "pattern", [BPE_PATTERN, GPT2S, OLD_GPT2S, *GPT4], ids=["ours", "gpt2", "older", "cl", "o2"]
)
@settings(max_examples=60, deadline=None)
@given(
    text=st.text(st.sampled_from(list("  \n\r\tabc9.,'sé/\u3000\xa0\x85\x1e\x1c\x0b")), max_size=14)
)
@example(text="a\n" + " " * 1001)
def test_fast_bpe_gives_the_ids_of_tiktoken(merges, pattern, text):
    tokenizer, filler = (
        _make_tokenizer("x", pattern, merges, {}),
        "abc " * 250,
    )  # tiktoken encodes short texts
    fast = FastBPE.from_tokenizer(tokenizer)
    for long in (text + filler, filler + text, text * 100):
        assert np.array_equal(fast.encode(long), encode(tokenizer, long))


@pytest.mark.parametrize("pattern", [r"(?s).", r"a(?=b)|\s+(?!\S)|\s", r"\w+|\s+(?!\S)|x"])
def test_unsupported_pattern_is_not_rewritten(pattern):
    assert remove_lookahead(pattern) is None
