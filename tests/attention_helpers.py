"""Random inputs for attention tests, and the comparison of a backend with the reference."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from common.errors import UserError
from model import AttentionConfig
from model.attention import BACKENDS, AttentionRequest, ResolvedAttention, naive, resolve
from model.attention.support import missing_feature

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
REQUEST = AttentionRequest(
    B=2, Tq=16, Tk=16, H=4, G=2, D=8, Dv=8, dtype=torch.float32, device=CPU, grad=True
)
IS_OLD_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 8  # not Ampere
HALF = torch.float16 if IS_OLD_GPU else torch.bfloat16
REQUEST_CUDA = replace(REQUEST, Tq=128, Tk=128, G=4, D=64, Dv=64, dtype=HALF, device=CUDA)

# Largest errors that rounding explains: of an output, and of a gradient / the largest gradient.
BOUNDS = {
    "cpu": {"float64": 1e-12, "float32": 1e-5, "bfloat16": 5e-2, "float16": 5e-3},
    "cuda": {"float64": 1e-12, "float32": 1e-4, "bfloat16": 5e-2, "float16": 1e-2},
}


def per_device(cpu: list, cuda: list) -> list:
    """Test parameters (device, case) for the CPU and for a GPU."""
    parameters = [pytest.param(CPU, case) for case in cpu]
    for case in cuda:
        marks = [pytest.mark.gpu]
        if case == "flex":
            marks.append(pytest.mark.compiles)
        parameters.append(pytest.param(CUDA, case, marks=marks))
    return parameters


def backends_on(device: str) -> list[str]:
    return [name for name, backend in BACKENDS.items() if device in backend.on]


def choose(name, kernels=None, flash_package=None) -> AttentionConfig:
    """The settings that choose a backend."""
    return AttentionConfig(name, kernels, flash_package)


def resolve_or_skip(config: AttentionConfig, request: AttentionRequest) -> ResolvedAttention:
    """resolve(config, request). GPUs before Ampere lack kernels: there, a refusal is a skip."""
    try:
        return resolve(config, request)
    except UserError as error:
        if IS_OLD_GPU and "cannot run on cuda" in str(error):
            pytest.skip(f"NOT RUN on this GPU: {error}")
        raise


def random_qkv(request: AttentionRequest, seed=0):
    """Random q, k and v with the shapes, dtype and device of a request."""
    generator = torch.Generator().manual_seed(seed)

    def draw(T, heads, head_dim):
        x = torch.randn(request.B, T, heads, head_dim, generator=generator, dtype=torch.float64)
        return x.to(request.device, request.dtype).requires_grad_(request.grad)

    q = draw(request.Tq, request.H, request.D)
    k = draw(request.Tk, request.G, request.D)
    v = draw(request.Tk, request.G, request.Dv)
    return q, k, v


def random_masks(request: AttentionRequest, seed=0) -> dict:
    """The arguments window, doc_ids, positions and softcap of a request; None where it has none."""
    generator = torch.Generator().manual_seed(seed)
    B, Tq, Tk = request.B, request.Tq, request.Tk
    doc_ids = None
    if request.document_mask:
        doc_ids = torch.randint(0, 4, (B, Tk), generator=generator).sort(dim=1).values
        doc_ids = doc_ids.to(request.device)
    positions = None
    if request.positions:
        positions = torch.randint(0, Tk, (B, Tq), generator=generator).to(request.device)
    return {
        "window": request.window,
        "doc_ids": doc_ids,
        "positions": positions,
        "softcap": request.softcap,
    }


def compare_with_naive(name: str, request: AttentionRequest, seed: int) -> None:
    """Check that a backend agrees with naive, or is refused where the support table says so."""
    missing = missing_feature(BACKENDS[name], request)
    if missing is None:
        resolve_or_skip(choose(name), request)
        check_agreement(BACKENDS[name].attend, request, seed)
    else:
        check_refusal(name, request, *missing)


def check_refusal(name: str, request: AttentionRequest, problem: str, setting: str | None) -> None:
    with pytest.raises(UserError) as refused:
        resolve(choose(name), request)
    assert problem in str(refused.value)
    assert (setting or "attention=naive") in str(refused.value)


def check_agreement(attend: Callable, request: AttentionRequest, seed: int) -> None:
    """Compare outputs and, if request.grad, gradients with those of naive in float64."""
    qkv = random_qkv(request, seed)
    masks = random_masks(request, seed)
    doubles = [x.detach().double().requires_grad_(request.grad) for x in qkv]
    y = attend(*qkv, **masks)
    expected = naive(*doubles, **masks)
    bound = BOUNDS[request.device.type][str(request.dtype).removeprefix("torch.")]
    assert y.dtype == request.dtype
    assert (y.double() - expected).abs().max() < bound
    if not request.grad:
        return
    generator = torch.Generator().manual_seed(seed)
    dy = torch.randn(y.shape, generator=generator, dtype=torch.float64).to(request.device)
    gradients = torch.autograd.grad((y.double() * dy).sum(), qkv)
    expected_gradients = torch.autograd.grad((expected * dy).sum(), doubles)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        assert (ours.double() - theirs).abs().max() < bound * max(1.0, theirs.abs().max())


@contextmanager
def restored_compile_settings() -> Iterator[None]:
    """Context manager: undo what pin_kernel_under_compile changes in this process.

    pytest's monkeypatch cannot restore torch.compiler.config: it deletes the entry, and compiling
    then fails.
    """
    from torch._inductor.fx_passes import fuse_attention

    register_patterns = fuse_attention._sfdp_init
    cache_key_tag = torch.compiler.config.cache_key_tag
    try:
        yield
    finally:
        fuse_attention._sfdp_init = register_patterns
        torch.compiler.config.cache_key_tag = cache_key_tag
