"""The support table: what each attention backend supports on each device, for example dropout.

Checks, messages, documentation and tests use this table. The decorators of the functions in
model/attention/backends.py fill it. The causal mask is attention_mask in that file.

model/attention/__init__.py has the notation (B, Tq, Tk, H, G, D, Dv).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType

import torch
from torch import Tensor

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
            "gradients": self.grad,
            "dropout": self.dropout_p > 0,
            "softcap": self.softcap is not None,
            "gqa": self.G != self.H,
            "window": self.window is not None,
            "document_mask": self.document_mask,
            "positions": self.positions or 1 < self.Tq < self.Tk,
            "different_value_dim": self.Dv != self.D,
        }


@dataclass(frozen=True)
class Feature:
    """A feature that not every backend supports, such as dropout."""

    title: str  # of the column in the support table
    problem: str  # the message if a backend lacks the feature
    setting: str | None = None  # the setting that turns the feature off


FEATURES = {
    "gradients": Feature("training", "cannot train: it has no gradients"),
    "dropout": Feature("dropout", "does not support dropout", "model.dropout=0"),
    "softcap": Feature("softcap", "does not support softcaps", "model.attention_softcap=null"),
    "gqa": Feature("GQA", "does not support shared key/value heads", "model.n_kv_head=null"),
    "window": Feature("window", "does not support windows", "model.window=null"),
    "document_mask": Feature(
        "document mask", "does not support document masks", "data.document_mask=false"
    ),
    "positions": Feature(
        "positions", "does not support queries at arbitrary positions", "batch_size=1"
    ),
    "different_value_dim": Feature(
        "Dv ≠ D",
        "does not support values whose head dimension differs from that of queries and keys",
    ),
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
    for key, is_used in request.features().items():
        if is_used and key in support.lacks:
            return f"{subject} {FEATURES[key].problem}", FEATURES[key].setting
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
        others = [other for other in BACKENDS.values() if other is not refused]
        names = [other.name for other in others if missing_feature(other, request) is None]
        if names:
            suggestions.append(f"attention={' or '.join(names)}")
    return "set " + ", or ".join(suggestions)
