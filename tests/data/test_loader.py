"""Batches: each token once per epoch, the same for each sequence number, and prompts."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data_helpers import prepare_data, write_table
from helpers import TEXT_SOURCE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data import DataConfig
from data.loader import IGNORE_INDEX, Loader
from data.token_files import Tokens

SHARED_FIXTURES = HealthCheck.function_scoped_fixture
SOME = settings(max_examples=30, deadline=None, suppress_health_check=[SHARED_FIXTURES])
seeds = st.integers(0, 5)
END = 256  # the end-of-text token of the byte tokenizer
PAIRS = DataConfig(path="rows.jsonl", prompt_column="question", text_column="answer")


class Positions(Tokens):
    """Tokens in memory. Each token is its position, so that a batch shows where it was read."""

    def __init__(self, count: int):
        self.ids = np.arange(count, dtype=np.uint32)
        self.count = count
        self.dtype = self.ids.dtype

    def __getitem__(self, index):
        return self.ids[index]


def make_loader(train: int, val: int, T: int, seed: int) -> Loader:
    """A loader of splits with these numbers of tokens."""
    data = SimpleNamespace(train=Positions(train), val=Positions(val), tokenizer=None)
    return Loader(data, T, seed)


def read_epoch(n: int, T: int, seed: int, epoch: int, order: int = 0):
    loader = make_loader(n, 9, T, seed)
    loader.select_order(order)
    windows = loader.windows_per_epoch
    return loader.batch("train", epoch * windows, windows)


@SOME
@given(
    n=st.integers(9, 200),
    T=st.integers(1, 8),
    seed=seeds,
    epoch=st.integers(0, 3),
    order=st.integers(0, 3),
)
def test_each_token_is_a_target_once_per_epoch(n, T, seed, epoch, order):
    x, y, _ = read_epoch(n, T, seed, epoch, order)
    assert x.shape == y.shape == (-(-n // T), T)
    assert torch.equal((x + 1) % n, y)
    assert set(y.flatten().tolist()) == set(range(n))


def test_order_is_the_permutation_of_the_random_generator():
    """So that runs of earlier versions resume with the same batches."""
    loader = make_loader(3000, 9, 10, seed=7)
    rng = np.random.default_rng((7, 0))
    phase = rng.integers(10)
    order = rng.permutation(300)
    x, _, _ = loader.batch("train", 0, 300)
    assert x[:, 0].tolist() == ((order * 10 + phase) % 3000).tolist()
    assert loader.order.itemsize == 2
    phases = [int(loader.batch("train", 300 * epoch, 1)[0][0, 0]) % 10 for epoch in range(40)]
    assert len(set(phases)) > 7


def test_orders_and_phases_differ():
    loader = make_loader(3000, 9, 10, seed=7)
    epochs = []
    for order in (0, 1, 0):
        loader.select_order(order)
        epochs.append(loader.batch("train", 0, 300)[0][:, 0])
    assert (epochs[0] == epochs[1]).sum() < 30
    assert epochs[0][0] % 10 != epochs[1][0] % 10
    assert torch.equal(epochs[0], epochs[2])


@SOME
@given(
    first=st.integers(0, 500),
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    seed=seeds,
)
def test_batches_do_not_depend_on_batch_size(first, counts, seed):
    loader, other = (make_loader(50, 9, 4, seed) for _ in range(2))
    starts = np.cumsum([first, *counts]).tolist()
    parts = [loader.batch("train", start, end - start)[0] for start, end in pairwise(starts)]
    assert torch.equal(torch.cat(parts), other.batch("train", first, sum(counts))[0])


@SOME
@given(n=st.integers(2, 120), T=st.integers(1, 16), size=st.integers(1, 5))
def test_validation_counts_every_target_exactly_once(n, T, size):
    loader = make_loader(20, n, T, seed=0)
    counted = []
    for first in range(0, loader.val_windows, size):
        x, y, _ = loader.batch("val", first, size)
        assert torch.equal(x[y != IGNORE_INDEX] + 1, y[y != IGNORE_INDEX])
        counted += y[y != IGNORE_INDEX].tolist()
    assert counted == list(range(1, n))


@SOME
@given(windows=st.integers(1, 40), data=st.data())
def test_some_validation_windows_are_spread_over_the_complete_text(windows, data):
    loader = make_loader(20, 1 + 8 * windows, 8, seed=0)
    count = data.draw(st.integers(1, windows))
    stride = loader.val_windows / count
    starts = [int(loader.batch("val", i, 1, stride)[0][0, 0]) // 8 for i in range(count)]
    assert len(set(starts)) == count
    assert np.diff([*starts, windows]).max() <= stride + 1


# Prompts and documents


def write_rows(path: str, rows: list[tuple]) -> None:
    questions, answers = zip(*rows, strict=True)
    write_table(path, answer=list(answers), question=list(questions))


texts = st.text("ab é", max_size=9)
pairs_of_texts = st.tuples(texts, texts).filter(any)  # otherwise, the row is skipped
rows_of_pairs = st.lists(pairs_of_texts, min_size=1, max_size=9).map(
    lambda rows: [*rows, ("ab", "a")]
)


@settings(max_examples=10, deadline=None, suppress_health_check=[SHARED_FIXTURES])
@given(rows=rows_of_pairs, T=st.integers(1, 9))
def test_validation_targets_are_the_tokens_of_completions(workdir, monkeypatch, rows, T):
    """The reference is the bytes of each row. Long prompts are read in several pieces."""
    monkeypatch.setattr("data.readers.MAX_PIECE_CHARS", 4)
    write_rows("rows.jsonl", rows)
    write_rows("train.jsonl", [(f"question {n}: ", f"answer {n * n}") for n in range(9)])
    config = replace(PAIRS, path="train.jsonl", val_path="rows.jsonl")
    prepared = prepare_data(config, block_size=T)
    loader = Loader(prepared, T, seed=1)
    x, y, _ = loader.batch("val", 0, loader.val_windows)
    ids = []
    targets = []
    for question, answer in rows:
        completion = [*answer.encode(), END]
        ids += [*question.encode(), *completion]
        targets += [IGNORE_INDEX] * len(question.encode()) + completion
    last = len(ids) - 1 - loader.val_T  # start of the last window
    starts = [min(start, last) for start in range(0, len(ids) - 1, loader.val_T)]
    assert x.tolist() == [ids[start : start + loader.val_T] for start in starts]
    expected = [target for target in targets[1:] if target != IGNORE_INDEX]
    assert y[y != IGNORE_INDEX].tolist() == expected
    assert y[:-1].flatten().tolist() == targets[1:][: y[:-1].numel()]
    assert prepared.meta["bytes"]["val"] == sum(len(answer.encode()) for _, answer in rows)


@pytest.fixture
def pairs(workdir) -> DataConfig:
    """Prompts and completions use different characters, so that a target shows where it is from."""
    write_rows("rows.jsonl", [("abcdef" * (n % 5), "xyz" * (n % 3)) for n in range(40)])
    return PAIRS


@SOME
@given(T=st.integers(2, 40), first=st.integers(0, 200), count=st.integers(1, 9))
def test_training_targets_are_the_next_tokens_except_prompts(pairs, T, first, count):
    loader = Loader(prepare_data(pairs), T, seed=0, document_mask=True)
    x, y, doc_ids = loader.batch("train", first, count)
    is_target = y[:, :-1] != IGNORE_INDEX
    assert torch.equal(y[:, :-1][is_target], x[:, 1:][is_target])
    assert torch.equal(doc_ids, (x == END).cumsum(1))
    assert loader.count_targets(first, count) == max(1, int((y != IGNORE_INDEX).sum()))
    is_prompt = torch.isin(x[:, 1:], torch.tensor(list(b"abcdef")))
    assert torch.equal(~is_target, is_prompt)


def test_document_mask_without_an_end_of_text_token_is_refused(workdir):
    with pytest.raises(UserError, match=r"data.document_mask=true"):
        Loader(prepare_data(TEXT_SOURCE), 16, seed=0, document_mask=True)
