"""Memory of a device. test_device_settings.py has the settings device and dtype."""

import os
from pathlib import Path

import pytest
import torch

from common.machine import peak_memory_bytes, reset_peak_memory
from common.process import call_glibc

CPU = torch.device("cpu")
SIZE = 64 * 2**20

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(),
    reason="NOT RUN: only Linux can reset the peak",
)


@pytest.fixture
def before() -> int:
    """Bytes in use, after freed memory is returned and the peak is reset."""
    call_glibc("malloc_trim", 0)  # of earlier tests, which a tensor could reuse
    reset_peak_memory(CPU)
    return peak_memory_bytes(CPU)


def test_peak_memory_after_a_reset_is_the_memory_in_use(before):
    """In bytes: /proc counts kB of 1,024 bytes."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    assert before == pytest.approx(pages * os.sysconf("SC_PAGE_SIZE"), rel=0.02)


def test_peak_memory_counts_memory_that_was_freed(before):
    block = torch.ones(SIZE, dtype=torch.uint8)
    del block
    call_glibc("malloc_trim", 0)
    assert peak_memory_bytes(CPU) - before > SIZE // 2


def test_reset_forgets_the_peak(before):
    block = torch.ones(SIZE, dtype=torch.uint8)
    del block
    call_glibc("malloc_trim", 0)
    peak = peak_memory_bytes(CPU)
    reset_peak_memory(CPU)
    assert peak - peak_memory_bytes(CPU) > SIZE // 2
