"""What each attention backend can do: one table, from which checks, sentences, the README's and tests are made."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from common.errors import UserError

ALL_DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Support:
    """What a backend can do on one kind of device. Its yes-or-no fields are the keys of FEATURES."""

    dtypes: tuple[str, ...] = ALL_DTYPES
    gradients: bool = True
    dropout: bool = True
    gqa: bool = True
    window: bool = True
    document_mask: bool = True
    positions: bool = True
    any_dv: bool = True
    head_sizes: tuple[int, float] = (1, inf)  # from, to


@dataclass(frozen=True)
class AttentionRequest:
    """What is asked of attention: the shapes of the package's legend, and which of its arguments are there."""

    B: int
    Tq: int
    Tk: int
    H: int
    G: int
    D: int
    Dv: int
    dtype: torch.dtype
    device: torch.device
    grad: bool
    dropout_p: float = 0.0
    window: int | None = None
    document_mask: bool = False
    positions: bool = False


@dataclass(frozen=True)
class Feature:
    """Something that not every backend can do: its title, who asks for it, and what to say where it is missing.

    n in what is said: the need.
    """

    title: str
    asked: Callable[[AttentionRequest], bool]
    lacks: str
    instead: str | None = None  # the setting that does without


FEATURES = {
    "gradients": Feature("trains", lambda n: n.grad, "has no gradients, and cannot train"),
    "dropout": Feature("dropout", lambda n: n.dropout_p > 0, "has no dropout", "model.dropout=0"),
    "gqa": Feature("grouped heads", lambda n: n.G != n.H, "needs as many key heads as query heads",
                   "model.n_kv_head=null"),
    "window": Feature("windows", lambda n: n.window is not None, "has no sliding window", "model.window=null"),
    "document_mask": Feature("documents", lambda n: n.document_mask, "cannot keep documents apart",
                         "data.document_mask=false"),
    "positions": Feature("positions", lambda n: n.positions or 1 < n.Tq < n.Tk,
                         "takes no queries in the middle of the keys"),
    "any_dv": Feature("Dv ≠ D", lambda n: n.Dv != n.D,
                      "needs values as wide as keys, not Dv={n.Dv} and D={n.D}"),
}  # fmt: skip


@dataclass(frozen=True)
class Backend:
    """A way to compute attention.

    on: what it supports, by device type, or by device type and implementation as in "cuda FA3"; what is missing
        cannot run it. picks_kernel: it calls PyTorch's scaled_dot_product_attention, which has kernels to choose from.
    needs_compiler: it is torch.compile's.
    """

    name: str
    attend: Callable[..., Tensor]
    on: dict[str, Support]
    picks_kernel: bool
    needs_compiler: bool


BACKENDS: dict[str, Backend] = {}


def backend(on: dict[str, Support], *, picks_kernel: bool = False, needs_compiler: bool = False):
    """Register the decorated function as `attention=<its name>`; the arguments are Backend's."""

    def register(attend: Callable[..., Tensor]) -> Callable[..., Tensor]:
        BACKENDS[attend.__name__] = Backend(attend.__name__, attend, on, picks_kernel, needs_compiler)
        return attend

    return register


def missing_feature(chosen: Backend, need: AttentionRequest, impl: str | None = None) -> tuple[str, str | None] | None:
    """What `chosen` cannot do of what is needed, and the setting that does without it; None: it can do all."""
    device, dtype = need.device.type, str(need.dtype).removeprefix("torch.")
    able = chosen.on.get(f"{device} {impl}" if impl else device)
    if able is None:
        there = dict.fromkeys(key.split()[0] for key in chosen.on if impl is None or key.endswith(impl))
        return f"does not run on {device}", f"device={' or '.join(there)}"
    for key, feature in FEATURES.items():
        if feature.asked(need) and not getattr(able, key):
            return feature.lacks.format(n=need), feature.instead
    if dtype not in able.dtypes:
        return f"does not compute in {dtype}", f"dtype={able.dtypes[0]}"
    least, most = able.head_sizes
    if max(need.D, need.Dv) > most:
        return f"takes heads of at most {most} channels, not {max(need.D, need.Dv)}", "a larger model.n_head"
    if min(need.D, need.Dv) < least:
        return f"takes heads of at least {least} channels, not {min(need.D, need.Dv)}", "a smaller model.n_head"
    return None


def check(chosen: Backend, need: AttentionRequest, impl: str | None = None) -> None:
    """Hold what is needed against the table. Raises UserError, with what to set instead."""
    lacks = missing_feature(chosen, need, impl)
    if lacks is not None:
        what, setting = lacks
        implementation = f" with attention.impl={impl}" if impl else ""
        where = "" if what.startswith("does not run") else f" on {need.device.type}"
        without = impl and missing_feature(chosen, need) is None
        mend = "set attention.impl=null" if without else suggest_alternatives(need, setting)
        raise UserError(f"attention={chosen.name}{implementation}{where} {what}; {mend}")


def suggest_alternatives(need: AttentionRequest, setting: str | None) -> str:
    """ "set model.dropout=0, or attention=naive or sdpa": the setting, and the backends that can do what is needed."""
    able = [name for name, other in BACKENDS.items() if missing_feature(other, need) is None]
    listed = ", ".join(able[:-1]) + " or " * (len(able) > 1) + able[-1] if able else ""
    return "set " + ", or ".join(filter(None, [setting, listed and f"attention={listed}"]))


def support_table() -> str:
    """The table as Markdown, a row per backend and what it runs on."""
    titles = ["`attention=`", "on", "dtypes", *(feature.title for feature in FEATURES.values()), "head size"]
    rows = [titles, ["---"] * 3 + [":-:"] * (len(FEATURES) + 1)]
    for name, chosen in BACKENDS.items():
        alike: dict[Support, list[str]] = {}
        for device, able in chosen.on.items():
            alike.setdefault(able, []).append(device)
        for able, devices in alike.items():
            dtypes = "any" if able.dtypes == ALL_DTYPES else ", ".join(able.dtypes)
            least, most = able.head_sizes
            size = "any" if (least, most) == (1, inf) else f"from {least}" if most == inf else f"to {most}"
            can = ["✓" if getattr(able, key) else "no" for key in FEATURES]
            rows.append([f"`{name}`", ", ".join(devices), dtypes, *can, size])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
