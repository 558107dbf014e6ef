"""The config of bench.py."""

from attention_bench.config import BenchConfig
from model import GPTConfig


def test_default_heads_are_those_of_the_default_model():
    model = GPTConfig()
    config = BenchConfig()
    heads = (config.n_head, config.n_kv_head, config.head_size)
    assert heads == (model.n_head, model.n_kv_head, model.head_dim)
