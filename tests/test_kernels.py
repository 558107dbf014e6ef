"""The label against the kernel that ran: eager, compiled, and with a compile cache that another backend left behind."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from conftest import ROOT
from test_attention import DTYPES, NEED, agree_or_refuse, choose, random_masks, random_qkv

from errors import UserError
from model import AttentionConfig
from model.attention import BACKENDS, bind, flash, keep_when_compiled, naive, resolve, resolve_model, sdpa

CUDA = torch.device("cuda")
# Of PyTorch's kernels, the name of an operation that nothing else runs, by the name that we say.
MARKS = {
    "flash": ("_flash_attention_for_cpu", "_scaled_dot_product_flash_attention"),
    "efficient": ("_scaled_dot_product_efficient_attention",),
    "cudnn": ("_scaled_dot_product_cudnn_attention",),
}


def kernels_run(run) -> set[str]:
    """Which of PyTorch's fused kernels `run()` ran, by the profiler."""
    with torch.profiler.profile() as profiler:
        run()
    events = {event.key for event in profiler.key_averages()}
    return {name for name, marks in MARKS.items() if any(mark in event for mark in marks for event in events)}


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
    (choose("sdpa"), {"window": 3, "documents": True}, "flash"), (choose("sdpa"), {"Tq": 1}, "flash"),
    (choose("flash"), {}, "flash"), (choose("flash"), {"dtype": torch.bfloat16}, "flash"),
    (choose("flash"), {"grad": False}, "flash"), (choose("flash"), {"positions": True, "Tq": 3}, "flash"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "changed", "resolved"), CASES)
def test_resolved_is_what_runs(config, changed, resolved):
    need = replace(NEED, **changed)
    answer = resolve(config, need)
    assert (answer.requested, answer.resolved, answer.impl) == (config.backend, resolved, None)
    attend, qkv, masks = bind(config), random_qkv(need), random_masks(need)
    assert kernels_run(lambda: attend(*qkv, **masks, dropout_p=need.dropout_p)) == {resolved} & set(MARKS)


COMPILE = """
import sys, torch, torch.nn.functional as F
from torch.nn.attention import sdpa_kernel
from test_kernels import kernels_run
from model import AttentionConfig
from model.attention import bind, keep_when_compiled
from model.attention.backends import KERNELS

qkv = [torch.randn(1, 64, 4, 16) for _ in range(3)]
for word in sys.argv[1:]:
    what, _, name = word.partition(":")
    config = AttentionConfig(name, None, None) if what == "named" else AttentionConfig("sdpa", [name], None)
    if what == "keep":
        torch._dynamo.reset()
        keep_when_compiled(config)
        continue
    if what == "outside":
        attend = torch.compile(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
        with sdpa_kernel(KERNELS[name]):
            attend(*qkv)
    else:
        attend = torch.compile(bind(config), fullgraph=True)
        attend(*qkv)
    print("ran", word, *kernels_run(lambda: attend(*qkv)))
"""


@pytest.mark.compiles
def test_compiled_the_kernel_that_was_resolved_runs_whatever_the_compile_cache_holds(tmp_path):
    """Three processes with one compile cache, and two ways in which a label would lie.

    A kernel that is chosen around a compiled function is no part of the cache's key: the process that wants flash is
    given the math of the one before. And Inductor rewrites PyTorch's math into flash. Both happen below where our
    guards are left out (`outside`, and without `keep`), so that this test would notice if they were taken out of the
    code. Should one of these two lines fail, PyTorch has mended it, and a guard can go.
    """
    environment = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}",
    }  # fmt: skip

    def process(*words: str) -> dict[str, list[str]]:
        done = subprocess.run([sys.executable, "-c", COMPILE, *words], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith("ran ")]
        return {word: ran for _, word, *ran in lines}

    assert process("outside:math", "ours:math") == {"outside:math": [], "ours:math": ["flash"]}  # the second trap
    wanted = {"outside:flash": [], "ours:flash": ["flash"], "named:flash": ["flash"]}  # the first: "outside" ran math
    assert process("outside:flash", "ours:flash", "named:flash") == wanted
    wanted = {"ours:math": [], "named:naive": [], "ours:flash": ["flash"]}
    assert process("keep:math", "ours:math", "keep:naive", "named:naive", "keep:flash", "ours:flash") == wanted


def test_the_compile_cache_is_kept_apart_per_attention_config(monkeypatch):
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "")
    tags = set()
    for words in (("naive",), ("flash",), ("sdpa",), ("sdpa", ["math"]), ("flash", None, "FA3")):
        keep_when_compiled(choose(*words))
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
    attend = bind(config)
    attend = torch.compile(attend, fullgraph=True) if compiled else attend
    qkv = random_qkv(HALF)
    attend(*qkv)
    assert kernels_run(lambda: attend(*qkv).sum().backward()) == {resolved} & set(MARKS)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_CUDA)
@pytest.mark.parametrize("dtype", list(DTYPES))
def test_on_cuda_each_backend_agrees_or_refuses(name, dtype):
    for Tq in (257, 1, 128):
        for asked in ({}, {"window": 20}, {"documents": True}, {"positions": True}, {"G": 2}):
            need = replace(HALF, Tq=Tq, Tk=257, dtype=DTYPES[dtype], **asked)
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
    attend = bind(config)
    mean = torch.stack([attend(q, k, torch.ones_like(v), dropout_p=0.25).float().mean() for _ in range(50)]).mean()
    assert abs(mean - 1) < 0.03


@pytest.mark.gpu
@pytest.mark.parametrize("asked", [{}, {"window": 40}, {"documents": True}], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.compiles
def test_on_cuda_flex_trains(asked, compiled):
    need = replace(HALF, Tq=300, Tk=300, dtype=torch.float32, **asked)
    assert resolve(choose("flex"), need).resolved == "flex"
    qkv, masks = random_qkv(need), random_masks(need)
    attend = torch.compile(bind(choose("flex")), fullgraph=True) if compiled else bind(choose("flex"))
    doubles = [t.detach().double().requires_grad_() for t in qkv]
    y, expected = attend(*qkv, **masks), naive(*doubles, **masks)
    assert (y.double() - expected).abs().max() < 5e-3  # Triton multiplies in TF32
    y.sum().backward()
    expected.sum().backward()
    for t, d in zip(qkv, doubles, strict=True):
        assert (t.grad.double() - d.grad).abs().max() < 5e-2


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
