"""Negative controls: a comparison detects a wrong mask, and does not report rounding errors. Equal
settings have no speedup per step, also if one trains longer."""

import itertools
from pathlib import Path

import pytest
import torch
from helpers import train_here
from torch import Tensor

from model.attention import BACKENDS, naive
from model.attention.backends import ALL_DEVICES
from model.attention.support import Backend
from results.compare import compare
from results.statistics import SettingStats

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
def rows(tmp_path_factory) -> dict[str, SettingStats]:
    """Statistics of naive, flash, rounded and shifted attention over 50 steps, by backend.

    naive also has 40, 62 and 80 steps, and flash 62.
    """
    backends = ("naive", "flash", "rounded", "shifted")
    jobs = [(backend, 50) for backend in backends]
    jobs += [("naive", 40), ("naive", 62), ("naive", 80), ("flash", 62)]
    text = "".join(f"{n * n} is the square of {n}.\n" for n in range(2000))
    words = ["model=gpt2", "model.n_embd=32", "train.batch_size=16", "optimizer.lr=0.03"]
    words += ["eval.every=25", "checkpoint.every=50"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("control"))
        Path("text.txt").write_text(text, encoding="utf-8")
        for attend in (rounded, shifted):
            patch.setitem(BACKENDS, attend.__name__, Backend(attend.__name__, attend, ALL_DEVICES))
        folders = []
        for (backend, steps), seed in itertools.product(jobs, SEEDS):
            name = f"{backend}-{steps}-{seed}"
            run = [f"attention.backend={backend}", f"train.steps={steps}", f"seed={seed}"]
            assert train_here(*words, *run, f"name={name}") == 0
            folders.append(Path("runs") / name)
        rows = compare(folders, Path("figures"))
        names = [backend if steps == 50 else f"{backend}-{steps}" for backend, steps in jobs]
        return dict(zip(names, rows, strict=True))


def test_wrong_mask_is_detected_at_step_1(rows):
    assert rows["shifted"].verdict == "differs from step 1"
    assert rows["shifted"].first_divergence > 1e-4


def test_wrong_mask_is_detected_in_the_validation_loss(rows):
    row = rows["shifted"]
    assert row.pairs == 3
    # It sees the next token, so its loss is lower.
    assert row.difference + row.difference_ci95 < 0
    assert abs(row.difference) > row.detectable


@pytest.mark.parametrize("backend", ["flash", "rounded"])
def test_rounding_errors_are_not_reported(rows, backend):
    assert rows[backend].verdict == "same up to rounding"
    assert rows[backend].divergence > 0, "the kernels differ"
    assert rows[backend].first_divergence < 1e-6
    assert abs(rows[backend].difference) < 1e-4


@pytest.mark.parametrize("name", ["flash", "flash-62"])
def test_equal_settings_have_no_speedup_per_step(rows, name):
    row = rows[name]
    assert row.speedup_per_step == pytest.approx(1.0, abs=0.01)
    assert row.speedup_per_step_low <= 1.001
    assert row.speedup_per_step_high >= 0.999
