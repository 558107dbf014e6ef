"""Batches: every token once per epoch, pure functions of the sequence number, mixes by weight, and prompts."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data_helpers import mix, prepare_data, read_documents, write_table
from helpers import TEXT_SOURCE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data import DataConfig
from data.loader import IGNORE_INDEX, Loader
from data.prepare import Tokens

SOME = settings(
    max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
seeds = st.integers(0, 5)
END = 256  # the end-of-text token of the byte tokenizer
PAIRS = DataConfig(path="rows.jsonl", prompt_column="question", text_column="answer")
texts = st.text("ab é", max_size=9)


class Positions(Tokens):
    """Tokens in memory. Each token is its position, so that a batch shows where it was read."""

    def __init__(self, start: int, stop: int):
        self.ids, self.starts, self.dtype = (
            np.arange(start, stop, dtype=np.uint32),
            [0, stop - start],
            np.dtype("u4"),
        )

    def __getitem__(self, index):
        return self.ids[index]


def make_loader(train: list[int], val: int, T: int, seed: int, weights=(1.0,)) -> Loader:
    """A loader of sources with these numbers of tokens, which are numbered across the sources."""
    sources = [Positions(*ends) for ends in pairwise(np.cumsum([0, *train]).tolist())]
    return Loader(
        SimpleNamespace(train=sources, val=Positions(0, val), weights=weights, tokenizer=None),
        T,
        seed,
    )


def read_epoch(n: int, T: int, seed: int, epoch: int):
    loader = make_loader([n], 9, T, seed)
    return loader.batch("train", epoch * sum(loader.windows), sum(loader.windows))


@SOME
@given(n=st.integers(9, 200), T=st.integers(1, 8), seed=seeds, epoch=st.integers(0, 3))
def test_each_token_is_a_target_once_per_epoch(n, T, seed, epoch):
    x, y, _ = read_epoch(n, T, seed, epoch)
    assert x.shape == y.shape == (-(-n // T), T)
    assert torch.equal((x + 1) % n, y)
    assert set(y.flatten().tolist()) == set(range(n))


def test_epochs_differ_in_order_and_phase_by_seed():
    epochs = [(seed, epoch) for seed in (1, 2) for epoch in range(40)]
    starts = [tuple(read_epoch(1000, 10, *epoch)[0][:, 0].tolist()) for epoch in epochs]
    assert len(set(starts)) == 80
    assert len({first % 10 for first, *_ in starts[:40]}) > 7


@SOME
@given(
    first=st.integers(0, 500),
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    seed=seeds,
)
def test_batches_do_not_depend_on_batch_size(first, counts, seed):
    loaders = [make_loader([30, 20], 9, 4, seed, (1.0, 2.0)) for _ in range(2)]
    starts = np.cumsum([first, *counts]).tolist()
    parts = [
        loaders[0].batch("train", start, count)[0]
        for start, count in zip(starts, counts, strict=False)
    ]
    assert torch.equal(torch.cat(parts), loaders[1].batch("train", first, sum(counts))[0])


@SOME
@given(n=st.integers(2, 120), T=st.integers(1, 16), size=st.integers(1, 5))
def test_validation_counts_every_target_exactly_once(n, T, size):
    loader = make_loader([20], n, T, seed=0)
    counted = []
    for first in range(0, loader.val_windows, size):
        x, y, _ = loader.batch("val", first, size)
        assert torch.equal(x[y != IGNORE_INDEX] + 1, y[y != IGNORE_INDEX])
        counted += y[y != IGNORE_INDEX].tolist()
    assert counted == list(range(1, n))


@SOME
@given(windows=st.integers(1, 40), data=st.data())
def test_some_validation_windows_are_spread_over_the_complete_text(windows, data):
    loader = make_loader([20], 1 + 8 * windows, 8, seed=0)
    count = data.draw(st.integers(1, windows))
    stride = loader.val_windows / count
    starts = [int(loader.batch("val", i, 1, stride)[0][0, 0]) // 8 for i in range(count)]
    assert len(set(starts)) == count
    assert np.diff([*starts, windows]).max() <= stride + 1


@SOME
@given(
    parts=st.lists(st.tuples(st.integers(2, 40), st.floats(0.1, 10)), min_size=2, max_size=4),
    T=st.integers(1, 8),
)
def test_sources_of_a_mix_take_turns_by_weight_each_with_its_own_epochs(parts, T):
    sizes, weights = zip(*parts, strict=True)
    x, y, _ = make_loader(list(sizes), 9, T, 1, weights).batch("train", 0, 300)
    source = np.searchsorted(np.cumsum(sizes), x.numpy(), side="right")
    assert (source == source[:, :1]).all()  # no window spans two sources
    for index, (size, weight) in enumerate(parts):
        is_here, first, epoch = source[:, 0] == index, sum(sizes[:index]), -(-size // T)
        difference = np.cumsum(is_here) - np.arange(1, 301) * weight / sum(
            weights
        )  # in each prefix
        assert np.abs(difference).max() < len(parts) - 1 + 1e-9
        assert torch.equal(y[is_here] - first, (x[is_here] - first + 1) % size)
        for start in range(0, int(is_here.sum()) - epoch + 1, epoch):
            assert set(y[is_here][start : start + epoch].flatten().tolist()) == set(
                range(first, first + size)
            )


def write_rows(path: str, rows: list[tuple]) -> None:
    write_table(
        path, answer=[answer for _, answer in rows], question=[question for question, _ in rows]
    )


@pytest.mark.parametrize("path", ["rows.jsonl", "rows.csv", "rows.parquet"])
@SOME
@given(rows=st.lists(st.tuples(texts, texts), min_size=1, max_size=9), T=st.integers(1, 9))
def test_validation_targets_are_the_tokens_of_completions(workdir, monkeypatch, path, rows, T):
    """The reference is the bytes of each row. Long prompts are read in several pieces."""
    monkeypatch.setattr("data.readers.MAX_PIECE_CHARS", 4)
    rows = [*rows, ("ab", "a")]
    write_rows(path, rows)
    write_rows("train.jsonl", [(f"question {n}: ", f"answer {n * n}") for n in range(9)])
    prepared = prepare_data(replace(PAIRS, path="train.jsonl", val_path=path), block_size=T)
    assert prepared.meta["bytes"]["val"] == sum(len(answer.encode()) for _, answer in rows)
    loader = Loader(prepared, T, seed=1)
    x, y, _ = loader.batch("val", 0, loader.val_windows)
    ids, targets = [], []
    for question, answer in rows:
        ids += [*question.encode(), *answer.encode(), END]
        targets += [IGNORE_INDEX] * len(question.encode()) + [*answer.encode(), END]
    starts = [min(i, len(ids) - 1 - loader.val_T) for i in range(0, len(ids) - 1, loader.val_T)]
    assert x.tolist() == [ids[start : start + loader.val_T] for start in starts]
    assert y[y != IGNORE_INDEX].tolist() == [
        target for target in targets[1:] if target != IGNORE_INDEX
    ]
    assert y[:-1].flatten().tolist() == targets[1:][: y[:-1].numel()]


@SOME
@given(
    T=st.integers(2, 40), first=st.integers(0, 200), count=st.integers(1, 9), mixed=st.booleans()
)
def test_training_batches_of_one_source_and_of_a_mix(workdir, T, first, count, mixed):
    """Prompts and completions use different characters, so that each target shows where it is from."""
    write_rows("rows.jsonl", [("abcdef" * (n % 5), "xyz" * (n % 3)) for n in range(40)])
    config = mix(pairs=PAIRS, plain=TEXT_SOURCE) if mixed else PAIRS
    loader = Loader(prepare_data(config), T, seed=0, document_mask=True)
    x, y, doc_ids = loader.batch("train", first, count)
    assert torch.equal(doc_ids, (x == END).cumsum(1))
    is_target = y[:, :-1] != IGNORE_INDEX
    assert torch.equal(y[:, :-1][is_target], x[:, 1:][is_target])
    if not mixed:
        assert torch.equal(~is_target, torch.isin(x[:, 1:], torch.tensor(list(b"abcdef"))))
    assert loader.count_targets(first, count) == max(1, int((y != IGNORE_INDEX).sum()))


@pytest.mark.parametrize("path", ["rows.jsonl", "rows.parquet"])
def test_null_prompts_are_empty_and_rows_without_completion_are_skipped(workdir, path):
    write_rows(path, [("Q: ", "yes"), (None, "no"), ("Q: x", ""), ("Q", None), (None, None)])
    assert read_documents(replace(PAIRS, path=path)) == [("Q: ", "yes"), ("", "no"), ("Q: x", "")]


def test_prompts_that_cannot_be_used_are_refused(workdir):
    write_rows("rows.csv", [("a" * 30, "b" * 30)])
    with pytest.raises(
        UserError,
        match=r"data.prompt_column=question has no effect, because text.txt has no columns",
    ):
        prepare_data(replace(PAIRS, path="text.txt"))
    write_rows("rows.jsonl", [("a" * 30, "b" * 30)] * 3)
    with pytest.raises(UserError, match=r"there is no prompt in rows.jsonl; .*data.prompt_column"):
        prepare_data(replace(PAIRS, path="rows.jsonl", prompt_column="q"))
    with pytest.raises(UserError, match=r"rows.csv has no column 'q'"):
        prepare_data(replace(PAIRS, path="rows.csv", prompt_column="q"))
    with pytest.raises(UserError, match=r"too few documents .*data.val_path"):
        prepare_data(replace(PAIRS, path="rows.csv"))
