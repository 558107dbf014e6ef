"""Text in, tokens on disk, batches out: nothing lost, nothing twice, nothing stale."""

import http.server
import itertools
import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import BPE, BYTE, CHAR, GPT2, ROOT, TEXT_SOURCE
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data import TokenizerConfig, sources, tokenizer
from data.loader import IGNORE_INDEX, MIX_BLOCK, Loader, prefetch
from data.prepare import prepare
from data.prepared import check_length

STDLIB = replace(TEXT_SOURCE, name="python_stdlib", source="python_stdlib", path=None)
any_text = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=200)


def build(documents, kind):
    return tokenizer.build(tokenizer.Corpus(documents, several=len(documents) > 1), kind)


# Tokenizers


@settings(max_examples=50, deadline=None)
@given(documents=st.lists(any_text, min_size=1, max_size=3), kind=st.sampled_from([CHAR, BYTE, BPE]))
def test_decoding_gives_the_text_back(documents, kind):
    encoding = build(documents, kind)
    for text in documents:
        ids = tokenizer.encode(encoding, text)
        assert encoding.decode(ids.tolist()) == text
        assert tokenizer.token_bytes(encoding)[ids].sum() == len(text.encode())
        if kind is CHAR:
            assert len(ids) == len(text)
        if kind is BYTE:
            assert ids.tolist() == list(text.encode())
    again = tokenizer.from_spec(json.loads(json.dumps(tokenizer.to_spec(encoding))))
    assert again.encode(documents[0], disallowed_special=()) == tokenizer.encode(encoding, documents[0]).tolist()
    assert again.n_vocab == encoding.n_vocab
    assert (tokenizer.end_of_text(encoding) is None) == (len(documents) == 1)


def test_bpe_merges_up_to_its_bound_and_special_words_in_a_text_are_text():
    documents = ["the cat and the hat <|endoftext|> " * 50, "the end"]
    encoding = build(documents, replace(BPE, vocab_size=270))
    assert encoding.n_vocab == 270
    ids = tokenizer.encode(encoding, documents[0])
    assert len(ids) < len(documents[0]) / 2
    assert tokenizer.end_of_text(encoding) not in ids
    assert build(["abab"], replace(BPE, vocab_size=5000)).n_vocab < 300  # there is no more to merge


def test_an_unknown_character_is_named_with_its_place():
    encoding = build(["abc"], CHAR)
    with pytest.raises(UserError, match="the prompt has the character 'é' at position 2"):
        tokenizer.encode(encoding, "abé", "the prompt")


def test_a_vocabulary_without_room_for_bytes_is_refused():
    with pytest.raises(UserError, match=r"tokenizer.vocab_size=100 .* set 512 or more"):
        replace(BPE, vocab_size=100)


def test_gpt2_tokens_are_gpt2s():
    try:
        encoding = build(["x"], GPT2)
    except UserError as error:
        pytest.skip(f"NOT RUN: {error}")
    assert tokenizer.encode(encoding, "Hello, world").tolist() == [15496, 11, 995]
    assert (encoding.n_vocab, tokenizer.end_of_text(encoding)) == (50257, 50256)
    again = tokenizer.from_spec(tokenizer.to_spec(encoding))
    assert again.encode("Hello, world") == [15496, 11, 995]


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("gpt2", "vocab.bpe as 6d1cbeee0f20b3d9449abfede4726ed8212e3aee"),
        ("cl100k_base", "cl100k_base.tiktoken as 9b5ad71b2ce5302211f9c61530b329a4922fc6a4"),
        ("o200k_base", "o200k_base.tiktoken as fb374d419588a4632f3f557e76b4b70aebbca790"),
    ],
)
def test_a_vocabulary_that_is_nowhere_says_which_file_to_put_where(monkeypatch, tmp_path, name, file):
    import tiktoken

    def unreachable(name):
        raise ConnectionError("no network")

    monkeypatch.setattr(tiktoken, "get_encoding", unreachable)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(UserError) as refused:
        build(["x"], TokenizerConfig(name, None, None))
    assert f"{file}" in str(refused.value)
    assert f"in {tmp_path}" in str(refused.value)
    assert tokenizer.needs_download(TokenizerConfig(name, None, None))
    for missing in tokenizer._missing(name):
        (tmp_path / tokenizer._cached_name(missing)).touch()
    assert not tokenizer.needs_download(TokenizerConfig(name, None, None))


# Sources and preparation


def test_prepared_files_hold_the_text_split_as_nanogpt_splits_it(workdir):
    text = (workdir / "text.txt").read_text()
    prepared = prepare(TEXT_SOURCE, CHAR, 16, say=lambda line: None)
    cut = int(len(text) * 0.9)
    decoded = {split: prepared.encoding.decode(prepared.tokens(split)[:].tolist()) for split in ("train", "val")}
    assert decoded == {"train": text[:cut], "val": text[cut:]}
    meta = json.loads((prepared.folder / "meta.json").read_text())
    assert meta["dtype"] == "uint16"
    assert meta["vocab_size"] == len(set(text))
    assert meta["tokens"] == {"train": cut, "val": len(text) - cut}
    assert {path.name for path in prepared.folder.iterdir()} == {"train.bin", "val.bin", "meta.json"}


def test_what_decides_the_tokens_decides_the_folder(workdir):
    def folder(config=TEXT_SOURCE, kind=CHAR):
        return prepare(config, kind, 16, say=lambda line: None).folder

    first = folder()
    assert folder() == first
    others = {folder(kind=BYTE), folder(kind=BPE), folder(replace(TEXT_SOURCE, val_fraction=0.2))}
    (workdir / "text.txt").write_text("another text, as long as it needs to be. " * 20)
    others.add(folder())
    assert len(others | {first}) == 5


def test_the_standard_library_is_many_documents_kept_whole(workdir):
    files = [place.address for place in sources.list_sources(STDLIB)]
    assert len(files) > 200
    assert not any("/test/" in file or "site-packages" in file for file in files)
    prepared = prepare(replace(STDLIB, val_fraction=0.05), BYTE, 16, say=lambda line: None)
    val = prepared.tokens("val")[:]
    ends = np.flatnonzero(val == tokenizer.end_of_text(prepared.encoding))
    assert ends[-1] == len(val) - 1
    last = prepared.encoding.decode(val[ends[-2] + 1 : -1].tolist())
    with open(files[-1], encoding="utf-8", newline="") as f:
        assert last == f.read()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("latin.txt", b"caf\xe9 " * 100, "byte 3 is 0xe9"),
        ("empty.txt", b"", "empty.txt holds no text"),
        ("short.txt", b"too short", r"training text has 8 tokens, .* set model.block_size=7"),
    ],
)
def test_texts_that_cannot_be_trained_on(workdir, name, content, said):
    (workdir / name).write_bytes(content)
    with pytest.raises(UserError, match=said):
        prepare(replace(TEXT_SOURCE, path=name), BYTE, 16, say=lambda line: None)
    assert not list((workdir / "data/prepared").glob("[!.]*/"))


@pytest.mark.parametrize("name", ["a[b].txt", "it's.txt", "é, x=1.txt", "st*r ?.txt", "{a}.txt"])
def test_file_names_are_taken_to_the_letter(workdir, name):
    (workdir / name).write_text("line one\nline two\n" * 20)
    (workdir / "ab.txt").write_text("a decoy for the pattern")
    assert sources.documents(replace(TEXT_SOURCE, path=name)) == ["line one\nline two\n" * 20]


def test_a_text_at_a_url_is_downloaded(workdir):
    """The way that shakespeare_char takes, from a server on this machine."""
    handler = type("Quiet", (http.server.SimpleHTTPRequestHandler,), {"log_message": lambda *a: None})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        at = f"http://127.0.0.1:{server.server_port}"
        config = replace(TEXT_SOURCE, name="there", source="url", path=None, url=f"{at}/text.txt")
        prepared = prepare(config, CHAR, 16, say=lambda line: None)
        assert prepared.meta["tokens"] == prepare(TEXT_SOURCE, CHAR, 16, say=lambda line: None).meta["tokens"]
        with pytest.raises(UserError, match=r"could not be downloaded .* data.path=FILE"):
            prepare(replace(config, url=f"{at}/missing.txt"), CHAR, 16, say=lambda line: None)
        server.shutdown()


def test_ids_that_a_uint16_would_wrap_are_stored_whole(workdir):
    """70,000 distinct characters: more than 65,536 tokens need four bytes."""
    text = "".join(chr(c) for c in range(0x10000, 0x10000 + 70_000)) * 2
    (workdir / "wide.txt").write_text(text, encoding="utf-8")
    prepared = prepare(replace(TEXT_SOURCE, path="wide.txt"), CHAR, 16, say=lambda line: None)
    assert prepared.meta["dtype"] == "uint32"
    assert prepared.encoding.decode(prepared.tokens("train")[-5:].tolist()) == text[: int(len(text) * 0.9)][-5:]


def test_of_two_processes_at_the_same_text_one_works(workdir):
    command = [sys.executable, str(ROOT / "prepare.py"), "data=text", "data.path=text.txt", "tokenizer=char"]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    out = "".join(process.communicate(timeout=60)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert out.count("preparing text") == 1
    assert out.count("tokens to train on") == 2
    assert len(list((workdir / "data/prepared").glob("text-*/meta.json"))) == 1


def test_a_half_written_folder_is_not_taken_for_a_whole_one(workdir):
    whole = prepare(TEXT_SOURCE, CHAR, 16, say=lambda line: None)
    content = (whole.folder / "train.bin").read_bytes()
    partial = whole.folder.rename(f"{whole.folder}.partial")
    (partial / "train.bin").write_bytes(b"half")
    assert (prepare(TEXT_SOURCE, CHAR, 16, say=lambda line: None).folder / "train.bin").read_bytes() == content


# Batches


class Tokens:
    """Prepared data in memory: every token is its own place, so that batches can be read back."""

    def __init__(self, train: int, val: int, parts: list | None = None, weights: tuple = (1.0,)):
        self.lengths = {"train": train, "val": val}
        self.train_parts, self.weights = parts or [(0, train)], weights

    def tokens(self, split):
        return np.arange(self.lengths[split], dtype=np.uint32)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(9, 200), T=st.integers(1, 8), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_an_epoch_meets_every_token_as_a_target(n, T, seed, epoch):
    loader = Loader(Tokens(n, 9), T, seed)
    x, y, _ = loader.batch("train", epoch * loader.epoch_windows, loader.epoch_windows)
    assert x.shape == y.shape == (-(-n // T), T)
    assert torch.equal((x + 1) % n, y)
    assert set(y.flatten().tolist()) == set(range(n))


@settings(max_examples=60, deadline=None)
@given(first=st.integers(0, 500), counts=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(0, 5))
def test_batches_are_a_pure_function_however_they_are_cut(first, counts, seed):
    whole = Loader(Tokens(50, 9), 4, seed).batch("train", first, sum(counts))[0]
    loader, at, parts = Loader(Tokens(50, 9), 4, seed), first, []
    for count in counts:
        parts.append(loader.batch("train", at, count)[0])
        at += count
    assert torch.equal(torch.cat(parts), whole)


def test_epochs_differ_in_order_and_phase_and_the_seed_decides_both():
    def starts(seed, epoch):
        loader = Loader(Tokens(1000, 9), 10, seed)
        return loader.batch("train", epoch * loader.epoch_windows, loader.epoch_windows)[0][:, 0].tolist()

    assert starts(1, 0) == starts(1, 0)
    assert len({tuple(starts(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4
    assert len({starts(1, epoch)[0] % 10 for epoch in range(40)}) > 7


@settings(max_examples=60, deadline=None)
@given(n=st.integers(2, 120), T=st.integers(1, 16), size=st.integers(1, 5))
def test_validation_counts_every_target_exactly_once(n, T, size):
    loader = Loader(Tokens(20, n), T, seed=0)
    counted = []
    for first in range(0, loader.val_windows, size):
        x, y, _ = loader.batch("val", first, size)
        assert torch.equal(x[y != IGNORE_INDEX] + 1, y[y != IGNORE_INDEX])
        counted += y[y != IGNORE_INDEX].tolist()
    assert counted == list(range(1, n))


class Slow:
    """A loader that tells what it is asked for, and breaks at sequence 6."""

    device = torch.device("cuda")

    def __init__(self):
        self.asked = queue.Queue()

    def batch(self, split, first, count):
        self.asked.put((split, first, count, threading.current_thread() is threading.main_thread()))
        if first == 6:
            raise OSError("the disk is gone")
        return first


def test_the_next_batch_is_made_while_one_is_used_and_none_after_it():
    loader = Slow()
    batches = prefetch(loader, itertools.count(0, 2), 2)
    assert next(batches) == 0
    assert [loader.asked.get(timeout=10) for _ in range(2)] == [("train", 0, 2, False), ("train", 2, 2, False)]
    assert next(batches) == 2
    batches.close()
    assert loader.asked.get(timeout=10)[1] == 4
    assert loader.asked.empty()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


def test_what_goes_wrong_ahead_is_raised_where_its_batch_is_asked_for():
    batches = prefetch(Slow(), itertools.count(0, 2), 2)
    assert [next(batches) for _ in range(3)] == [0, 2, 4]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 40), min_size=2, max_size=4), T=st.integers(1, 8), seed=st.integers(0, 5),
    data=st.data(),
)  # fmt: skip
def test_texts_are_mixed_by_weight_each_in_epochs_of_its_own(sizes, T, seed, data):
    weights = tuple(data.draw(st.floats(0.1, 10)) for _ in sizes)
    firsts = np.cumsum([0, *sizes])
    parts = [(int(first), size) for first, size in zip(firsts, sizes, strict=False)]
    loader = Loader(Tokens(sum(sizes), 9, parts, weights), T, seed)
    x, y, _ = loader.batch("train", 0, MIX_BLOCK)
    text = torch.searchsorted(torch.tensor(firsts[1:]), x, right=True)
    assert torch.equal(text, text[:, :1].expand_as(text))  # no window is of two texts
    for each, (first, size) in enumerate(parts):
        mine = text[:, 0] == each
        assert abs(mine.sum().item() - MIX_BLOCK * weights[each] / sum(weights)) < 1
        assert torch.equal(y[mine] - first, (x[mine] - first + 1) % size)
        epoch = -(-size // T)
        for number in range(
            min(3, int(mine.sum()) // epoch)
        ):  # every token is a target once an epoch, as if the text were alone
            assert set(y[mine][number * epoch : (number + 1) * epoch].flatten().tolist()) == set(
                range(first, first + size)
            )
    again = Loader(Tokens(sum(sizes), 9, parts, weights), T, seed).batch("train", MIX_BLOCK - 5, 20)[0]
    assert torch.equal(again[:5], x[-5:])


def test_a_weight_too_small_to_be_kept_is_refused():
    with pytest.raises(UserError, match="less than one in 10,000"):
        Loader(Tokens(20, 9, [(0, 10), (10, 10)], (1.0, 1e-5)), 4, seed=0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_batches_ahead_are_the_loaders_own(device):
    loader = Loader(Tokens(50, 9), 4, seed=1)
    loader.batch = Loader(Tokens(50, 9), 4, seed=1).batch  # made on the CPU, by the thread or not
    loader.device = torch.device(device)
    batches = prefetch(loader, range(3, 30, 3), 3)
    for first, (x, y, _) in zip(range(3, 30, 3), batches, strict=True):
        expected = Loader(Tokens(50, 9), 4, seed=1).batch("train", first, 3)
        assert torch.equal(x, expected[0]) and torch.equal(y, expected[1])


LEFT = """
import itertools
import torch
from data.loader import prefetch

class OnGPU:
    device = torch.device("cuda")
    def batch(self, split, first, count):
        return first

batches = prefetch(OnGPU(), itertools.count(), 1)
next(batches)
raise KeyboardInterrupt
"""


def test_a_process_that_is_interrupted_ends_at_once_and_without_a_word_of_the_thread(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", LEFT], env=environment, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert done.stderr.count("Traceback") == 1
    assert "thread" not in done.stderr


def test_lengths_that_cannot_fill_a_window_say_what_would():
    with pytest.raises(UserError, match=r"set model.block_size=99"):
        check_length({"train": 100, "val": 10}, 100)
    with pytest.raises(UserError, match=r"data.val_fraction"):
        check_length({"train": 101, "val": 1}, 100)
    check_length({"train": 101, "val": 2}, 100)


def test_a_small_text_waits_for_nothing(workdir):
    """Reading and tokenizing a small file takes well under a second once the libraries are there."""
    prepare(TEXT_SOURCE, CHAR, 16, say=lambda line: None)
    started = time.perf_counter()
    prepare(TEXT_SOURCE, BYTE, 16, say=lambda line: None)
    assert time.perf_counter() - started < 2
