"""Resolve the attention settings: check them, get the backend's function, and find which kernel it will run."""

import os
import shutil
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from common.errors import UserError
from common.settings import format_value
from model.attention.backends import KERNELS
from model.attention.support import (
    BACKENDS,
    NON_SOFTMAX,
    AttentionRequest,
    Backend,
    check_support,
    suggest_backends,
)
from model.attention.torch_internals import (
    disable_attention_fusion,
    is_triton_available,
    select_sdpa_kernel,
)
from model.config import AttentionConfig, GPTConfig


@dataclass(frozen=True)
class ResolvedAttention:
    """The requested backend and the kernel that it runs. summary.json stores it as "attention"."""

    requested: str
    resolved: str  # naive, math, flash, efficient, cudnn, flex or linear; joined with "+" if layers differ
    flash_package: str | None = None


def _find_backend(config: AttentionConfig) -> Backend:
    """The backend of `config`. Raises UserError for unknown settings, and for settings of other backends."""
    if config.backend not in BACKENDS | NON_SOFTMAX:
        raise UserError(
            f"attention.backend={config.backend} is unknown; set one of {', '.join(BACKENDS)}"
        )
    chosen = (BACKENDS | NON_SOFTMAX)[config.backend]
    if config.kernels is not None and (
        not config.kernels or not set(config.kernels) <= set(chosen.kernels)
    ):
        given = f"attention.kernels={format_value(config.kernels)}"
        choices = f"null or a list of {', '.join(chosen.kernels)}" if chosen.kernels else "null"
        raise UserError(f"attention={chosen.name} has no {given}; set attention.kernels={choices}")
    if config.flash_package is not None and config.flash_package not in chosen.packages:
        choices = " or ".join(["null", *chosen.packages])
        raise UserError(
            f"attention={chosen.name} has no attention.flash_package={config.flash_package}; set {choices}"
        )
    return chosen


def all_variants() -> dict[str, AttentionConfig]:
    """The settings of all variants, by name: "naive", "sdpa:math" (kernel), "flash:FA3" (package), "linear" (type)."""
    variants = {}
    for name, chosen in BACKENDS.items():
        variants[name] = AttentionConfig(name)
        variants |= {
            f"{name}:{kernel}": AttentionConfig(name, kernels=[kernel]) for kernel in chosen.kernels
        }
        variants |= {
            f"{name}:{package}": AttentionConfig(name, flash_package=package)
            for package in chosen.packages
        }
    return variants | {name: AttentionConfig(name) for name in NON_SOFTMAX}


def get_attention_fn(config: AttentionConfig) -> Callable[..., Tensor]:
    """The `attend` function of the settings. Raises UserError for unknown settings."""
    chosen = _find_backend(config)
    return (
        chosen.attend
        if config.kernels is None
        else partial(chosen.attend, kernels=tuple(config.kernels))
    )


class _KernelProbe(TorchFunctionMode):
    """Context manager: scaled_dot_product_attention computes nothing, and only records the kernel that it would run."""

    kernel: SDPBackend | None = None

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self.kernel = select_sdpa_kernel(*args, **kwargs)
        return args[0]


def resolve(config: AttentionConfig, request: AttentionRequest) -> ResolvedAttention:
    """Find the kernel that `config` runs for this request, without running it.

    Raises UserError if the support table or PyTorch rejects the request. The message has the setting to change, and
    PyTorch's reasons.
    """
    chosen = _find_backend(config)
    check_support(chosen, request, config.flash_package)
    if chosen.needs_compiler and (compiler := missing_compiler(request.device)):
        advice = suggest_backends(chosen, request)
        raise UserError(f"attention={chosen.name} needs {compiler}; install it, or {advice}")
    _activate_flash_package(config.flash_package)
    r = request
    # A kernel that is compiled for large heads may need more shared memory than the GPU has: compile it here.
    is_large = chosen.needs_compiler and r.device.type == "cuda" and r.D * r.dtype.itemsize > 128
    if not (chosen.uses_sdpa or is_large):
        return ResolvedAttention(chosen.name, chosen.name)

    options = {"dtype": r.dtype, "device": r.device, "requires_grad": r.grad}
    q = torch.empty(r.B, r.Tq, r.H, r.D, **options)
    k, v = torch.empty(r.B, r.Tk, r.G, r.D, **options), torch.empty(r.B, r.Tk, r.G, r.Dv, **options)
    positions = torch.zeros(r.B, r.Tq, dtype=torch.int64, device=r.device) if r.positions else None
    doc_ids = (
        torch.zeros(r.B, r.Tk, dtype=torch.int64, device=r.device) if r.document_mask else None
    )
    attend = get_attention_fn(config)
    probe = _KernelProbe()
    with (
        warnings.catch_warnings(record=True) as caught,
        probe if chosen.uses_sdpa else nullcontext(),
    ):
        warnings.simplefilter("always")
        try:
            mask = {"window": r.window, "positions": positions, "doc_ids": doc_ids}
            y = attend(q, k, v, **mask, dropout_p=r.dropout_p, softcap=r.softcap)
            if is_large and r.grad:
                y.sum().backward()
        except RuntimeError as error:
            reason = (chosen.uses_sdpa and _kernel_warnings(caught)) or str(error).partition("\n")[
                0
            ].strip()
            given, advice = f"attention={chosen.name}", suggest_backends(chosen, r)
            if config.kernels:
                given, advice = (
                    f"attention.kernels={format_value(config.kernels)}",
                    "set attention.kernels=null",
                )
            raise UserError(f"{given} cannot run on {r.device.type} ({reason}); {advice}") from None
    names = {kernel: name for name, kernel in KERNELS.items()} | {
        None: chosen.name
    }  # it may call no PyTorch kernel
    return ResolvedAttention(chosen.name, names[probe.kernel], config.flash_package)


def resolve_model(
    config: AttentionConfig,
    model: GPTConfig,
    *,
    B: int,
    Tq: int | None = None,
    grad: bool,
    **options: Any,
) -> ResolvedAttention:
    """Resolve the attention of all layers of a model, for B sequences of block_size tokens.

    Tq: number of queries, which are the last tokens. By default all tokens.
    grad: whether the model is trained, with its dropout.
    options: dtype, device and mask (fields of AttentionRequest).
    """
    if config.backend in NON_SOFTMAX:
        raise UserError(
            f"attention.backend={config.backend} changes the model; set model.attention_type={config.backend} instead"
        )
    T, D = model.block_size, model.head_dim
    shape = {
        "B": B,
        "Tq": Tq or T,
        "Tk": T,
        "H": model.n_head,
        "G": model.kv_heads,
        "D": D,
        "Dv": D,
    }
    shape["softcap"] = model.attention_softcap
    request = AttentionRequest(
        **shape, grad=grad, dropout_p=model.dropout if grad else 0.0, **options
    )
    kernels = {}
    for attention_type, window in dict.fromkeys(
        zip(model.attention_types, model.windows, strict=True)
    ):
        layer_config, layer_request = config, replace(request, window=window)
        if attention_type != "softmax":
            layer_config, layer_request = (
                AttentionConfig(attention_type),
                replace(layer_request, softcap=None),
            )
        if attention_type == "linear":  # decodes with a state, which needs no positions
            layer_request = replace(layer_request, Tq=T, positions=False)
        kernels[resolve(layer_config, layer_request).resolved] = None
    return ResolvedAttention(_find_backend(config).name, "+".join(kernels), config.flash_package)


def pin_kernel_under_compile(config: AttentionConfig) -> None:
    """Make torch.compile run the resolved kernel, in this process. Call this before compiling.

    Without this call, Inductor replaces the math kernel with a fused one. All processes share the compile cache, and
    the kernel is not always part of the cache key. Therefore the settings are added to the key.
    """
    disable_attention_fusion()
    torch.compiler.config.cache_key_tag = str(config)


_active_package: str | None = None


def _activate_flash_package(package: str | None) -> None:
    """Use a package's flash kernel instead of PyTorch's in this process. None restores it. Raises UserError."""
    global _active_package
    if package == _active_package:
        return
    try:
        if package is None:
            torch.nn.attention.restore_flash_attention_impl()
        else:
            torch.nn.attention.activate_flash_attention_impl(package)
        _active_package = package
    except Exception as error:  # a third-party package may raise anything
        setting = "attention.flash_package"
        raise UserError(
            f"{setting}={package} cannot be used ({error}); install it, or set {setting}=null"
        ) from None


def _kernel_warnings(caught: list[warnings.WarningMessage]) -> str:
    """PyTorch's reasons for rejecting kernels, without headings, and without kernels that were not requested."""
    lines = [str(warning.message).split(" (Triggered")[0].strip() for warning in caught]
    return " ".join(
        line for line in lines if not line.endswith("because:") and "runtime disabled" not in line
    )


def missing_compiler(device: torch.device) -> str | None:
    """Name of the compiler that torch.compile needs on this device, if it is not installed."""
    if device.type == "cuda":
        return None if is_triton_available() else "Triton"
    compilers = (os.environ.get("CXX", "c++"), "g++", "clang++")
    return None if any(shutil.which(compiler) for compiler in compilers) else "a C++ compiler (g++)"
