"""Facts about the machine: memory, commit and command."""

import sys
from pathlib import Path

import pytest
import torch

from common import system

CPU = torch.device("cpu")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="NOT RUN: only Linux can reset the peak")
def test_peak_memory_counts_from_the_reset():
    size = 64 * 2**20
    system.return_freed_memory()  # of earlier tests, which the block could reuse
    system.reset_peak_memory(CPU)
    before = system.peak_memory_bytes(CPU)
    block = torch.ones(size, dtype=torch.uint8)
    assert system.peak_memory_bytes(CPU) - before > size // 2
    del block
    system.return_freed_memory()
    system.reset_peak_memory(CPU)
    assert system.peak_memory_bytes(CPU) - before < size // 2


def test_environment_names_the_device_and_the_commit_of_the_checkout():
    environment = system.describe_environment(CPU)
    assert environment["device"] == "cpu"
    assert environment["device_name"].endswith(" cores")
    assert environment["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]  # packages omit "+cu130"
    commit = environment["commit"]
    assert commit is None or len(commit.removesuffix("+")) == 40


@pytest.mark.parametrize(
    ("machines", "command"),
    [
        (None, "python"),
        ("1", "torchrun --nproc_per_node=4"),
        ("2", "torchrun --nnodes=2 --rdzv_backend=c10d --rdzv_endpoint=HOST:29500 --nproc_per_node=4"),
    ],
)
def test_command_starts_with_the_program_that_starts_the_processes(monkeypatch, machines, command):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if machines:
        variables = {"TORCHELASTIC_RUN_ID": "none", "GROUP_WORLD_SIZE": machines, "LOCAL_WORLD_SIZE": "4"}
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["/folder/train.py", "name=a"])
    assert system.command_line() == f"{command} train.py name=a"
