"""The resolved kernel is the kernel that runs: eager, compiled, and with the compile cache of another process."""

import os
import subprocess
import sys
import warnings
from dataclasses import replace

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
from helpers import ROOT, TRAINS_ON_CPU, summary
from kernel_profiler import KERNEL_OPERATIONS, kernels_run
from model_helpers import GROUPED
from torch._subclasses.fake_tensor import FakeTensorMode

from common.errors import UserError
from model import GPTConfig, attention
from model.attention import (
    BACKENDS,
    Support,
    flash,
    get_attention_fn,
    naive,
    resolve,
    resolve_model,
    sdpa,
)


def graph_nodes(y) -> set[str]:
    """Names of the autograd nodes that the backward pass of y visits."""
    todo, names = [y.grad_fn], set()
    while todo:
        node = todo.pop()
        names.add(type(node).__name__)
        todo += [parent for parent, _ in node.next_functions if parent is not None]
    return names


def test_grad_fn_shows_which_kernel_ran():
    qkv = random_qkv(REQUEST)
    kernel = "ScaledDotProductFlashAttentionForCpuBackward0"
    assert kernel in graph_nodes(flash(*qkv)) and kernel in graph_nodes(sdpa(*qkv))
    assert kernel not in graph_nodes(naive(*qkv)) | graph_nodes(sdpa(*qkv, kernels=["math"]))
    assert {"SoftmaxBackward0", "MaskedFillBackward0"} <= graph_nodes(naive(*qkv))


CASES_CPU = [
    (choose("naive"), {}, "naive"), (choose("naive"), {"dropout_p": 0.1, "Dv": 4}, "naive"),
    (choose("sdpa"), {}, "flash"), (choose("sdpa"), {"dropout_p": 0.1}, "math"), (choose("sdpa"), {"Dv": 4}, "math"),
    (choose("sdpa", ["math"]), {}, "math"), (choose("sdpa", ["cudnn", "flash"]), {}, "flash"),
    (choose("sdpa"), {"window": 3, "document_mask": True}, "flash"), (choose("sdpa"), {"Tq": 1}, "flash"),
    (choose("flash"), {}, "flash"), (choose("flash"), {"dtype": torch.bfloat16}, "flash"),
    (choose("flash"), {"grad": False}, "flash"), (choose("flash"), {"positions": True, "Tq": 3}, "flash"),
]  # fmt: skip
CASES_CUDA = [
    (choose("naive"), {}, "naive"), (choose("flash"), {}, "flash"), (choose("cudnn"), {}, "cudnn"),
    (choose("sdpa", ["efficient"]), {}, "efficient"), (choose("sdpa", ["math"]), {}, "math"),
    (choose("sdpa", ["flash", "cudnn"]), {}, "flash"), (choose("sdpa", ["cudnn", "flash"]), {}, "cudnn"),
]  # fmt: skip


@pytest.mark.parametrize(("device", "case"), per_device(cpu=CASES_CPU, cuda=CASES_CUDA))
def test_resolved_kernel_runs(device, case):
    check_resolved_kernel(device, *case, compiled=False)


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.parametrize(
    ("device", "case"), per_device(cpu=[CASES_CPU[0], CASES_CPU[5]], cuda=CASES_CUDA)
)
def test_resolved_kernel_runs_when_compiled(device, case):
    check_resolved_kernel(device, *case, compiled=True)


def check_resolved_kernel(device, config, changed, resolved, compiled):
    request = replace(REQUEST_CUDA if device.type == "cuda" else REQUEST, **changed)
    assert resolve_or_skip(config, request) == attention.ResolvedAttention(
        config.backend, resolved, None
    )
    attend, qkv, masks = get_attention_fn(config), random_qkv(request), random_masks(request)

    def run():
        y = attend(*qkv, **masks, dropout_p=request.dropout_p)
        if request.grad:
            y.sum().backward()

    with attention_helpers.restored_compile_settings():
        if compiled:
            attention.pin_kernel_under_compile(config)
            attend = torch.compile(attend, fullgraph=True)
        run()
        assert kernels_run(run) == {resolved} & set(KERNEL_OPERATIONS)


def test_all_variants_are_attention_functions():
    variants = attention.all_variants()
    assert {"naive", "sdpa", "sdpa:math", "flash", "flash:FA3", "linear"} <= variants.keys()
    assert all(callable(get_attention_fn(config)) for config in variants.values())
    assert (
        variants["sdpa:math"].kernels == ["math"] and variants["flash:FA3"].flash_package == "FA3"
    )


@pytest.mark.parametrize(("config", "message"), [
    (choose("nave"), "attention.backend=nave is unknown; set one of naive, sdpa"),
    (choose("naive", kernels=["math"]), r"=naive has no attention.kernels=\[math\]; set attention.kernels=null$"),
    (choose("sdpa", kernels=["mth"]), r"has no .*=\[mth\]; .*=null or a list of cudnn, flash, efficient, math$"),
    (choose("sdpa", kernels=[]), r"has no attention.kernels=\[\]; set .*null or a list of cudnn"),
    (choose("sdpa", kernels=["cudnn"]), r"kernels=\[cudnn\] cannot run on cpu \(.+\); set attention.kernels=null$"),
    (choose("sdpa", flash_package="FA3"), "attention=sdpa has no attention.flash_package=FA3; set null$"),
    (choose("flash", flash_package="FA9"), "no attention.flash_package=FA9; set null or FA3 or FA4$"),
])  # fmt: skip
def test_invalid_attention_settings_are_refused(config, message):
    with pytest.raises(UserError, match=message):
        resolve(config, REQUEST)


def test_refusal_by_pytorch_contains_its_reason(monkeypatch):
    """The support table is replaced by one that allows everything."""
    monkeypatch.setitem(BACKENDS, "flash", replace(BACKENDS["flash"], on={"cpu": Support()}))
    with pytest.raises(
        UserError, match=r"on cpu \([^)]*same last dimension.*; set attention=naive"
    ):
        resolve(choose("flash"), replace(REQUEST, Dv=4))


def test_flex_without_a_compiler_is_refused(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(UserError, match=r"flex needs a C\+\+ compiler .*, or set attention=naive"):
        resolve(choose("flex"), replace(REQUEST, grad=False))


def test_flex_with_too_large_heads_for_the_gpu_is_refused(monkeypatch):
    """Fake tensors need no GPU. The error is Inductor's."""
    error = "No valid triton configs. OutOfMemoryError: out of resource: Required: 262144 Hardware limit:232448"

    def attend(*qkv, **options):
        warnings.warn("of a module that Inductor imports", stacklevel=1)
        raise RuntimeError(f"{error}\n\nSet TORCHDYNAMO_VERBOSE=1")

    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setitem(BACKENDS, "flex", replace(BACKENDS["flex"], attend=attend))
    large = replace(REQUEST_CUDA, D=512, Dv=512, grad=False)
    with (
        FakeTensorMode(),
        pytest.raises(
            UserError, match=rf"flex cannot run on cuda \({error}\); set attention=naive"
        ),
    ):
        resolve(choose("flex"), large)
    assert resolve(choose("flex"), replace(large, D=64, Dv=64)).resolved == "flex", (
        "compiling takes seconds"
    )


# Models


def test_model_is_refused_if_one_of_its_layers_is_refused():
    model = GPTConfig(**GROUPED | dict(window=[4, None], dropout=0.1))
    cuda = dict(
        B=2, dtype=torch.bfloat16, device=REQUEST_CUDA.device
    )  # refusals by the table need no GPU
    for changed, message in (
        ({"window": None, "dropout": 0.0}, "FA3 cannot be used"),
        ({"dropout": 0.0}, "not support windows"),
        ({"window": 24}, "not support dropout"),
    ):
        with pytest.raises(UserError, match=message):
            resolve_model(
                choose("flash", flash_package="FA3"), replace(model, **changed), grad=True, **cuda
            )
    with pytest.raises(UserError, match="document masks"):
        resolve_model(
            choose("flash"), replace(model, window=None), grad=False, document_mask=True, **cuda
        )
    cpu = dict(B=2, dtype=torch.float32, device=REQUEST.device)
    with pytest.raises(UserError, match="cannot train"):
        resolve_model(choose("flex"), replace(model, dropout=0.0), grad=True, **cpu)
    assert resolve_model(choose("flex"), model, grad=False, **cpu).resolved == "flex", (
        "dropout is only for training"
    )
    assert resolve_model(choose("sdpa"), model, grad=True, **cpu).resolved == "math"


@pytest.mark.parametrize(
    ("device", "case"),
    per_device(cpu=[(None, "flash")], cuda=[(["flash", "efficient"], "efficient+flash")]),
)
def test_model_with_windows_resolves_to_the_kernels_of_its_layers(device, case):
    kernels, resolved = case
    model = GPTConfig(
        **GROUPED | dict(n_kv_head=None, n_embd=256, block_size=128, window=[32, None])
    )
    options = dict(B=2, dtype=attention_helpers.HALF, device=device, grad=True)
    if device.type == "cuda":
        resolve_or_skip(choose("flash"), REQUEST_CUDA)
    assert resolve_model(choose("sdpa", kernels), model, **options).resolved == resolved


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [pytest.param("true", marks=pytest.mark.compiles), "false"])
@pytest.mark.parametrize(
    ("device", "name"), per_device(cpu=TRAINS_ON_CPU, cuda=attention_helpers.backends_on("cuda"))
)
def test_model_trains_generates_and_is_planned_with_each_backend(
    train, sample, device, name, compiled
):
    if device.type == "cuda":
        resolve_or_skip(choose(name), REQUEST_CUDA)
    settings = [
        f"attention={name}",
        f"device={device}",
        "dtype=bfloat16",
        f"compile={compiled}",
        "name=a",
    ]
    assert train(*settings, "model.n_embd=64") == 0
    assert summary("a")["attention"]["resolved"] == name or BACKENDS[name].kernels
    assert sample(
        "run=a", f"attention={name}", f"device={device}", "dtype=bfloat16", "max_new_tokens=5"
    )
    if compiled == "false":  # a plan does not compile
        assert train(*settings, "model.n_embd=64", "plan=true") == 0


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
    """Two processes share one compile cache. The cases in `traps` show what goes wrong without precautions:

    - plain: Inductor replaces PyTorch's math kernel by flash.
    - around: a kernel that is selected outside a compiled function is not part of the cache key. The case that selects
      flash gets the math kernel of an earlier case.

    If an assertion about a trap fails, PyTorch has fixed the problem, and the precaution can be removed.
    """
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    }  # fmt: skip

    def check_process(**expected: str) -> None:
        cases = [case.replace("_", ":") for case in expected]
        done = subprocess.run(
            [sys.executable, "-c", COMPILE, *cases], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        ran = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ran ")]
        assert ran == [
            [case, *kernel.split()] for case, kernel in zip(cases, expected.values(), strict=True)
        ]

    traps = dict(plain_sdpa_math="flash", around_sdpa_flash="")
    check_process(around_sdpa_math="", **traps, plain_sdpa_flash="flash", plain_flash="flash")
    check_process(
        pinned_sdpa_math="", pinned_sdpa="flash", pinned_flash="flash"
    )  # naive: see test_end_to_end.py


def test_attention_settings_are_part_of_the_compile_cache_key():
    before, tags = torch.compiler.config.cache_key_tag, set()
    variants = attention.all_variants().values()
    with attention_helpers.restored_compile_settings():
        for config in variants:
            attention.pin_kernel_under_compile(config)
            tags.add(torch.compiler.config.cache_key_tag)
    assert len(tags) == len(variants)
    assert torch.compiler.config.cache_key_tag == before
