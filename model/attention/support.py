"""Support table of the attention backends, refusals, and the kernel that a backend runs.

The table has what each backend supports on each device, for example dropout. Checks, messages,
documentation and tests use it. The decorators of the functions in model/attention/backends.py fill
it. The causal mask is attention_mask in that file.

`resolve` goes from settings to a kernel. model/attention/__init__.py has the notation (B, Tq, Tk,
H, G, D, Dv).
"""

import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.overrides import TorchFunctionMode

from common.errors import UserError
from common.settings import format_value, unknown_value
from model.attention.torch_internals import (
    disable_attention_fusion,
    is_triton_available,
    select_sdpa_kernel,
)
from model.config import AttentionConfig, GPTConfig

ALL_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Support:
    """What a backend supports on one type of device: dtypes, and the features that it lacks."""

    dtypes: tuple[str, ...] = ALL_DTYPES
    lacks: tuple[str, ...] = ()  # keys of FEATURES


@dataclass(frozen=True)
class AttentionRequest:
    """Shapes and options of an attention call."""

    B: int
    Tq: int
    Tk: int
    H: int
    G: int
    D: int
    Dv: int
    dtype: torch.dtype
    device: torch.device
    grad: bool  # whether gradients are computed
    dropout_p: float = 0.0
    softcap: float | None = None
    window: int | None = None
    document_mask: bool = False  # whether the call has doc_ids
    positions: bool = False  # whether the call has positions

    def features(self) -> dict[str, bool]:
        """For each key of FEATURES, whether the call uses it."""
        return {
            "training": self.grad,
            "dropout": self.dropout_p > 0,
            "softcaps": self.softcap is not None,
            "GQA": self.G != self.H,
            "windows": self.window is not None,
            "document masks": self.document_mask,
            "arbitrary positions": self.positions or 1 < self.Tq < self.Tk,
            "Dv ≠ D": self.Dv != self.D,
        }


# What a call can need beyond plain causal attention, and the setting that turns it off.
FEATURES = {
    "training": None,
    "dropout": "model.dropout=0",
    "softcaps": "model.attention_softcap=null",
    "GQA": "model.n_kv_head=null",
    "windows": "model.window=null",
    "document masks": "data.document_mask=false",
    "arbitrary positions": "batch_size=1",
    "Dv ≠ D": None,
}


@dataclass(frozen=True)
class Backend:
    """A registered attention backend."""

    name: str
    attend: Callable[..., Tensor]
    # by device type
    on: dict[str, Support]
    # allowed values of attention.flash_package, which replace the kernel on CUDA
    packages: dict[str, Support] = field(default_factory=dict)
    # allowed values of attention.kernels
    kernels: tuple[str, ...] = ()
    # whether it calls scaled_dot_product_attention, which selects a kernel
    uses_sdpa: bool = False
    # whether it needs torch.compile's compiler
    needs_compiler: bool = False
    # the setting whose value is the name
    key: str = "attention"


@dataclass(frozen=True, kw_only=True)
class AttentionType(Backend):
    """Attention that computes something else than softmax attention, and has one implementation."""

    scores: Callable[..., Tensor]  # the logarithms of the weights, as attention_scores
    # (D, T): keys per query with which softmax attention takes as many FLOPs
    count_keys: Callable[[int, int], int]


BACKENDS: dict[str, Backend] = {}  # of softmax attention, by name
NON_SOFTMAX: dict[str, AttentionType] = {}  # by model.attention_type


def backend(on: dict[str, Support], **options):
    """Decorator: register a function as `attention=NAME`. options: fields of Backend."""

    def register(attend: FunctionType) -> FunctionType:
        name = attend.__name__
        BACKENDS[name] = Backend(name, attend, on, **options)
        return attend

    return register


def missing_feature(
    chosen: Backend, request: AttentionRequest, package: str | None = None
) -> tuple[str, str | None] | None:
    """Find why a backend cannot run a request, and the setting that avoids the problem.

    package: value of attention.flash_package.
    Returns None if the backend can run the request.
    """
    subject = f"{chosen.key}={chosen.name}"
    supports = chosen.on
    if package is not None:
        subject += f" with attention.flash_package={package}"
        supports = {"cuda": chosen.packages[package]}
    device = request.device.type
    if device not in supports:
        return f"{subject} does not run on {device}", f"device={' or '.join(supports)}"
    subject += f" on {device}"
    support = supports[device]
    for feature, is_used in request.features().items():
        if is_used and feature in support.lacks:
            return f"{subject} does not support {feature}", FEATURES[feature]
    dtype = str(request.dtype).removeprefix("torch.")
    if dtype not in support.dtypes:
        return f"{subject} does not support {dtype}", f"dtype={support.dtypes[0]}"
    return None


def suggest_settings(
    refused: Backend, request: AttentionRequest, setting: str | None = None
) -> str:
    """Advice for a message: the setting, and the other backends that support the request.

    For example, "set model.dropout=0, or attention=naive or sdpa".
    """
    suggestions = [] if setting is None else [setting]
    if refused.name in NON_SOFTMAX:
        suggestions.append("model.attention_type=softmax")
    else:
        names = [
            name
            for name, other in BACKENDS.items()
            if other is not refused and missing_feature(other, request) is None
        ]
        if names:
            suggestions.append(f"attention={' or '.join(names)}")
    return "set " + ", or ".join(suggestions)


@dataclass(frozen=True)
class ResolvedAttention:
    """The requested backend and the kernel that it runs. summary.json stores it as "attention"."""

    requested: str  # the setting attention.backend
    # naive, math, flash, efficient, cudnn, flex or linear; joined with "+" if layers differ
    resolved: str
    flash_package: str | None = None

    def __str__(self) -> str:
        return f"{self.requested} -> {self.resolved}"


def _find_backend(config: AttentionConfig) -> Backend:
    """The backend of `config`.

    Raises UserError for an unknown backend, and for settings that the backend does not have.
    """
    backends = BACKENDS | NON_SOFTMAX
    if config.backend not in backends:
        raise unknown_value("attention.backend", config.backend, ["auto", *BACKENDS])
    chosen = backends[config.backend]
    if config.kernels is not None and not set(config.kernels) <= set(chosen.kernels):
        choices = ["null", *(f"[{kernel}]" for kernel in chosen.kernels)]
        raise UserError(
            f"attention={chosen.name} has no attention.kernels={format_value(config.kernels)}; "
            f"set {' or '.join(choices)}"
        )
    if config.flash_package is not None and config.flash_package not in chosen.packages:
        raise UserError(
            f"attention={chosen.name} has no attention.flash_package={config.flash_package}; "
            f"set {' or '.join(['null', *chosen.packages])}"
        )
    return chosen


def all_variants() -> dict[str, AttentionConfig]:
    """The settings of all variants, by name.

    For example "naive", "sdpa:math" (a kernel), "flash:FA3" (a package) and "linear" (a type).
    """
    variants = {name: AttentionConfig(name) for name in [*BACKENDS, *NON_SOFTMAX]}
    for name, chosen in BACKENDS.items():
        for kernel in chosen.kernels:
            variants[f"{name}:{kernel}"] = AttentionConfig(name, kernels=[kernel])
        for package in chosen.packages:
            variants[f"{name}:{package}"] = AttentionConfig(name, flash_package=package)
    return variants


def get_attention_fn(config: AttentionConfig) -> Callable[..., Tensor]:
    """The `attend` function of the settings. Raises UserError for unknown settings."""
    attend = _find_backend(config).attend
    if config.kernels is None:
        return attend
    return partial(attend, kernels=tuple(config.kernels))


def choose_backend(config: AttentionConfig, request: AttentionRequest) -> AttentionConfig:
    """Replace the backend auto by the fastest one that supports the request.

    The rule comes from measurements (docs/experiments/attention-backends.md). Nothing is timed at
    start, so that a run always computes with the same kernel.
    """
    if config.backend != "auto":
        return config
    # PyTorch's flash kernel for CPUs is slow in bfloat16
    is_slow = request.device.type == "cpu" and request.dtype == torch.bfloat16 and request.Tk <= 256
    name = "sdpa"
    if config.flash_package is not None:
        name = "flash"  # no other backend has packages
    elif config.kernels is None and (is_slow or missing_feature(BACKENDS["sdpa"], request)):
        name = "naive"  # supports everything, and has no kernels to choose from
    return replace(config, backend=name)


def resolve(config: AttentionConfig, request: AttentionRequest) -> ResolvedAttention:
    """Find the kernel that `config` runs for this request, without running it.

    Raises UserError if the support table or PyTorch rejects the request. The message has the
    setting to change, and PyTorch's reasons.
    """
    chosen = _find_backend(config)
    missing = missing_feature(chosen, request, config.flash_package)
    if missing is not None:
        problem, setting = missing
        raise UserError(f"{problem}; {suggest_settings(chosen, request, setting)}")
    _activate_flash_package(config.flash_package)
    kernel = chosen.name
    if chosen.uses_sdpa:
        kernel = _find_sdpa_kernel(config, request)
    elif chosen.needs_compiler and missing_compiler(request.device) is not None:
        raise UserError(
            f"attention={chosen.name} needs {missing_compiler(request.device)}; "
            f"install it, or {suggest_settings(chosen, request)}"
        )
    return ResolvedAttention(chosen.name, kernel, config.flash_package)


class _KernelProbe(TorchFunctionMode):
    """Context manager: scaled_dot_product_attention computes nothing, and records its kernel."""

    kernel: SDPBackend | None = None

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self.kernel = select_sdpa_kernel(*args, **kwargs)
        return args[0]


def _find_sdpa_kernel(config: AttentionConfig, request: AttentionRequest) -> str:
    """Name of the kernel that PyTorch selects for tensors with the shapes of the request.

    Raises UserError with PyTorch's reasons if no kernel can run.
    """
    options = {"dtype": request.dtype, "device": request.device, "requires_grad": request.grad}
    q = torch.empty(request.B, request.Tq, request.H, request.D, **options)
    k = torch.empty(request.B, request.Tk, request.G, request.D, **options)
    v = torch.empty(request.B, request.Tk, request.G, request.Dv, **options)
    indices = {"dtype": torch.int64, "device": request.device}
    positions = torch.zeros(request.B, request.Tq, **indices) if request.positions else None
    doc_ids = torch.zeros(request.B, request.Tk, **indices) if request.document_mask else None
    attend = get_attention_fn(config)
    with warnings.catch_warnings(record=True) as caught, _KernelProbe() as probe:
        warnings.simplefilter("always")
        try:
            attend(
                q,
                k,
                v,
                window=request.window,
                positions=positions,
                doc_ids=doc_ids,
                dropout_p=request.dropout_p,
                softcap=request.softcap,
            )
        except RuntimeError as error:
            reason = _kernel_warnings(caught) or str(error).partition("\n")[0].strip()
            setting = None if config.kernels is None else "attention.kernels=null"
            raise UserError(
                f"attention={config.backend} cannot run on {request.device.type} ({reason}); "
                f"{suggest_settings(BACKENDS[config.backend], request, setting)}"
            ) from None
    return probe.kernel.name.removesuffix("_ATTENTION").lower()  # a key of KERNELS


def _kernel_warnings(caught: list[warnings.WarningMessage]) -> str:
    """PyTorch's reasons for rejecting the kernels that were requested, without headings."""
    lines = [str(warning.message).split(" (Triggered")[0].strip() for warning in caught]
    return " ".join(
        line for line in lines if not line.endswith("because:") and "runtime disabled" not in line
    )


def resolve_model(
    config: AttentionConfig,
    model: GPTConfig,
    *,
    B: int,
    Tq: int | None = None,
    grad: bool,
    **options: Any,
) -> tuple[Callable[..., Tensor], ResolvedAttention]:
    """Resolve the attention of all layers of a model, for B sequences of block_size tokens.

    Tq: number of queries, which are the last tokens. By default all tokens.
    grad: whether the model is trained, with its dropout.
    options: dtype, device, document_mask and positions (fields of AttentionRequest).
    Returns the model's function `attend`, and the kernel that it runs.
    """
    if config.backend in NON_SOFTMAX:
        raise UserError(
            f"attention.backend={config.backend} changes the model; "
            f"set model.attention_type={config.backend} instead"
        )
    request = AttentionRequest(
        B=B,
        Tq=Tq or model.block_size,
        Tk=model.block_size,
        H=model.n_head,
        G=model.kv_heads,
        D=model.head_dim,
        Dv=model.head_dim,
        grad=grad,
        dropout_p=model.dropout if grad else 0.0,
        softcap=model.attention_softcap,
        **options,
    )
    chosen = choose_backend(config, request)
    kernels = []
    layers = zip(model.attention_types, model.windows, strict=True)
    for attention_type, window in dict.fromkeys(layers):  # each kind of layer once
        layer_config = chosen
        layer_request = replace(request, window=window)
        if attention_type != "softmax":
            layer_config = AttentionConfig(attention_type)
            layer_request = replace(layer_request, softcap=None)  # there are no scores to bound
        kernels.append(resolve(layer_config, layer_request).resolved)
    resolved = "+".join(dict.fromkeys(kernels))
    record = ResolvedAttention(config.backend, resolved, config.flash_package)
    return get_attention_fn(chosen), record


def pin_kernel_under_compile(config: AttentionConfig) -> None:
    """Make torch.compile run the resolved kernel, in this process. Call this before compiling.

    Without this call, Inductor replaces the math kernel with a fused one. All processes share the
    compile cache, and the kernel is not always part of the cache key. Therefore the settings are
    added to the key.
    """
    disable_attention_fusion()
    torch.compiler.config.cache_key_tag = str(config)


def _activate_flash_package(package: str | None) -> None:
    """Use a package's flash kernel instead of PyTorch's in this process. None restores PyTorch's.

    Raises UserError if the package cannot be used.
    """
    if package == current_flash_attention_impl():
        return
    try:
        if package is None:
            restore_flash_attention_impl()
        else:
            activate_flash_attention_impl(package)
    except Exception as error:  # a third-party package may raise anything
        raise UserError(
            f"attention.flash_package={package} cannot be used ({error}); "
            "install it, or set attention.flash_package=null"
        ) from None


def missing_compiler(device: torch.device) -> str | None:
    """Name of the compiler that torch.compile needs on this device, if it is not installed."""
    if device.type == "cuda":
        return None if is_triton_available() else "Triton"
    compiler = os.environ.get("CXX", "g++")
    return None if shutil.which(compiler) else f"a C++ compiler ({compiler})"
