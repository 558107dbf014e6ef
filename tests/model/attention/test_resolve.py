"""The resolved kernel is the kernel that runs: eager, compiled, and with a shared compile cache."""

import os
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import attention_helpers
import pytest
import torch
from attention_helpers import (
    REQUEST,
    REQUEST_CUDA,
    choose,
    per_device,
    random_masks,
    random_qkv,
    resolve_or_skip,
)
from helpers import ROOT
from kernel_profiler import KERNEL_OPERATIONS, kernels_run
from model_helpers import GROUPED
from torch.nn.attention import SDPBackend, sdpa_kernel

from common.errors import UserError
from model import GPTConfig
from model.attention import (
    BACKENDS,
    ResolvedAttention,
    Support,
    all_variants,
    flash,
    get_attention_fn,
    naive,
    pin_kernel_under_compile,
    resolve,
    resolve_model,
    sdpa,
)
from model.attention.torch_internals import select_sdpa_kernel

FLASH_NODE = "ScaledDotProductFlashAttentionForCpuBackward0"


def graph_nodes(y) -> set[str]:
    """Names of the autograd nodes that the backward pass of y visits."""
    todo = [y.grad_fn]
    names = set()
    while todo:
        node = todo.pop()
        names.add(type(node).__name__)
        todo += [parent for parent, _ in node.next_functions if parent is not None]
    return names


@pytest.mark.parametrize(
    ("attend", "options", "has_flash"),
    [(flash, {}, True), (sdpa, {}, True), (sdpa, {"kernels": ["math"]}, False), (naive, {}, False)],
)
def test_grad_fn_shows_whether_the_flash_kernel_ran(attend, options, has_flash):
    nodes = graph_nodes(attend(*random_qkv(REQUEST), **options))
    assert (FLASH_NODE in nodes) == has_flash


def test_apple_gpus_have_one_kernel():
    """PyTorch's function that selects a kernel is not implemented for them."""
    tensor = SimpleNamespace(device=torch.device("mps"))
    assert select_sdpa_kernel(tensor, tensor, tensor) == SDPBackend.MATH
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION), pytest.raises(RuntimeError, match="math kernel"):
        select_sdpa_kernel(tensor, tensor, tensor)


# Single calls

NAIVE = choose("naive")
MATH = choose("sdpa", ["math"])
CASES_CPU = [
    (NAIVE, {}, "naive"),
    (NAIVE, {"dropout_p": 0.1, "Dv": 4}, "naive"),
    (choose("sdpa"), {}, "flash"),
    (choose("sdpa"), {"dropout_p": 0.1}, "math"),
    (choose("sdpa"), {"Dv": 4}, "math"),
    (choose("sdpa"), {"window": 3, "document_mask": True}, "flash"),
    (choose("sdpa"), {"Tq": 1}, "flash"),
    (MATH, {}, "math"),
    (choose("sdpa", ["cudnn", "flash"]), {}, "flash"),
    (choose("flash"), {}, "flash"),
    (choose("flash"), {"dtype": torch.bfloat16}, "flash"),
    (choose("flash"), {"grad": False}, "flash"),
    (choose("flash"), {"positions": True, "Tq": 3}, "flash"),
]
CASES_CUDA = [
    (NAIVE, {}, "naive"),
    (choose("flash"), {}, "flash"),
    (choose("cudnn"), {}, "cudnn"),
    (choose("sdpa", ["efficient"]), {}, "efficient"),
    (MATH, {}, "math"),
    (choose("sdpa", ["flash", "cudnn"]), {}, "flash"),
    (choose("sdpa", ["cudnn", "flash"]), {}, "cudnn"),
]


def check_resolved_kernel(device, case, compiled):
    config, changed, resolved = case
    base = REQUEST_CUDA if device.type == "cuda" else REQUEST
    request = replace(base, **changed)
    expected = ResolvedAttention(config.backend, resolved, flash_package=None)
    assert resolve_or_skip(config, request) == expected
    attend = get_attention_fn(config)
    if compiled:
        pin_kernel_under_compile(config)
        attend = torch.compile(attend, fullgraph=True)
    qkv = random_qkv(request)
    masks = random_masks(request)

    def run():
        y = attend(*qkv, **masks, dropout_p=request.dropout_p)
        if request.grad:
            y.sum().backward()

    run()  # compiles
    assert kernels_run(run) == {resolved} & set(KERNEL_OPERATIONS)


@pytest.mark.parametrize(("device", "case"), per_device(cpu=CASES_CPU, cuda=CASES_CUDA))
def test_resolved_kernel_runs(device, case):
    check_resolved_kernel(device, case, compiled=False)


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("device", "case"), per_device(cpu=[(NAIVE, {}, "naive"), (MATH, {}, "math")], cuda=CASES_CUDA)
)
def test_resolved_kernel_runs_when_compiled(device, case):
    with attention_helpers.restored_compile_settings():
        check_resolved_kernel(device, case, compiled=True)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("naive", choose("naive")),
        ("sdpa:math", choose("sdpa", kernels=["math"])),
        ("flash:FA3", choose("flash", flash_package="FA3")),
        ("linear", choose("linear")),
    ],
)
def test_variant_has_the_settings_of_its_name(name, config):
    assert all_variants()[name] == config


# Refusals


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            choose("nave"),
            "attention.backend=nave is unknown .*; set one of auto, naive, sdpa",
        ),
        (choose("naive", ["math"]), r"attention.kernels=\[math\]; set null$"),
        (choose("sdpa", ["mth"]), r"attention.kernels=\[mth\]; set null or \[cudnn\] or \[flash\]"),
        (choose("sdpa", flash_package="FA3"), "attention.flash_package=FA3; set null$"),
        (choose("flash", flash_package="FA9"), "=FA9; set null or FA3 or FA4$"),
    ],
    ids=["backend", "kernels of naive", "kernels", "package of sdpa", "package"],
)
def test_invalid_attention_settings_are_refused(config, message):
    with pytest.raises(UserError, match=message):
        resolve(config, REQUEST)


@pytest.mark.parametrize("kernels", [[], ["cudnn"]], ids=str)
def test_kernels_that_cannot_run_are_refused(kernels):
    with pytest.raises(UserError, match=r"on cpu \(.+\); set attention.kernels=null, or attention"):
        resolve(choose("sdpa", kernels), REQUEST)


def test_refusal_by_pytorch_contains_its_reason(monkeypatch):
    """The support table is replaced by one that allows everything."""
    monkeypatch.setitem(BACKENDS, "flash", replace(BACKENDS["flash"], on={"cpu": Support()}))
    reason = r"on cpu \([^)]*same last dimension.*; set attention=naive"
    with pytest.raises(UserError, match=reason):
        resolve(choose("flash"), replace(REQUEST, Dv=4))


def test_flash_package_that_is_not_installed_is_refused():
    request = replace(REQUEST_CUDA, dtype=torch.bfloat16)  # a refusal needs no GPU
    message = "FA3 cannot be used .*; install it, or set attention.flash_package=null"
    with pytest.raises(UserError, match=message):
        resolve(choose("flash", flash_package="FA3"), request)


def test_flex_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match=r"flex needs a C\+\+ compiler .*, or set attention=naive"):
        resolve(choose("flex"), replace(REQUEST, grad=False))


# Models

MODEL = GPTConfig(**GROUPED | dict(window=[4, None], dropout=0.1))
ON_CUDA = dict(B=2, dtype=torch.bfloat16, device=REQUEST_CUDA.device)  # refusals need no GPU
ON_CPU = dict(B=2, dtype=torch.float32, device=REQUEST.device)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dropout": 0.0}, "not support windows"),
        ({"window": None, "dropout": 0.0}, "FA3 cannot be used"),
        ({"window": 24}, "not support dropout"),
    ],
    ids=["window", "no window", "window of block_size"],
)
def test_model_is_refused_if_one_of_its_layers_is_refused(changed, message):
    model = replace(MODEL, **changed)
    with pytest.raises(UserError, match=message):
        resolve_model(choose("flash", flash_package="FA3"), model, grad=True, **ON_CUDA)


def test_training_is_refused_by_a_backend_without_gradients():
    model = replace(MODEL, dropout=0.0)
    with pytest.raises(UserError, match="does not support training"):
        resolve_model(choose("flex"), model, grad=True, **ON_CPU)


def resolved_kernel(name, **options):
    _, attention = resolve_model(choose(name), MODEL, **ON_CPU | options)
    return attention.resolved


def test_dropout_is_only_for_training():
    assert resolved_kernel("flex", grad=False) == "flex"
    assert resolved_kernel("sdpa", grad=True) == "math"


@pytest.mark.parametrize(
    ("device", "case"),
    per_device(cpu=[(None, "flash")], cuda=[(["flash", "efficient"], "efficient+flash")]),
)
def test_model_with_windows_resolves_to_the_kernels_of_its_layers(device, case):
    kernels, resolved = case
    changed = dict(n_kv_head=None, n_embd=256, block_size=128, window=[32, None])
    model = GPTConfig(**GROUPED | changed)
    options = dict(B=2, dtype=attention_helpers.HALF, device=device, grad=True)
    if device.type == "cuda":
        resolve_or_skip(choose("flash"), REQUEST_CUDA)
    _, attention = resolve_model(choose("sdpa", kernels), model, **options)
    assert attention.resolved == resolved


# attention=auto


AUTO = choose("auto")


def resolve_auto(dtype=torch.bfloat16, T=128, config=AUTO, **changed):
    model = GPTConfig(block_size=T, **changed)
    return resolve_model(config, model, B=2, dtype=dtype, device=REQUEST.device, grad=True)


@pytest.mark.parametrize(
    ("dtype", "T", "resolved"),
    [
        (torch.bfloat16, 128, "naive"),
        (torch.bfloat16, 256, "naive"),
        (torch.bfloat16, 512, "flash"),
        (torch.float32, 128, "flash"),
    ],
    ids=str,
)
def test_auto_selects_a_backend_by_dtype_and_context(dtype, T, resolved):
    attend, attention = resolve_auto(dtype, T)
    assert attention == ResolvedAttention("auto", resolved)
    assert attend is (naive if resolved == "naive" else sdpa)


def test_auto_selects_a_backend_that_supports_the_model():
    attend, attention = resolve_auto(torch.float32, attention_softcap=20.0)
    assert (attend, attention.resolved) == (naive, "naive")


def test_auto_runs_the_kernels_that_are_set():
    _, attention = resolve_auto(config=choose("auto", ["math"]))
    assert attention == ResolvedAttention("auto", "math")


def test_auto_selects_flash_for_a_flash_package():
    """The advice lists the packages of flash."""
    with pytest.raises(UserError, match=r"=FA9; set null or FA3 or FA4$"):
        resolve_auto(config=choose("auto", flash_package="FA9"))


# torch.compile

COMPILE = """
import contextlib, sys, torch
from torch.nn.attention import sdpa_kernel
from kernel_profiler import kernels_run
from model import AttentionConfig
from model.attention import get_attention_fn, pin_kernel_under_compile
from model.attention.backends import KERNELS

qkv = [torch.randn(1, 64, 4, 16) for _ in range(3)]
for case in sys.argv[1:]:
    how, backend, *kernel = case.split(":")
    config = AttentionConfig(backend, kernel if how != "around" and kernel else None, None)
    torch._dynamo.reset()  # the compiled code is looked up on disk again, as in another process
    if how == "pinned":
        pin_kernel_under_compile(config)
    attend = torch.compile(get_attention_fn(config), fullgraph=True)
    with sdpa_kernel(KERNELS[kernel[0]]) if how == "around" else contextlib.nullcontext():
        attend(*qkv)
    print("ran", case, *kernels_run(lambda: attend(*qkv)))
"""


@pytest.mark.slow
@pytest.mark.compiles
def test_resolved_kernel_runs_when_compiled_with_any_compile_cache(tmp_path):
    """Two processes share one compile cache.

    The cases in `traps` show what goes wrong without precautions:

    - plain: Inductor replaces PyTorch's math kernel by flash.
    - around: a kernel that is selected outside a compiled function is not part of the cache key.
      The case that selects flash gets the math kernel of an earlier case.

    If an assertion about a trap fails, PyTorch has fixed the problem, and the precaution can be
    removed.
    """
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    }

    def check_process(expected: dict[str, str]) -> None:
        command = [sys.executable, "-c", COMPILE, *expected]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stdout.splitlines() if line.startswith("ran ")]
        assert lines == [f"ran {case} {kernel}".strip() for case, kernel in expected.items()]

    fused = "flash" if torch.__version__ >= "2.12" else ""  # torch 2.11 does not replace it here
    traps = {"plain:sdpa:math": fused, "around:sdpa:flash": ""}
    check_process(
        {"around:sdpa:math": ""} | traps | {"plain:sdpa:flash": "flash", "plain:flash": "flash"}
    )
    # for naive, see test_end_to_end.py
    check_process({"pinned:sdpa:math": "", "pinned:sdpa": "flash", "pinned:flash": "flash"})
