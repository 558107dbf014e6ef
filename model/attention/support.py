"""The support table: what each attention backend supports. Checks, messages, documentation and tests use this table.

The decorators of the functions in model/attention/backends.py fill the table.

model/attention/__init__.py has the notation (B, Tq, Tk, H, G, D, Dv).
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from types import FunctionType

import torch
from torch import Tensor

from common.errors import UserError

ALL_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Support:
    """What a backend supports on one type of device. The boolean fields are the keys of FEATURES."""

    dtypes: tuple[str, ...] = ALL_DTYPES
    gradients: bool = True
    dropout: bool = True
    softcap: bool = True
    gqa: bool = True
    window: bool = True
    document_mask: bool = True
    positions: bool = True
    different_value_dim: bool = True
    head_dims: tuple[int, float] = (1, inf)  # smallest, largest


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


@dataclass(frozen=True)
class Feature:
    """A feature that not every backend supports, such as dropout."""

    title: str  # of the column in the support table
    is_requested: Callable[[AttentionRequest], bool]
    problem: str  # the message if a backend lacks the feature
    setting: str | None = None  # the setting that turns the feature off


FEATURES = {
    "gradients": Feature("training", lambda r: r.grad, "cannot train: it has no gradients"),
    "dropout": Feature(
        "dropout", lambda r: r.dropout_p > 0, "does not support dropout", "model.dropout=0"
    ),
    "softcap": Feature(
        "softcap",
        lambda r: r.softcap is not None,
        "does not support softcaps",
        "model.attention_softcap=null",
    ),
    "gqa": Feature(
        "GQA",
        lambda r: r.G != r.H,
        "does not support shared key/value heads",
        "model.n_kv_head=null",
    ),
    "window": Feature(
        "window", lambda r: r.window is not None, "does not support windows", "model.window=null"
    ),
    "document_mask": Feature(
        "document mask",
        lambda r: r.document_mask,
        "does not support document masks",
        "data.document_mask=false",
    ),
    "positions": Feature(
        "positions",
        lambda r: r.positions or 1 < r.Tq < r.Tk,
        "does not support queries at arbitrary positions",
        "batch_size=1",
    ),
    "different_value_dim": Feature(
        "Dv ≠ D",
        lambda r: r.Dv != r.D,
        "does not support values whose head dimension differs from that of queries and keys",
    ),
}


@dataclass(frozen=True)
class Backend:
    """A registered attention backend."""

    name: str
    attend: Callable[..., Tensor]
    on: dict[
        str, Support
    ]  # by device type, or by device type and attention.flash_package, as in "cuda FA3"
    uses_sdpa: bool = False  # whether it calls scaled_dot_product_attention, which selects a kernel
    kernels: tuple[str, ...] = ()  # allowed values of attention.kernels
    needs_compiler: bool = False  # whether it needs torch.compile's compiler
    attention_type: str = (
        "softmax"  # value of model.attention_type that computes the same as this backend
    )

    @property
    def setting(self) -> str:
        """The setting that selects this function."""
        return (
            f"attention={self.name}"
            if self.attention_type == "softmax"
            else f"model.attention_type={self.name}"
        )

    @property
    def packages(self) -> list[str]:
        """Allowed values of attention.flash_package."""
        return [device.split()[1] for device in self.on if " " in device]


BACKENDS: dict[str, Backend] = {}  # of softmax attention, by name
NON_SOFTMAX: dict[
    str, Backend
] = {}  # functions that compute something else, by the value of model.attention_type


def backend(on: dict[str, Support], attention_type: str = "softmax", **options):
    """Decorator: register a function as `attention=NAME`, or as a type of attention. options: fields of Backend."""

    def register(attend: FunctionType) -> FunctionType:
        name, registry = (
            (attend.__name__, BACKENDS)
            if attention_type == "softmax"
            else (attention_type, NON_SOFTMAX)
        )
        registry[name] = Backend(name, attend, on, attention_type=attention_type, **options)
        return attend

    return register


def missing_feature(
    chosen: Backend, request: AttentionRequest, package: str | None = None
) -> tuple[str, str | None] | None:
    """Find why a backend cannot run a request, and the setting that avoids the problem. None if it can run."""
    device, dtype = request.device.type, str(request.dtype).removeprefix("torch.")
    support = chosen.on.get(f"{device} {package}" if package else device)
    if support is None:
        devices = dict.fromkeys(key.split()[0] for key in chosen.on if key.endswith(package or ""))
        return f"does not run on {device}", f"device={' or '.join(devices)}"
    for key, feature in FEATURES.items():
        if feature.is_requested(request) and not getattr(support, key):
            return feature.problem, feature.setting
    if dtype not in support.dtypes:
        return f"does not support {dtype}", f"dtype={support.dtypes[0]}"
    smallest, largest = support.head_dims
    for head_dim in (request.D, request.Dv):
        if head_dim > largest:
            return (
                f"supports head dimensions up to {largest}, not {head_dim}",
                "a larger model.n_head",
            )
        if head_dim < smallest:
            return (
                f"supports head dimensions from {smallest}, not {head_dim}",
                "a smaller model.n_head",
            )
    return None


def check_support(chosen: Backend, request: AttentionRequest, package: str | None = None) -> None:
    """Raise UserError, with the settings to change, if the backend cannot run the request."""
    if (missing := missing_feature(chosen, request, package)) is None:
        return
    problem, setting = missing
    implementation = f" with attention.flash_package={package}" if package else ""
    where = "" if problem.startswith("does not run") else f" on {request.device.type}"
    advice = suggest_backends(chosen, request, setting)
    if package is not None and missing_feature(chosen, request) is None:
        advice = "set attention.flash_package=null"
    if chosen.attention_type != "softmax":
        advice = (
            f"set {setting}, or model.attention_type=softmax"
            if setting
            else "set model.attention_type=softmax"
        )
    raise UserError(f"{chosen.setting}{implementation}{where} {problem}; {advice}")


def suggest_backends(
    refused: Backend, request: AttentionRequest, setting: str | None = None
) -> str:
    """Advice for a message: the setting, and the other backends that support the request.

    For example, "set model.dropout=0, or attention=naive or sdpa".
    """
    others = [other for other in BACKENDS.values() if other is not refused]
    names = [other.name for other in others if missing_feature(other, request) is None]
    listed = " or ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
    return "set " + ", or ".join(filter(None, [setting, listed and f"attention={listed}"]))
