"""Batches: each token once per epoch, the same for each sequence number, mixes, and prompts."""

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data_helpers import mix, prepare_data, write_table
from helpers import TEXT_SOURCE
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import UserError
from data import DataConfig
from data.loader import IGNORE_INDEX, Loader
from data.prepare import PreparedData
from data.token_files import Tokens

SHARED_FIXTURES = HealthCheck.function_scoped_fixture
SOME = settings(max_examples=50, deadline=None, suppress_health_check=[SHARED_FIXTURES])
seeds = st.integers(0, 5)
END = 256  # the end-of-text token of the byte tokenizer
PAIRS = DataConfig(path="rows.jsonl", prompt_column="question", text_column="answer")


class Positions(Tokens):
    """Tokens in memory. Each token is its position, so that a batch shows where it was read."""

    def __init__(self, start: int, stop: int):
        self.ids = np.arange(start, stop, dtype=np.uint32)
        self.starts = [0, stop - start]
        self.dtype = self.ids.dtype

    def __getitem__(self, index):
        return self.ids[index]


def make_loader(train: list[int], val: int, T: int, seed: int, weights=(1.0,)) -> Loader:
    """A loader of sources with these numbers of tokens, which are numbered across the sources."""
    data = SimpleNamespace(
        train=[Positions(*ends) for ends in pairwise(np.cumsum([0, *train]).tolist())],
        val=Positions(0, val),
        weights=weights,
        tokenizer=None,
    )
    return Loader(data, T, seed)


def read_epoch(n: int, T: int, seed: int, epoch: int):
    loader = make_loader([n], 9, T, seed)
    (windows,) = loader.windows
    return loader.batch("train", epoch * windows, windows)


@SOME
@given(n=st.integers(9, 200), T=st.integers(1, 8), seed=seeds, epoch=st.integers(0, 3))
def test_each_token_is_a_target_once_per_epoch(n, T, seed, epoch):
    x, y, _ = read_epoch(n, T, seed, epoch)
    assert x.shape == y.shape == (-(-n // T), T)
    assert torch.equal((x + 1) % n, y)
    assert set(y.flatten().tolist()) == set(range(n))


def first_tokens(seed: int, epoch: int) -> tuple[int, ...]:
    x, _, _ = read_epoch(1000, 10, seed, epoch)
    return tuple(x[:, 0].tolist())


@SOME
@given(n=st.integers(9, 200), T=st.integers(1, 8), seed=seeds, epoch=st.integers(1, 3))
def test_windows_of_all_epochs_have_the_same_order_and_differ_by_the_phase_only(n, T, seed, epoch):
    x, _, _ = read_epoch(n, T, seed, 0)
    later_x, _, _ = read_epoch(n, T, seed, epoch)
    shifts = (later_x - x) % n
    assert (shifts == shifts[0, 0]).all()


def test_order_differs_by_seed():
    assert len({first_tokens(seed, 0) for seed in range(40)}) == 40


def test_phase_differs_by_epoch():
    phases = {first_tokens(1, epoch)[0] % 10 for epoch in range(40)}
    assert len(phases) > 7


@SOME
@given(
    first=st.integers(0, 500),
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    seed=seeds,
)
def test_batches_do_not_depend_on_batch_size(first, counts, seed):
    loader, other = (make_loader([30, 20], 9, 4, seed, (1.0, 2.0)) for _ in range(2))
    starts = np.cumsum([first, *counts]).tolist()
    parts = [loader.batch("train", start, end - start)[0] for start, end in pairwise(starts)]
    assert torch.equal(torch.cat(parts), other.batch("train", first, sum(counts))[0])


def test_batches_do_not_depend_on_their_order():
    loader, other = (make_loader([30, 20], 9, 4, 1, (1.0, 2.0)) for _ in range(2))
    expected = {first: loader.batch("train", first, 3)[0] for first in (0, 5, 40, 90)}
    for first in (90, 0, 40, 0, 5):
        assert torch.equal(other.batch("train", first, 3)[0], expected[first])


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


parts_of_mixes = st.lists(st.tuples(st.integers(2, 40), st.floats(0.1, 10)), min_size=2, max_size=4)


def read_mix(parts: list[tuple[int, float]], T: int):
    """Inputs and targets of 300 sequences, and the source of each. parts: tokens and weights."""
    sizes, weights = zip(*parts, strict=True)
    x, y, _ = make_loader(list(sizes), 9, T, 1, weights).batch("train", 0, 300)
    return x, y, np.searchsorted(np.cumsum(sizes), x.numpy(), side="right")


@SOME
@given(parts=parts_of_mixes, T=st.integers(1, 8))
def test_no_window_of_a_mix_spans_two_sources(parts, T):
    _, _, source = read_mix(parts, T)
    assert (source == source[:, :1]).all()


@SOME
@given(parts=parts_of_mixes, T=st.integers(1, 8))
def test_sources_of_a_mix_take_turns_by_weight(parts, T):
    _, _, source = read_mix(parts, T)
    total_weight = sum(weight for _, weight in parts)
    for index, (_, weight) in enumerate(parts):
        counts = np.cumsum(source[:, 0] == index)  # in each prefix
        difference = counts - np.arange(1, 301) * weight / total_weight
        assert np.abs(difference).max() < len(parts) - 1 + 1e-9


@SOME
@given(parts=parts_of_mixes, T=st.integers(1, 8))
def test_each_source_of_a_mix_has_its_own_epochs(parts, T):
    _, y, source = read_mix(parts, T)
    first = 0
    for index, (size, _) in enumerate(parts):
        targets = y[source[:, 0] == index]
        epoch = -(-size // T)
        for start in range(0, len(targets) - epoch + 1, epoch):
            tokens = set(targets[start : start + epoch].flatten().tolist())
            assert tokens == set(range(first, first + size))
        first += size


# Prompts and documents


def write_rows(path: str, rows: list[tuple]) -> None:
    questions, answers = zip(*rows, strict=True)
    write_table(path, answer=list(answers), question=list(questions))


texts = st.text("ab é", max_size=9)
rows_of_pairs = st.lists(st.tuples(texts, texts), min_size=1, max_size=9).map(
    lambda rows: [*rows, ("ab", "a")]
)


def prepare_pairs(monkeypatch, path: str, rows: list[tuple], T: int) -> PreparedData:
    """Prepare rows for validation. Long prompts are read in several pieces."""
    monkeypatch.setattr("data.readers.MAX_PIECE_CHARS", 4)
    write_rows(path, rows)
    write_rows("train.jsonl", [(f"question {n}: ", f"answer {n * n}") for n in range(9)])
    return prepare_data(replace(PAIRS, path="train.jsonl", val_path=path), block_size=T)


@pytest.mark.parametrize("path", ["rows.jsonl", "rows.csv", "rows.parquet"])
@SOME
@given(rows=rows_of_pairs, T=st.integers(1, 9))
def test_validation_targets_are_the_tokens_of_completions(workdir, monkeypatch, path, rows, T):
    """The reference is the bytes of each row."""
    loader = Loader(prepare_pairs(monkeypatch, path, rows, T), T, seed=1)
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


def test_bytes_of_prompts_do_not_count(workdir, monkeypatch):
    rows = [("a question", "é"), ("", "ab"), ("b", "")]
    prepared = prepare_pairs(monkeypatch, "rows.jsonl", rows, 4)
    assert prepared.meta["bytes"]["val"] == 4


@pytest.fixture
def configs(workdir) -> dict[str, DataConfig]:
    """Prompts and completions use different characters, so that a target shows where it is from."""
    write_rows("rows.jsonl", [("abcdef" * (n % 5), "xyz" * (n % 3)) for n in range(40)])
    return {"pairs": PAIRS, "mix": mix(pairs=PAIRS, plain=TEXT_SOURCE)}


CONFIGS = pytest.mark.parametrize("name", ["pairs", "mix"])
BATCHES = dict(T=st.integers(2, 40), first=st.integers(0, 200), count=st.integers(1, 9))


@CONFIGS
@SOME
@given(**BATCHES)
def test_document_ids_increase_at_each_end_of_text_token(configs, name, T, first, count):
    loader = Loader(prepare_data(configs[name]), T, seed=0, document_mask=True)
    x, _, doc_ids = loader.batch("train", first, count)
    assert torch.equal(doc_ids, (x == END).cumsum(1))


@CONFIGS
@SOME
@given(**BATCHES)
def test_training_targets_are_the_next_tokens(configs, name, T, first, count):
    x, y, _ = Loader(prepare_data(configs[name]), T, seed=0).batch("train", first, count)
    is_target = y[:, :-1] != IGNORE_INDEX
    assert torch.equal(y[:, :-1][is_target], x[:, 1:][is_target])


@SOME
@given(**BATCHES)
def test_tokens_of_prompts_are_no_training_targets(configs, T, first, count):
    x, y, _ = Loader(prepare_data(configs["pairs"]), T, seed=0).batch("train", first, count)
    is_prompt = torch.isin(x[:, 1:], torch.tensor(list(b"abcdef")))
    assert torch.equal(y[:, :-1] == IGNORE_INDEX, is_prompt)


@CONFIGS
@SOME
@given(**BATCHES)
def test_targets_are_counted(configs, name, T, first, count):
    loader = Loader(prepare_data(configs[name]), T, seed=0)
    _, y, _ = loader.batch("train", first, count)
    assert loader.count_targets(first, count) == max(1, int((y != IGNORE_INDEX).sum()))


def test_document_mask_without_an_end_of_text_token_is_refused(workdir):
    with pytest.raises(UserError, match=r"data.document_mask=true needs the <\|endoftext\|> token"):
        Loader(prepare_data(TEXT_SOURCE), 16, seed=0, document_mask=True)
