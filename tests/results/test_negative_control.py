"""Negative controls: a comparison detects a wrong mask, and does not report rounding errors."""

import itertools
from pathlib import Path

import pytest
import torch
from comparison_helpers import NEGLIGIBLE
from helpers import train_here
from torch import Tensor

from model.attention import BACKENDS, naive
from model.attention.backends import ALL_DEVICES
from model.attention.support import Backend
from results.compare import Row, compare

pytestmark = pytest.mark.slow
SEEDS = (1, 2, 3)


def shifted(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """Attention with a wrong mask: the first head is shifted by one, so it sees the next token."""
    B, T = q.shape[:2]
    positions = torch.arange(1, T + 1).clamp(max=T - 1).expand(B, T)
    first = naive(q[:, :, :1], k[:, :, :1], v[:, :, :1], positions=positions)
    return torch.cat((first, naive(q[:, :, 1:], k[:, :, 1:], v[:, :, 1:])), dim=2)


def rounded(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """Attention in float64, which differs from naive by rounding errors only."""
    return naive(q.double(), k.double(), v.double()).to(v.dtype)


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, Row]:
    """The rows of naive, flash, rounded and shifted attention over 50 steps, by backend."""
    backends = ("naive", "flash", "rounded", "shifted")
    text = "".join(f"{n * n} is the square of {n}.\n" for n in range(2000))
    words = ["model=gpt2", "model.n_embd=32", "train.batch_size=16", "optimizer.lr=0.03"]
    words += ["eval.every=25", "checkpoint.every=50"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("control"))
        Path("text.txt").write_text(text, encoding="utf-8")
        for attend in (rounded, shifted):
            patch.setitem(BACKENDS, attend.__name__, Backend(attend.__name__, attend, ALL_DEVICES))
        folders = []
        for backend, seed in itertools.product(backends, SEEDS):
            name = f"{backend}-{seed}"
            run = [f"attention.backend={backend}", "train.steps=50", f"seed={seed}"]
            assert train_here(*words, *run, f"name={name}") == 0
            folders.append(Path("runs") / name)
        rows = compare(folders, Path("figures"), NEGLIGIBLE)
        return dict(zip(backends, rows, strict=True))


def test_wrong_mask_is_detected_at_step_1(rows):
    assert rows["shifted"]["verdict"].value == "differs from step 1"
    assert rows["shifted"]["first_divergence"].value > 1e-4


def test_wrong_mask_is_detected_in_the_validation_loss(rows):
    row = rows["shifted"]
    assert row["pairs"].value == 3
    assert row["difference"].value < -0.01  # it sees the next token


@pytest.mark.parametrize("backend", ["flash", "rounded"])
def test_rounding_errors_are_not_reported(rows, backend):
    row = rows[backend]
    assert row["verdict"].value == "equal up to rounding"
    assert row["divergence"].value > 0, "the kernels differ"
    assert row["first_divergence"].value < 1e-6
    assert abs(row["difference"].value) < 1e-4
