"""The config of bench.py."""

import pytest

from attention_bench.config import BenchConfig
from model import GPTConfig


def test_default_heads_are_those_of_the_default_model():
    model = GPTConfig()
    config = BenchConfig()
    heads = (config.n_head, config.n_kv_head, config.head_size)
    assert heads == (model.n_head, model.n_kv_head, model.head_dim)


@pytest.mark.parametrize(
    ("batch_size", "phase", "T", "expected"),
    [
        (None, "forward", 512, 4),
        (None, "forward", 4096, 1),
        (None, "decode", 128, 1),
        (3, "", 9, 3),
    ],
)
def test_default_batch_has_the_tokens_of_a_step_of_the_default_run(batch_size, phase, T, expected):
    assert BenchConfig(batch_size=batch_size).num_sequences(phase, T) == expected
