"""The cases of a bench: every combination of backend, phase, mask, dtype and context length.

measure.py measures a case.
B batch, T keys, H query heads, G key/value heads, D head dimension of queries and keys, Dv of
values. There are T queries, except in phase decode, which has one query on a KV cache of T keys.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attention_bench.config import CAUSAL, BenchConfig, parse_mask
from attention_bench.results import NO_ATTENTION, Timing
from common.errors import UserError
from common.machine import DTYPES, resolve_dtype
from model import AttentionConfig, GPTConfig
from model.attention import BACKENDS, NON_SOFTMAX, AttentionRequest, all_variants
from model.flops import attention_flops, flops_per_token, weight_flops_per_token

GRAD_PHASES = ("forward+backward", "step")


@dataclass(frozen=True)
class Case:
    """One backend, phase, mask and shape to measure: a row of the table."""

    name: str  # the backend as requested, such as "sdpa:math"
    attention: AttentionConfig
    phase: str
    mask: str
    request: AttentionRequest  # shapes, dtype and device

    def __str__(self) -> str:
        return f"{self.phase}, {self.mask}, {self.dtype_name}, T = {self.request.Tk:,}"

    @property
    def dtype_name(self) -> str:
        return str(self.request.dtype).removeprefix("torch.")

    @property
    def attention_type(self) -> str:
        """The value of model.attention_type that the case measures."""
        chosen = NON_SOFTMAX.get(self.attention.backend)
        return "softmax" if chosen is None else chosen.attention_type

    @property
    def document_length(self) -> int | None:
        """Tokens of each document. None if the mask has no documents."""
        return parse_mask(self.mask)[1]

    def doc_ids(self) -> Tensor | None:
        """Document ids of the keys (B, Tk). None if the mask has no documents."""
        if self.document_length is None:
            return None
        ids = torch.arange(self.request.Tk, device=self.request.device) // self.document_length
        return ids.expand(self.request.B, -1).contiguous()

    def make_row(self, status: str, **values: Any) -> Timing:
        """A row of the table for this case. values: other columns of the row."""
        r = self.request
        return Timing(
            backend=self.name,
            status=status,
            phase=self.phase,
            mask=self.mask,
            device=r.device.type,
            dtype=self.dtype_name,
            B=r.B,
            T=r.Tk,
            H=r.H,
            G=r.G,
            D=r.D,
            Dv=r.Dv,
            **values,
        )


def build_groups(config: BenchConfig, device: torch.device) -> list[list[Case]]:
    """List all cases, in one group per dtype, phase, mask and T, from short to long contexts.

    Phase step has the mask of the model, and one more case without attention. Raises UserError for
    unknown names.
    """
    variants = all_variants()
    backends = config.backends or _list_trainable(device)
    for name in backends:
        if name not in variants:
            advice = f"set one or more of {', '.join(variants)}"
            raise UserError(f"backends: {name} is unknown; {advice}")
    dtypes = DTYPES | {"auto": resolve_dtype("auto", device)}
    unique_dtypes = dict.fromkeys(dtypes[name] for name in config.dtypes)

    groups = []
    for dtype, phase in itertools.product(unique_dtypes, config.phases):
        masks = [CAUSAL] if phase == "step" else config.masks
        for mask, T in itertools.product(masks, sorted(config.block_sizes)):
            request = _make_request(config, phase, mask, T, dtype, device)
            group = [Case(name, variants[name], phase, mask, request) for name in backends]
            if phase == "step":
                group.append(Case(NO_ATTENTION, AttentionConfig(), phase, mask, request))
            groups.append(group)
    return groups


def _list_trainable(device: torch.device) -> list[str]:
    """The backends of softmax attention that can train on a device."""
    supports = {name: backend.on.get(device.type) for name, backend in BACKENDS.items()}
    return [name for name, support in supports.items() if support and support.gradients]


def _make_request(
    config: BenchConfig, phase: str, mask: str, T: int, dtype: torch.dtype, device: torch.device
) -> AttentionRequest:
    H, G, D, Dv = config.kernel_shape(phase)
    window, document_length = parse_mask(mask)
    return AttentionRequest(
        B=config.num_sequences(phase, T),
        Tq=1 if phase == "decode" else T,
        Tk=T,
        H=H,
        G=G,
        D=D,
        Dv=Dv,
        dtype=dtype,
        device=device,
        grad=phase in GRAD_PHASES,
        window=window,
        document_mask=document_length is not None,
    )


def configure_model(case: Case, config: BenchConfig) -> GPTConfig:
    """Return the model of phase step, with the context and the attention type of the case."""
    model = replace(config.model, block_size=case.request.Tk)
    if case.attention_type == "softmax":
        return model
    return replace(model, attention_type=case.attention_type)


def count_flops(case: Case, config: BenchConfig) -> int:
    """Count the FLOPs of one call. A training step has the FLOPs that train.py uses for mfu."""
    B = case.request.B
    T = case.request.Tk
    if case.name == NO_ATTENTION:
        return B * T * weight_flops_per_token(config.model, config.vocab_size)
    if case.phase == "step":
        return B * T * flops_per_token(configure_model(case, config), config.vocab_size, T)
    passes = 3 if case.request.grad else 1  # a backward pass takes twice the FLOPs
    return passes * attention_flops(case.request, case.attention_type, case.document_length)
