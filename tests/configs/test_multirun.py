"""Combinations of swept values."""

import pytest

from configs.compose import hydra_initialized, parse_word
from configs.multirun import list_combinations


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["attention=naive,sdpa", "seed=range(1,3)"],
            [[f"seed={n}", f"attention={name}"] for n in (1, 2) for name in ("naive", "sdpa")],
        ),
        (
            ["train.steps=5", "optimizer.betas=[0.9,0.95],[0.9,0.99]"],
            [["optimizer.betas=[0.9,0.95]"], ["optimizer.betas=[0.9,0.99]"]],
        ),
        (["optimizer=glob(*, exclude=s*)", "data.path=a,b.txt"], [["optimizer=adamw"], ["optimizer=muon"]]),
    ],
)
def test_combinations_of_swept_values(words, expected):
    with hydra_initialized("train", None):
        parsed = {word: parse_word("train", word) for word in words}
        swept = {word: override for word, override in parsed.items() if override.is_sweep_override()}
        assert [list(combination.values()) for combination in list_combinations(swept)] == expected
