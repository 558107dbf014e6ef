"""The settings device and dtype, memory, and the description of the machine."""

import os
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from common.errors import UserError
from common.machine import (
    autocast,
    describe_environment,
    peak_memory_bytes,
    reset_peak_memory,
    resolve_device,
    resolve_dtype,
)
from common.process import call_glibc

CPU, CUDA, MPS = map(torch.device, ("cpu", "cuda", "mps"))


@pytest.fixture
def machine(monkeypatch):
    """machine(cuda=True, mps=False): a machine with these devices."""

    def set_devices(cuda: bool, mps: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)

    return set_devices


@pytest.mark.parametrize(
    ("cuda", "mps", "expected"),
    [(True, True, "cuda:0"), (False, True, "mps"), (False, False, "cpu")],
    ids=["cuda", "mps", "neither"],
)
def test_auto_is_the_fastest_device(machine, cuda, mps, expected):
    machine(cuda, mps)
    assert resolve_device("auto") == torch.device(expected)


def test_each_process_of_a_machine_has_another_gpu(machine):
    machine(cuda=True, mps=False)
    assert resolve_device("cuda", local_rank=3) == torch.device("cuda:3")


@pytest.mark.parametrize("name", ["cuda", "mps", "tpu"])
def test_device_that_is_not_available_is_refused(machine, name):
    machine(cuda=False, mps=False)
    with pytest.raises(UserError, match=f"no {name} device; set device=cpu$"):
        resolve_device(name)


@pytest.mark.parametrize("has_bf16", [True, False])
@pytest.mark.parametrize("trains", [True, False], ids=["trains", "samples"])
def test_auto_trains_in_bfloat16_on_cpus_with_its_instructions(monkeypatch, has_bf16, trains):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bf16})
    expected = torch.bfloat16 if has_bf16 and trains else torch.float32
    assert resolve_dtype("auto", CPU, trains=trains) == expected
    assert resolve_dtype("auto", MPS, trains=trains) == torch.float32


@pytest.mark.parametrize("is_native", [True, False], ids=["native", "emulated"])
def test_auto_is_bfloat16_on_gpus_that_do_not_emulate_it(monkeypatch, is_native):
    """A T4 or a V100 emulates it, and no fused attention kernel runs in emulated bfloat16."""

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return is_native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    assert resolve_dtype("auto", CUDA) == (torch.bfloat16 if is_native else torch.float32)


@pytest.mark.parametrize(
    ("name", "device", "trains", "expected"),
    [
        ("bfloat16", CPU, True, torch.bfloat16),
        ("float16", CUDA, True, torch.float16),
        ("float16", CPU, False, torch.float16),
        ("int8", CPU, False, torch.int8),
    ],
    ids=str,
)
def test_dtype_that_the_device_supports_is_resolved(name, device, trains, expected):
    assert resolve_dtype(name, device, trains) == expected


@pytest.mark.parametrize(
    ("name", "device", "trains", "advice"),
    [
        ("float16", CPU, True, "set dtype=bfloat16 or float32"),
        ("float16", MPS, True, "set dtype=bfloat16 or float32"),
        ("int8", CUDA, False, "set dtype=auto"),
    ],
    ids=str,
)
def test_dtype_that_the_device_does_not_support_is_refused(name, device, trains, advice):
    with pytest.raises(UserError, match=f"dtype={name} .*{advice}"):
        resolve_dtype(name, device, trains)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_computes_matrix_products_in_the_dtype(dtype):
    a = torch.ones(2, 2)
    with autocast(CPU, dtype):
        assert (a @ a).dtype == dtype


@pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="NOT RUN: only Linux can reset the peak"
)
def test_peak_memory_counts_freed_memory_until_it_is_reset():
    size = 64 * 2**20
    call_glibc("malloc_trim", 0)  # of earlier tests, which a tensor could reuse
    reset_peak_memory(CPU)
    before = peak_memory_bytes(CPU)
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1])
    assert before == pytest.approx(pages * os.sysconf("SC_PAGE_SIZE"), rel=0.02)
    torch.ones(size, dtype=torch.uint8)
    call_glibc("malloc_trim", 0)
    peak = peak_memory_bytes(CPU)
    reset_peak_memory(CPU)
    assert size // 2 < peak - before < 2 * size
    assert peak - peak_memory_bytes(CPU) > size // 2


def test_environment_has_the_device_versions_commit_and_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/folder/train.py", "name=a", "eval.sample.prompt=a b"])
    environment = describe_environment(CPU)
    assert environment["device"] == "cpu"
    assert environment["device_name"].endswith(" cores")
    assert environment["versions"]["torch"] == version("torch")
    commit = environment["commit"]
    assert commit is None or len(commit.removesuffix("+")) == 40
    assert environment["command"] == "python train.py name=a 'eval.sample.prompt=a b'"
