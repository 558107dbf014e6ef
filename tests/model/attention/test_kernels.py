"""The label against the kernel that ran: eager, compiled, and with a compile cache that another backend left behind."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attention_helpers import DTYPES, NEED, choose, random_masks, random_qkv
from helpers import ROOT
from kernel_profiler import MARKS, kernels_run
from test_attention import agree_or_refuse

from common.errors import UserError
from model import AttentionConfig
from model.attention import (
    BACKENDS,
    flash,
    get_attention_fn,
    naive,
    pin_kernel_under_compile,
    resolve,
    resolve_model,
    sdpa,
)

CUDA = torch.device("cuda")


def graph(y) -> set[str]:
    """The names of the nodes that autograd would go back through."""
    todo, names = [y.grad_fn], set()
    while todo:
        node = todo.pop()
        names.add(type(node).__name__)
        todo += [parent for parent, _ in node.next_functions if parent is not None]
    return names


def test_grad_fn_shows_which_kernel_ran():
    qkv = random_qkv(NEED)
    kernel = "ScaledDotProductFlashAttentionForCpuBackward0"
    assert kernel in graph(flash(*qkv)) and kernel in graph(sdpa(*qkv))
    assert kernel not in graph(naive(*qkv)) | graph(sdpa(*qkv, kernels=["math"]))
    assert {"SoftmaxBackward0", "MaskedFillBackward0"} <= graph(naive(*qkv))


CASES = [
    (choose("naive"), {}, "naive"), (choose("naive"), {"dropout_p": 0.1, "Dv": 4}, "naive"),
    (choose("sdpa"), {}, "flash"), (choose("sdpa"), {"dropout_p": 0.1}, "math"), (choose("sdpa"), {"Dv": 4}, "math"),
    (choose("sdpa", ["math"]), {}, "math"), (choose("sdpa", ["cudnn", "flash"]), {}, "flash"),
    (choose("sdpa"), {"window": 3, "document_mask": True}, "flash"), (choose("sdpa"), {"Tq": 1}, "flash"),
    (choose("flash"), {}, "flash"), (choose("flash"), {"dtype": torch.bfloat16}, "flash"),
    (choose("flash"), {"grad": False}, "flash"), (choose("flash"), {"positions": True, "Tq": 3}, "flash"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "changed", "resolved"), CASES)
def test_resolved_is_what_runs(config, changed, resolved):
    need = replace(NEED, **changed)
    answer = resolve(config, need)
    assert (answer.requested, answer.resolved, answer.impl) == (config.backend, resolved, None)
    attend, qkv, masks = get_attention_fn(config), random_qkv(need), random_masks(need)
    assert kernels_run(lambda: attend(*qkv, **masks, dropout_p=need.dropout_p)) == {resolved} & set(MARKS)


COMPILE = """
import contextlib, sys, torch
from torch.nn.attention import sdpa_kernel
from kernel_profiler import kernels_run
from model import AttentionConfig
from model.attention import get_attention_fn, keep_when_compiled
from model.attention.backends import KERNELS

qkv = [torch.randn(1, 64, 4, 16) for _ in range(3)]
for word in sys.argv[1:]:
    how, backend, *kernel = word.split(":")
    config = AttentionConfig(backend, kernel if how != "around" and kernel else None, None)
    torch._dynamo.reset()  # what is compiled is looked up on the disk again, as in another process
    if how == "kept":
        keep_when_compiled(config)
    attend = torch.compile(get_attention_fn(config), fullgraph=True)
    with sdpa_kernel(KERNELS[kernel[0]]) if how == "around" else contextlib.nullcontext():
        attend(*qkv)
    print("ran", word, *kernels_run(lambda: attend(*qkv)))
"""


@pytest.mark.slow
@pytest.mark.compiles
def test_compiled_the_kernel_that_was_resolved_runs_whatever_the_compile_cache_holds(tmp_path):
    """Two processes with one compile cache, and two ways in which a label would lie.

    A kernel that is chosen around a compiled function is no part of the cache's key: who wants flash is given the
    math of whoever came before. And Inductor rewrites PyTorch's math into flash. Both are seen below where our guards
    are left out (`around`, and what is not `kept`), so that this test notices if they are taken out of the code. Should
    a line marked as a trap fail, PyTorch has mended it, and a guard can go.
    """
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    }  # fmt: skip

    def process(**expected: str) -> None:
        words = [word.replace("_", ":") for word in expected]
        done = subprocess.run([sys.executable, "-c", COMPILE, *words], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        ran = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ran ")]
        assert ran == [[word, *kernel.split()] for word, kernel in zip(words, expected.values(), strict=True)]

    traps = dict(plain_sdpa_math="flash", around_sdpa_flash="")
    process(around_sdpa_math="", **traps, plain_sdpa_flash="flash", plain_flash="flash")
    process(kept_sdpa_math="", kept_sdpa="flash", kept_flash="flash")  # naive: see test_end_to_end.py


def test_the_compile_cache_is_kept_apart_per_attention_config(monkeypatch):
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "")
    monkeypatch.setattr("torch._inductor.fx_passes.fuse_attention._sfdp_init", lambda *_: None)
    tags = set()
    for words in (("naive",), ("flash",), ("sdpa",), ("sdpa", ["math"]), ("flash", None, "FA3")):
        pin_kernel_under_compile(choose(*words))
        tags.add(torch.compiler.config.cache_key_tag)
    assert len(tags) == 5


# From here on a GPU is needed.

HALF = replace(NEED, Tq=128, Tk=128, H=4, G=4, D=64, Dv=64, dtype=torch.bfloat16, device=CUDA)
LOOSE = {"float64": (1e-12, 1e-12), "float32": (1e-4, 1e-4), "bfloat16": (5e-2, 5e-2), "float16": (1e-2, 1e-2)}
ON_CUDA = [name for name, each in BACKENDS.items() if "cuda" in each.on]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    ("config", "resolved"),
    [
        (choose("naive"), "naive"), (choose("flash"), "flash"), (choose("cudnn"), "cudnn"),
        (choose("sdpa", ["efficient"]), "efficient"), (choose("sdpa", ["math"]), "math"),
        (choose("sdpa", ["flash", "cudnn"]), "flash"), (choose("sdpa", ["cudnn", "flash"]), "cudnn"),
    ],
)  # fmt: skip
def test_on_cuda_resolved_is_what_runs_in_bfloat16(config, resolved, compiled):
    assert resolve(config, HALF).resolved == resolved
    attend = get_attention_fn(config)
    if compiled:
        pin_kernel_under_compile(config)
        attend = torch.compile(attend, fullgraph=True)
    qkv = random_qkv(HALF)
    attend(*qkv)
    assert kernels_run(lambda: attend(*qkv).sum().backward()) == {resolved} & set(MARKS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_CUDA)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_on_cuda_each_backend_agrees_or_refuses(name, dtype):
    for Tq, Tk in ((257, 257), (1, 257), (128, 257), (1, 1)):
        for asked in ({}, {"window": 20}, {"document_mask": True}, {"positions": True}, {"G": 2}):
            need = replace(HALF, Tq=Tq, Tk=Tk, dtype=DTYPES[dtype], **asked)
            agree_or_refuse(name, need, seed=3, bounds=LOOSE)


@pytest.mark.gpu
def test_on_cuda_flash_refuses_float32():
    with pytest.raises(UserError, match="dtype=bfloat16"):
        resolve(choose("flash"), replace(HALF, dtype=torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("config", [choose("naive"), choose("flash"), choose("cudnn"), choose("sdpa", ["efficient"])])
def test_on_cuda_dropout_keeps_the_mean(config):
    q, k, v = random_qkv(replace(HALF, grad=False))
    resolve(config, replace(HALF, dropout_p=0.25))
    torch.manual_seed(0)
    attend = get_attention_fn(config)
    mean = torch.stack([attend(q, k, torch.ones_like(v), dropout_p=0.25).float().mean() for _ in range(50)]).mean()
    assert abs(mean - 1) < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("asked", [{}, {"window": 40}, {"document_mask": True}], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.compiles
def test_on_cuda_flex_trains(asked, compiled):
    need = replace(HALF, Tq=300, Tk=300, dtype=torch.float32, **asked)
    assert resolve(choose("flex"), need).resolved == "flex"
    qkv, masks = random_qkv(need), random_masks(need)
    attend = (
        torch.compile(get_attention_fn(choose("flex")), fullgraph=True)
        if compiled
        else get_attention_fn(choose("flex"))
    )
    doubles = [t.detach().double().requires_grad_() for t in qkv]
    y, expected = attend(*qkv, **masks), naive(*doubles, **masks)
    assert (y.double() - expected).abs().max() < 1e-3
    y.sum().backward()
    expected.sum().backward()
    for t, d in zip(qkv, doubles, strict=True):
        assert (t.grad.double() - d.grad).abs().max() < 5e-2


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", ["true", "false"])
@pytest.mark.parametrize("name", ON_CUDA)
def test_on_cuda_a_model_trains_writes_and_is_planned_with_each_backend(train, sample, name, compiled):
    words = [f"attention={name}", "device=cuda", "dtype=bfloat16", f"compile={compiled}", "model.n_embd=64", "name=a"]
    assert train(*words) == 0
    told = json.loads(Path("runs/a/summary.json").read_text())
    assert told["attention"]["resolved"] == name or name == "sdpa"  # which picks
    assert sample("run=a", f"attention={name}", "device=cuda", "dtype=bfloat16", "max_new_tokens=5")
    assert train(*words, "plan=true") == 0


@pytest.mark.gpu
def test_on_cuda_memory_grows_linearly_in_T_with_flash_and_quadratically_with_naive():
    def peak(name: str, T: int) -> int:
        q, k, v = random_qkv(replace(HALF, B=1, Tq=T, Tk=T))
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        BACKENDS[name].attend(q, k, v).sum().backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    for name in ("naive", "flash"):
        peak(name, 256)  # what libraries allocate once
    growth = {name: peak(name, 8192) / peak(name, 2048) for name in ("naive", "flash")}
    assert 3 < growth["flash"] < 6 and 12 < growth["naive"] < 20


@pytest.mark.gpu
def test_on_cuda_layers_that_run_different_kernels_are_all_named():
    from test_model import CONFIG

    config = replace(CONFIG, n_head=4, n_embd=256, block_size=128, window=[32, None])
    answer = resolve_model(
        AttentionConfig("sdpa", ["flash", "efficient"], None), config, B=2, dtype=torch.bfloat16, device=CUDA, grad=True
    )
    assert answer.resolved == "efficient+flash"
