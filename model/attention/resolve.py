"""From the config to a function, and to the name of the kernel that will really run."""

import os
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from common.errors import UserError
from model.attention.backends import KERNELS
from model.attention.support import BACKENDS, AttentionRequest, Backend, check, suggest_alternatives
from model.config import AttentionConfig, GPTConfig


@dataclass(frozen=True)
class Resolved:
    """What was asked for and what each training step will run, on record in summary.json."""

    requested: str
    resolved: str  # naive, math, flash, efficient, cudnn, flex; several, joined with "+", where layers differ
    impl: str | None = None


def _find(config: AttentionConfig) -> Backend:
    """The backend that `config` names. Raises UserError, listing what there is."""
    if config.backend not in BACKENDS:
        raise UserError(f"attention.backend={config.backend} is unknown; set one of {', '.join(BACKENDS)}")
    chosen = BACKENDS[config.backend]
    takes_kernels = [name for name, other in BACKENDS.items() if "kernels" in signature(other.attend).parameters]
    if config.kernels is not None:
        if chosen.name not in takes_kernels:
            raise UserError(
                f"attention={chosen.name} has no attention.kernels to choose from; set attention.kernels=null, "
                f"or attention={' or '.join(takes_kernels)}"
            )
        if not config.kernels or not set(config.kernels) <= set(KERNELS):
            given = ",".join(config.kernels)
            raise UserError(f"attention.kernels=[{given}] needs one or more of {', '.join(KERNELS)}, in that spelling")
    impls = {key.split()[1]: name for name, other in BACKENDS.items() for key in other.on if " " in key}
    if config.impl is not None and impls.get(config.impl) != chosen.name:
        known = " or ".join([impl for impl, name in impls.items() if name == chosen.name] or ["another attention"])
        raise UserError(f"attention={chosen.name} has no attention.impl={config.impl}; set null, or {known}")
    return chosen


def all_variants() -> dict[str, AttentionConfig]:
    """Every way there is to compute attention, as in "naive", "sdpa:math", "flash:FA3": a backend alone, or with one
    of the kernels or implementations that it has to choose from."""
    ways = {}
    for name, chosen in BACKENDS.items():
        ways[name] = AttentionConfig(name, kernels=None, impl=None)
        for kernel in KERNELS if "kernels" in signature(chosen.attend).parameters else ():
            ways[f"{name}:{kernel}"] = AttentionConfig(name, kernels=[kernel], impl=None)
        for impl in (key.split()[1] for key in chosen.on if " " in key):
            ways[f"{name}:{impl}"] = AttentionConfig(name, kernels=None, impl=impl)
    return ways


def get_attention_fn(config: AttentionConfig) -> Callable[..., Tensor]:
    """The `attend` function that `config` names, its settings filled in. Raises UserError."""
    chosen = _find(config)
    return chosen.attend if config.kernels is None else partial(chosen.attend, kernels=tuple(config.kernels))


class _KernelProbe(TorchFunctionMode):
    """In place of each scaled_dot_product_attention: which kernel would it run? No attention is computed."""

    kernel: SDPBackend | None = None

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self.kernel = SDPBackend(torch._fused_sdp_choice(*args, **kwargs))
        return args[0]


def resolve(config: AttentionConfig, need: AttentionRequest) -> Resolved:
    """Which kernel will run `config` for what is needed. (Elsewhere, as without dropout, it may be another.)

    Raises UserError, naming the setting to change, where it cannot run: first by the table of what the backend
    supports, then by asking PyTorch itself, whose own reasons are passed on.
    """
    chosen = _find(config)
    check(chosen, need, config.impl)
    if chosen.needs_compiler and (lacks := missing_compiler(need.device)):
        raise UserError(
            f"attention={chosen.name} needs {lacks}, which is not installed; {suggest_alternatives(need, None)}"
        )
    _activate(config.impl)
    if not chosen.picks_kernel:
        return Resolved(chosen.name, chosen.name)

    def empty(T, heads, size):
        return torch.empty(need.B, T, heads, size, dtype=need.dtype, device=need.device, requires_grad=need.grad)

    qkv = empty(need.Tq, need.H, need.D), empty(need.Tk, need.G, need.D), empty(need.Tk, need.G, need.Dv)
    masks = {
        "window": need.window,
        "positions": torch.zeros(need.B, need.Tq, dtype=torch.int64, device=need.device) if need.positions else None,
        "doc_ids": torch.zeros(need.B, need.Tk, dtype=torch.int64, device=need.device) if need.document_mask else None,
    }
    with warnings.catch_warnings(record=True) as reasons, _KernelProbe() as ask:
        warnings.simplefilter("always")
        try:
            get_attention_fn(config)(*qkv, **masks, dropout_p=need.dropout_p)
        except RuntimeError as error:
            if config.kernels:
                listed = f"attention.kernels=[{','.join(config.kernels)}]"
                why = _kernel_warnings(reasons) or f"none of them is for this on {need.device.type}"
                raise UserError(f"{listed} cannot run here ({why}); set attention.kernels=null") from None
            why = _kernel_warnings(reasons) or error
            raise UserError(
                f"attention={chosen.name} cannot run here ({why}); {suggest_alternatives(need, None)}"
            ) from None
    if ask.kernel is None:  # it did without PyTorch's
        return Resolved(chosen.name, chosen.name, config.impl)
    return Resolved(chosen.name, ask.kernel.name.removesuffix("_ATTENTION").lower(), config.impl)


def resolve_model(
    config: AttentionConfig, model: GPTConfig, *, B: int, dtype: torch.dtype, device: torch.device, grad: bool,
    document_mask: bool = False,
) -> Resolved:  # fmt: skip
    """`resolve` for a model on B whole contexts: every kind of layer that it has. grad: it trains, with its dropout."""
    T = model.block_size
    need = AttentionRequest(
        B=B, Tq=T, Tk=T, H=model.n_head, G=model.kv_heads, D=model.head_dim, Dv=model.head_dim, dtype=dtype,
        device=device, grad=grad, dropout_p=model.dropout if grad else 0.0, document_mask=document_mask,
    )  # fmt: skip
    answers = [resolve(config, replace(need, window=window)) for window in dict.fromkeys(model.windows)]
    return replace(answers[0], resolved="+".join(dict.fromkeys(answer.resolved for answer in answers)))


def pin_kernel_under_compile(config: AttentionConfig) -> None:
    """Keep torch.compile from running another kernel than was resolved, in this process: to be called ahead of it.

    Inductor replaces what it recognises as attention by a fused kernel, even where PyTorch's math was asked for; and
    a choice of kernel need not be part of the compile cache's key, which is shared with other processes.
    """
    from torch._inductor.fx_passes import fuse_attention

    assert callable(fuse_attention._sfdp_init), "Inductor has changed: look how it registers attention's patterns now"
    fuse_attention._sfdp_init = lambda *_: None  # there is no setting for it
    torch.compiler.config.cache_key_tag = str(config)


_active: str | None = None


def _activate(impl: str | None) -> None:
    """Give PyTorch's flash kernel another implementation, for the whole process; None: its own. Raises UserError."""
    global _active
    if impl == _active:
        return
    try:
        if impl is None:
            torch.nn.attention.restore_flash_attention_impl()
        else:
            torch.nn.attention.activate_flash_attention_impl(impl)
        _active = impl
    except Exception as error:  # whatever its package, which is not ours, comes to
        raise UserError(
            f"attention.impl={impl} cannot be used ({error}); install its package, or set attention.impl=null"
        ) from None


def _kernel_warnings(reasons: list[warnings.WarningMessage]) -> str:
    """PyTorch's own reasons, without its headings and what it says of the kernels that were not asked for."""
    lines = [str(reason.message).split(" (Triggered")[0].strip() for reason in reasons]
    return " ".join(line for line in lines if not line.endswith("because:") and "runtime disabled" not in line)


def missing_compiler(device: torch.device) -> str | None:
    """What torch.compile would need on this device and does not find; None: it is there."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "Triton"
    compilers = (os.environ.get("CXX", "c++"), "g++", "clang++")
    return None if any(shutil.which(compiler) for compiler in compilers) else "a C++ compiler (g++)"
