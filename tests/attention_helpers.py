"""Random inputs for attention tests, and the comparison of a backend with the reference."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from common.errors import UserError
from model import AttentionConfig
from model.attention import BACKENDS, AttentionRequest, ResolvedAttention, naive, resolve
from model.attention.support import missing_feature

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
REQUEST = AttentionRequest(
    B=2, Tq=16, Tk=16, H=4, G=2, D=8, Dv=8, dtype=torch.float32, device=CPU, grad=True
)
IS_OLD_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() < (
    8,
    0,
)  # before Ampere
HALF = torch.float16 if IS_OLD_GPU else torch.bfloat16
REQUEST_CUDA = replace(REQUEST, Tq=128, Tk=128, G=4, D=64, Dv=64, dtype=HALF, device=CUDA)

# Errors that rounding explains: (largest error of an output, largest error of a gradient / largest gradient).
BOUNDS = {
    "cpu": {
        "float64": (1e-12, 1e-12),
        "float32": (1e-5, 1e-5),
        "bfloat16": (5e-2, 5e-2),
        "float16": (5e-3, 5e-3),
    },
    "cuda": {
        "float64": (1e-12, 1e-12),
        "float32": (1e-4, 1e-4),
        "bfloat16": (5e-2, 5e-2),
        "float16": (1e-2, 1e-2),
    },
}


def per_device(cpu: list, cuda: list) -> list:
    """Test parameters (device, case) for the CPU and for a GPU."""
    gpu, compiled = pytest.mark.gpu, pytest.mark.compiles
    on_gpu = [
        pytest.param(CUDA, case, marks=[gpu, compiled] if case == "flex" else gpu) for case in cuda
    ]
    return [pytest.param(CPU, case) for case in cpu] + on_gpu


def backends_on(device: str) -> list[str]:
    return [name for name, backend in BACKENDS.items() if device in backend.on]


def choose(name, kernels=None, flash_package=None) -> AttentionConfig:
    """The settings that choose a backend."""
    return AttentionConfig(name, kernels, flash_package)


def resolve_or_skip(config: AttentionConfig, request: AttentionRequest) -> ResolvedAttention:
    """resolve(config, request). GPUs before Ampere lack kernels: there, a refusal by PyTorch skips the test."""
    try:
        return resolve(config, request)
    except UserError as error:
        if IS_OLD_GPU and "cannot run on cuda" in str(error):
            pytest.skip(f"NOT RUN on this GPU: {error}")
        raise


def random_qkv(request: AttentionRequest, seed=0):
    """Random q, k and v with the shapes, dtype and device of a request."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return drawn.to(request.device, request.dtype).requires_grad_(request.grad)

    B, Tq, Tk, G = request.B, request.Tq, request.Tk, request.G
    return draw(B, Tq, request.H, request.D), draw(B, Tk, G, request.D), draw(B, Tk, G, request.Dv)


def random_masks(request: AttentionRequest, seed=0) -> dict:
    """The keyword arguments window, doc_ids, positions and softcap for a request; None where it has none."""
    generator = torch.Generator().manual_seed(seed)
    positions = doc_ids = None
    if request.document_mask:
        doc_ids = (
            torch.randint(0, 4, (request.B, request.Tk), generator=generator).sort(dim=1).values
        )
        doc_ids = doc_ids.to(request.device)
    if request.positions:
        positions = torch.randint(0, request.Tk, (request.B, request.Tq), generator=generator).to(
            request.device
        )
    return {
        "window": request.window,
        "doc_ids": doc_ids,
        "positions": positions,
        "softcap": request.softcap,
    }


def compare_with_naive(name: str, request: AttentionRequest, seed: int, attend=None) -> None:
    """Check that a backend agrees with naive in float64, or that it is refused as the support table requires.

    Compares outputs and, if request.grad, gradients. attend: the function to call; None: the backend's.
    """
    missing = missing_feature(BACKENDS[name], request)
    if missing is not None:
        problem, setting = missing
        with pytest.raises(UserError) as refused:
            resolve(choose(name), request)
        assert f"attention={name}" in str(refused.value) and problem in str(refused.value)
        assert (setting or "attention=naive") in str(refused.value)
        return
    resolve_or_skip(choose(name), request)
    qkv, masks = random_qkv(request, seed), random_masks(request, seed)
    doubles = [t.detach().double().requires_grad_(request.grad) for t in qkv]
    y, expected = (attend or BACKENDS[name].attend)(*qkv, **masks), naive(*doubles, **masks)
    y_bound, gradient_bound = BOUNDS[request.device.type][str(request.dtype).removeprefix("torch.")]
    assert y.dtype == request.dtype
    assert (y.double() - expected).abs().max() < y_bound
    if request.grad:
        weights = torch.randn(
            *y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
        )
        weights = weights.to(request.device)
        actual = torch.autograd.grad((y.double() * weights).sum(), qkv)
        for a, e in zip(
            actual, torch.autograd.grad((expected * weights).sum(), doubles), strict=True
        ):
            assert (a.double() - e).abs().max() < gradient_bound * max(1.0, e.abs().max())


@contextmanager
def restored_compile_settings() -> Iterator[None]:
    """Context manager: undo what pin_kernel_under_compile changes in this process.

    pytest's monkeypatch cannot restore torch.compiler.config: it deletes the entry, and compiling then fails.
    """
    from torch._inductor.fx_passes import fuse_attention

    register_patterns, cache_key_tag = (
        fuse_attention._sfdp_init,
        torch.compiler.config.cache_key_tag,
    )
    try:
        yield
    finally:
        fuse_attention._sfdp_init, torch.compiler.config.cache_key_tag = (
            register_patterns,
            cache_key_tag,
        )
