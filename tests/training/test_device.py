"""Device, dtype and compiler: what is resolved, and what is refused."""

import pytest
import torch

from common.device import resolve_device, resolve_dtype
from common.errors import UserError
from common.settings import check
from training.config import RunConfig
from training.device import resolve_compile

CPU = torch.device("cpu")


def test_devices_dtypes_and_the_compiler_are_resolved_or_refused(monkeypatch):
    for cuda, mps, expected in (
        (True, True, "cuda:0"),
        (False, True, "mps"),
        (False, False, "cpu"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda cuda=cuda: cuda)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda mps=mps: mps)
        assert resolve_device("auto") == torch.device(expected)
    with pytest.raises(UserError, match=r"finds no cuda device; set device=cpu"):
        resolve_device("cuda")
    with pytest.raises(UserError, match="finds no tpu device"):
        resolve_device("tpu")
    assert resolve_dtype("bfloat16", CPU) == torch.bfloat16
    with pytest.raises(UserError, match="dtype=float16 trains only on cuda"):
        resolve_dtype("float16", CPU)
    assert resolve_dtype("int8", CPU, trains=False) == torch.int8
    with pytest.raises(
        UserError, match=r"dtype=int8 is unknown; set one of auto, float32, bfloat16, float16$"
    ):
        check(RunConfig(dtype="int8"))
    with pytest.raises(UserError, match="dtype=int8 needs device=cpu, not cuda; set dtype=auto"):
        resolve_dtype("int8", torch.device("cuda"), trains=False)
    assert resolve_compile(None, CPU) is False
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match=r"compile=true needs a C\+\+ compiler"):
        resolve_compile(True, CPU)


@pytest.mark.parametrize("has_bf16", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_auto_trains_in_bfloat16_on_cpus_with_its_instructions(monkeypatch, has_bf16, trains):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bf16})
    dtype = resolve_dtype("auto", CPU, trains=trains)
    assert dtype == (torch.bfloat16 if has_bf16 and trains else torch.float32)
    assert resolve_dtype("auto", torch.device("mps"), trains=trains) == torch.float32


def test_auto_is_float32_on_gpus_that_only_emulate_bfloat16(monkeypatch):
    """As a T4 or a V100. No fused attention kernel runs in emulated bfloat16."""
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation=True: including_emulation
    )
    assert resolve_dtype("auto", torch.device("cuda")) == torch.float32
