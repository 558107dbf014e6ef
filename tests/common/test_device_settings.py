"""The settings device and dtype: how auto is resolved, and what is refused."""

import pytest
import torch

from common.errors import UserError
from common.machine import autocast, resolve_device, resolve_dtype

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
MPS = torch.device("mps")


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


@pytest.mark.parametrize(
    ("is_native", "expected"),
    [(True, torch.bfloat16), (False, torch.float32)],
    ids=["native", "emulated"],
)
def test_auto_is_bfloat16_on_gpus_that_do_not_emulate_it(monkeypatch, is_native, expected):
    """A T4 or a V100 emulates it, and no fused attention kernel runs in emulated bfloat16."""

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return is_native or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_bf16_supported)
    assert resolve_dtype("auto", CUDA) == expected


def test_auto_is_float32_on_mps():
    assert resolve_dtype("auto", MPS) == torch.float32


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
    ("name", "device", "trains", "message"),
    [
        ("float16", CPU, True, "dtype=float16 .* set dtype=bfloat16 or float32"),
        ("float16", MPS, True, "dtype=float16 .* set dtype=bfloat16 or float32"),
        ("int8", CUDA, False, "dtype=int8 needs device=cpu.* set dtype=auto"),
    ],
    ids=["float16 on a CPU", "float16 on mps", "int8 on a GPU"],
)
def test_dtype_that_the_device_does_not_support_is_refused(name, device, trains, message):
    with pytest.raises(UserError, match=message):
        resolve_dtype(name, device, trains)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast_computes_matrix_products_in_the_dtype(dtype):
    a = torch.ones(2, 2)
    with autocast(CPU, dtype):
        assert (a @ a).dtype == dtype
