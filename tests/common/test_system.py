"""Facts about the machine: memory and commit."""

import os
from pathlib import Path

import pytest
import torch

from common import system
from comparison.bench.worker import return_freed_memory

CPU = torch.device("cpu")


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="NOT RUN: only Linux can reset the peak"
)
def test_peak_memory_counts_from_the_reset():
    size = 64 * 2**20
    return_freed_memory()  # of earlier tests, which the block could reuse
    system.reset_peak_memory(CPU)
    before = system.peak_memory_bytes(CPU)
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    assert before == pytest.approx(
        pages * os.sysconf("SC_PAGE_SIZE"), rel=0.02
    )  # not 1,000 bytes per kB
    block = torch.ones(size, dtype=torch.uint8)
    assert system.peak_memory_bytes(CPU) - before > size // 2
    del block
    return_freed_memory()
    system.reset_peak_memory(CPU)
    assert system.peak_memory_bytes(CPU) - before < size // 2


def test_environment_names_the_device_and_the_commit_of_the_checkout():
    environment = system.describe_environment(CPU)
    assert environment["device"] == "cpu"
    assert environment["device_name"].endswith(" cores")
    assert (
        environment["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    )  # packages omit "+cu130"
    commit = environment["commit"]
    assert commit is None or len(commit.removesuffix("+")) == 40
