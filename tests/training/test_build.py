"""Building the model of a run.

tests/training/test_init_from.py has the tokenizer of a run that resumes, and tests/test_train.py
the facts in summary.json.
"""

import pytest
import torch
from helpers import TINY

from configs.cli import parse_config
from training.build import build_model
from training.runtime import resolve_runtime


def count_calls(part: str, *words: str) -> int:
    """Calls of a part of the first block in a forward and backward pass."""
    config = parse_config("train", "", [*TINY, "device=cpu", *words])
    model = build_model(config, resolve_runtime(config), vocab_size=20)
    calls = []
    part_of_block = model.blocks[0].get_submodule(part)
    part_of_block.register_forward_hook(lambda *args: calls.append(part))
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    model(tokens, tokens).backward()
    return len(calls)


@pytest.mark.parametrize(
    ("setting", "part", "calls"),
    [
        ("none", "mlp.fc", 1),
        ("block", "mlp.fc", 2),
        ("attention", "mlp.fc", 1),
        ("attention", "attn.qkv", 2),
    ],
)
def test_activation_checkpointing_computes_a_part_twice(workdir, setting, part, calls):
    assert count_calls(part, f"train.activation_checkpointing={setting}") == calls
