"""Batches: every token once per epoch, pure functions of the sequence number, and prefetching."""

import os
import subprocess
import sys
from itertools import islice

import numpy as np
import pytest
import torch
from helpers import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from data.loader import IGNORE_INDEX, MIX_BLOCK, Loader, micro_batch_starts, prefetch


class FakePrepared:
    """Prepared data in memory. Each token is its position, so that a batch shows where it was read."""

    tokenizer = None

    def __init__(self, train: int, val: int, ranges: list | None = None, weights: tuple = (1.0,)):
        self.lengths = {"train": train, "val": val}
        self.train_ranges, self.weights = ranges or [(0, train)], weights

    def tokens(self, split):
        return np.arange(self.lengths[split], dtype=np.uint32)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(9, 200), T=st.integers(1, 8), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_each_token_is_a_target_once_per_epoch(n, T, seed, epoch):
    loader = Loader(FakePrepared(n, 9), T, seed)
    x, y, _ = loader.batch("train", epoch * loader.epoch_windows, loader.epoch_windows)
    assert x.shape == y.shape == (-(-n // T), T)
    assert torch.equal((x + 1) % n, y)
    assert set(y.flatten().tolist()) == set(range(n))


@settings(max_examples=60, deadline=None)
@given(first=st.integers(0, 500), counts=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=st.integers(0, 5))
def test_batches_do_not_depend_on_batch_size(first, counts, seed):
    whole = Loader(FakePrepared(50, 9), 4, seed).batch("train", first, sum(counts))[0]
    loader, start, parts = Loader(FakePrepared(50, 9), 4, seed), first, []
    for count in counts:
        parts.append(loader.batch("train", start, count)[0])
        start += count
    assert torch.equal(torch.cat(parts), whole)


def test_epochs_differ_in_order_and_phase_by_seed():
    def starts(seed, epoch):
        loader = Loader(FakePrepared(1000, 9), 10, seed)
        return loader.batch("train", epoch * loader.epoch_windows, loader.epoch_windows)[0][:, 0].tolist()

    assert starts(1, 0) == starts(1, 0)
    assert len({tuple(starts(seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4
    assert len({starts(1, epoch)[0] % 10 for epoch in range(40)}) > 7


@settings(max_examples=60, deadline=None)
@given(n=st.integers(2, 120), T=st.integers(1, 16), size=st.integers(1, 5))
def test_validation_counts_every_target_exactly_once(n, T, size):
    loader = Loader(FakePrepared(20, n), T, seed=0)
    counted = []
    for first in range(0, loader.val_windows, size):
        x, y, _ = loader.batch("val", first, size)
        assert torch.equal(x[y != IGNORE_INDEX] + 1, y[y != IGNORE_INDEX])
        counted += y[y != IGNORE_INDEX].tolist()
    assert counted == list(range(1, n))


@settings(max_examples=60, deadline=None)
@given(windows=st.integers(1, 40), data=st.data())
def test_some_validation_windows_are_spread_over_the_complete_text(windows, data):
    loader = Loader(FakePrepared(20, 1 + 8 * windows), 8, seed=0)
    count = data.draw(st.integers(1, windows))
    stride = loader.val_windows / count
    starts = [int(loader.batch("val", i, 1, stride)[0][0, 0]) // 8 for i in range(count)]
    assert len(set(starts)) == count
    gaps = np.diff([*starts, windows])
    assert gaps.max() <= stride + 1


@settings(max_examples=15, deadline=None)
@given(
    sizes=st.lists(st.integers(2, 40), min_size=2, max_size=4),
    T=st.integers(1, 8),
    seed=st.integers(0, 5),
    data=st.data(),
)
def test_sources_are_mixed_by_weight_in_separate_epochs(sizes, T, seed, data):
    weights = tuple(data.draw(st.floats(0.1, 10)) for _ in sizes)
    firsts = np.cumsum([0, *sizes])
    parts = [(int(first), size) for first, size in zip(firsts, sizes, strict=False)]
    loader = Loader(FakePrepared(sum(sizes), 9, parts, weights), T, seed)
    x, y, _ = loader.batch("train", 0, MIX_BLOCK)
    source = torch.searchsorted(torch.tensor(firsts[1:]), x, right=True)
    assert torch.equal(source, source[:, :1].expand_as(source))  # no window spans two sources
    for index, (first, size) in enumerate(parts):
        rows = source[:, 0] == index
        assert abs(rows.sum().item() - MIX_BLOCK * weights[index] / sum(weights)) < 1
        assert torch.equal(y[rows] - first, (x[rows] - first + 1) % size)
        epoch = -(-size // T)
        for number in range(min(3, int(rows.sum()) // epoch)):
            targets = y[rows][number * epoch : (number + 1) * epoch]
            assert set(targets.flatten().tolist()) == set(range(first, first + size))
    again = Loader(FakePrepared(sum(sizes), 9, parts, weights), T, seed).batch("train", MIX_BLOCK - 5, 20)[0]
    assert torch.equal(again[:5], x[-5:])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_prefetched_batches_equal_those_of_the_loader(device):
    loader = Loader(FakePrepared(50, 9), 4, seed=1)
    loader.batch = Loader(FakePrepared(50, 9), 4, seed=1).batch  # on the CPU for both devices
    loader.device = torch.device(device)
    batches = prefetch(loader, range(3, 30, 3), 3)
    for first, (x, y, _) in zip(range(3, 30, 3), batches, strict=True):
        expected = Loader(FakePrepared(50, 9), 4, seed=1).batch("train", first, 3)
        assert torch.equal(x, expected[0]) and torch.equal(y, expected[1])


INTERRUPTED = """
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


def test_processes_share_the_micro_batches_of_each_step():
    assert list(islice(micro_batch_starts(2, 6, 3), 5)) == [12, 15, 18, 21, 24]
    assert list(islice(micro_batch_starts(2, 8, 2, rank=1, world_size=2), 4)) == [20, 22, 28, 30]
    assert [next(micro_batch_starts(2, 8, 2, rank, world_size=4)) for rank in range(4)] == [16, 18, 20, 22]


def test_interrupted_process_ends_without_errors_of_the_prefetch_thread(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"
    assert done.stderr.count("Traceback") == 1
    assert "thread" not in done.stderr
