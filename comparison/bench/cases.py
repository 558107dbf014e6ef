"""The cases of a bench, and their measurement in the current process: calls of attention alone, or training steps.

build_groups lists the cases, and measure runs one of them. worker.py calls measure in a separate process.
B batch, T keys, H query heads, G key/value heads, D head dimension of queries and keys, Dv of values. There are T
queries, except in phase decode, which has one query on a KV cache of T keys.
"""

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.device import (
    DTYPES,
    autocast,
    peak_memory_bytes,
    reset_peak_memory,
    resolve_dtype,
)
from common.errors import UserError
from comparison.bench.config import CAUSAL, BenchConfig, parse_mask
from comparison.bench.results import FINISHED, NO_ATTENTION, Timing
from comparison.bench.worker import return_blocks_when_freed, return_freed_memory
from model import AttentionConfig, GPTConfig
from model.attention import BACKENDS, NON_SOFTMAX, AttentionRequest, all_variants, get_attention_fn
from model.attention.backends import naive, repeat_kv
from model.attention.flops import attention_flops
from model.attention.linear import linear_attention_state, linear_attention_step
from model.attention.resolve import pin_kernel_under_compile, resolve, resolve_model
from model.flops import flops_per_token, weight_flops_per_token
from model.gpt import GPT
from training import speed
from training.device import build_grad_scaler, configure_backends
from training.optimizer import build_optimizers, optimizer_step

MAX_CALLS = 10_000  # timed calls per round
INPUT_BYTES = 2**28  # of the inputs of consecutive calls: more than the caches of CPUs and GPUs
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
        mask = "" if self.mask == CAUSAL else f"{self.mask}, "
        return f"{self.phase}, {mask}{self.dtype_name}, T = {self.request.Tk:,}"

    @property
    def dtype_name(self) -> str:
        return str(self.request.dtype).removeprefix("torch.")

    @property
    def attention_type(self) -> str:
        """The value of model.attention_type that the case measures."""
        return (BACKENDS | NON_SOFTMAX)[self.attention.backend].attention_type

    def doc_ids(self) -> Tensor | None:
        """Document ids of the keys (B, Tk). None if the mask has no documents."""
        _, document_length = parse_mask(self.mask)
        if document_length is None:
            return None
        ids = torch.arange(self.request.Tk, device=self.request.device) // document_length
        return ids.expand(self.request.B, -1).contiguous()

    def start_row(self) -> dict[str, Any]:
        """The columns of the table that describe the case."""
        r = self.request
        row = {
            "backend": self.name,
            "phase": self.phase,
            "mask": self.mask,
            "device": r.device.type,
        }
        return row | {
            "dtype": self.dtype_name,
            "B": r.B,
            "T": r.Tk,
            "H": r.H,
            "G": r.G,
            "D": r.D,
            "Dv": r.Dv,
        }


def build_groups(config: BenchConfig, device: torch.device) -> list[list[Case]]:
    """List all cases, in one group per dtype, phase, mask and T, from short to long contexts.

    Phase step has the mask of the model, and one more case without attention. Raises UserError for unknown names.
    """
    variants, dtypes = all_variants(), DTYPES | {"auto": resolve_dtype("auto", device)}
    support = {
        name: backend.on.get(device.type) for name, backend in (BACKENDS | NON_SOFTMAX).items()
    }
    backends = config.backends or [
        name for name, row in support.items() if row is not None and row.gradients
    ]
    for key, names, choices in (
        ("backends", backends, variants),
        ("dtypes", config.dtypes, dtypes),
    ):
        for name in names:
            if name not in choices:
                raise UserError(
                    f"{key}: {name} is unknown; set one or more of {', '.join(choices)}"
                )
    groups, unique_dtypes = [], dict.fromkeys(dtypes[name] for name in config.dtypes)
    for dtype, phase in itertools.product(unique_dtypes, config.phases):
        H, G, D, Dv = config.kernel_shape()
        if phase == "step":
            H, G, D, Dv = (
                config.model.n_head,
                config.model.kv_heads,
                config.model.head_dim,
                config.model.head_dim,
            )
        shape = {
            "B": config.batch_size,
            "H": H,
            "G": G,
            "D": D,
            "Dv": Dv,
            "grad": phase in GRAD_PHASES,
        }
        masks = [CAUSAL] if phase == "step" else config.masks
        for mask, T in itertools.product(masks, sorted(config.block_sizes)):
            window, document_length = parse_mask(mask)
            shape |= {"Tq": 1 if phase == "decode" else T, "Tk": T}
            options = {"window": window, "document_mask": document_length is not None}
            request = AttentionRequest(**shape, **options, dtype=dtype, device=device)
            group = [Case(name, variants[name], phase, mask, request) for name in backends]
            if phase == "step":
                group.append(
                    replace(group[0], name=NO_ATTENTION, attention=next(iter(variants.values())))
                )
            groups.append(group)
    return groups


class Workload(NamedTuple):
    """A function to time."""

    resolved: str  # the kernel that runs
    call: Callable[[], Any]
    is_compiled: bool
    memory_before: int | None = None  # bytes in use before the model was built, in phase step


def measure(case: Case, config: BenchConfig, reference: Path) -> tuple[Timing, list[float]]:
    """Measure one round of a case in this process.

    reference: file of write_reference. Without the file, errors stay unknown, as always for linear attention.
    Returns a row without times, and the seconds of each timed call. Raises UserError if the case cannot run here.
    """
    device = case.request.device
    configure_backends(device, deterministic=False, tf32=config.tf32)
    return_blocks_when_freed(2**16)  # otherwise the peak would contain freed blocks, by chance
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # compile for the shapes of this case, as a new process does
    compiled_before = _compile_seconds()
    workload = (_training_workload if case.phase == "step" else _attention_workload)(case, config)
    if case.phase == "step":
        compiled_before = _compile_seconds()  # without the tiny model's
    outputs = (
        workload.call()
    )  # the first call compiles, loads libraries, and has the inputs of the reference
    row = Timing(**case.start_row(), status=FINISHED, resolved=workload.resolved)
    if workload.is_compiled:
        row.compile_s = _compile_seconds() - compiled_before
    if case.phase != "step" and case.attention_type == "softmax" and reference.exists():
        expected = torch.load(reference, weights_only=True)
        errors = [
            (output.detach().cpu() - y).abs().max()
            for output, y in zip(outputs, expected, strict=True)
        ]
        row.error_y = errors[0].item()
        row.error_gradients = torch.stack(errors[1:]).max().item() if case.request.grad else None
    del outputs
    before = _reset_memory(device)
    workload.call()
    speed.synchronize(device)
    if (peak := peak_memory_bytes(device)) is not None:
        row.peak_memory_bytes = max(
            0, peak - (before if workload.memory_before is None else workload.memory_before)
        )
    configure_backends(
        device, deterministic=False, tf32=config.tf32
    )  # for the times, malloc works as in train.py
    return row, speed.time_calls(workload.call, device, config.repeats, config.seconds, MAX_CALLS)


def _reset_memory(device: torch.device) -> int | None:
    """Release freed memory, and start a new measurement of the peak. Returns the bytes in use."""
    return_freed_memory()
    reset_peak_memory(device)
    return peak_memory_bytes(device)


def _attention_workload(case: Case, config: BenchConfig) -> Workload:
    """Calls of attention alone. Consecutive calls use different inputs, which are not in a cache of the device."""
    resolved = resolve(case.attention, case.request).resolved
    attend = partial(
        get_attention_fn(case.attention), window=case.request.window, doc_ids=case.doc_ids()
    )
    inputs = make_inputs(case, config.seed)
    if (
        case.attention_type == "linear" and case.phase == "decode"
    ):  # decodes from a state instead of a KV cache
        state = linear_attention_state(*inputs[1:3], lengths=torch.tensor(case.request.Tk - 1))
        attend = lambda q, k, v: linear_attention_step(state, q, k[:, -1:], v[:, -1:])  # noqa: E731
    n_copies = INPUT_BYTES // sum(tensor.nbytes for tensor in inputs)
    copies = [
        inputs,
        *([tensor.clone() for tensor in inputs] for _ in range(min(MAX_CALLS, n_copies))),
    ]
    for q, k, v, _ in copies:
        for tensor in (q, k, v):
            tensor.requires_grad_(case.request.grad)
    next_inputs = itertools.cycle(copies)

    def call() -> tuple[Tensor, ...]:
        q, k, v, dy = next(next_inputs)
        y = attend(q, k, v)
        return (y, *torch.autograd.grad(y, (q, k, v), dy)) if case.request.grad else (y,)

    return Workload(resolved, call, (BACKENDS | NON_SOFTMAX)[case.attention.backend].needs_compiler)


def _training_workload(case: Case, config: BenchConfig) -> Workload:
    """Optimizer steps of the complete model, as in train.py, on B sequences of T random tokens."""
    B, dtype, device = case.request.B, case.request.dtype, case.request.device
    resolve_dtype(case.dtype_name, device)  # raises for a dtype that only inference supports
    model = configure_model(case, config)
    if case.attention_type != "softmax":
        case = replace(case, attention=next(iter(all_variants().values())))  # no layer uses it
    resolved = resolve_model(
        case.attention, model, B=B, dtype=dtype, device=device, grad=True
    ).resolved
    # A step of a tiny model loads libraries, whose memory does not belong to the step.
    tiny = {
        "n_layer": 1,
        "block_size": 8,
        "window": None,
        "mlp_width": None,
        "ngram_table_size": 64,
    }
    tiny_model = replace(model, attention_type=model.attention_types[0], **tiny)
    _training_step(case, replace(config, model=tiny_model, vocab_size=64, compile=False))()
    memory_before = _reset_memory(device)
    step = _training_step(case, replace(config, model=model))
    return Workload(
        NO_ATTENTION if case.name == NO_ATTENTION else resolved, step, config.compile, memory_before
    )


def configure_model(case: Case, config: BenchConfig) -> GPTConfig:
    """Return the model of phase step, with the context and the attention type of the case."""
    model = replace(config.model, block_size=case.request.Tk)
    return (
        model
        if case.attention_type == "softmax"
        else replace(model, attention_type=case.attention_type)
    )


def _training_step(case: Case, config: BenchConfig) -> Callable[[], None]:
    """Build the model and return a function that trains it for one step."""
    device, dtype = case.request.device, case.request.dtype
    torch.manual_seed(config.seed)
    attend = _no_attention if case.name == NO_ATTENTION else get_attention_fn(case.attention)
    model = GPT(config.model, config.vocab_size, attend).to(device)
    forward = model
    if config.compile:
        pin_kernel_under_compile(case.attention)
        forward = torch.compile(model, dynamic=False)
    optimizers = build_optimizers(model, config.optimizer, dtype)
    scaler = build_grad_scaler(device, dtype)
    shape = (8, 2, case.request.B, config.model.block_size)  # eight batches of x and y
    batches = itertools.cycle(torch.randint(config.vocab_size, shape, device=device))

    def step() -> None:
        x, y = next(batches)
        with autocast(device, dtype):
            loss = forward(x, y)
        scaler.scale(loss).backward()
        optimizer_step(model, optimizers, scaler, max_grad_norm=None)

    return step


def _no_attention(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
    """Add q, k and v. Returns y (B, T, H, D). All weights have gradients, so the rest of the step stays the same."""
    return q + repeat_kv(k + v, q.shape[2])


def count_flops(case: Case, config: BenchConfig) -> int:
    """Count the FLOPs of one call. A training step has the FLOPs that train.py uses for mfu."""
    B, T = case.request.B, case.request.Tk
    if case.name == NO_ATTENTION:
        return B * T * weight_flops_per_token(config.model, config.vocab_size)
    if case.phase == "step":
        return B * T * flops_per_token(configure_model(case, config), config.vocab_size, T)
    passes = 3 if case.request.grad else 1  # a backward pass takes twice the FLOPs
    return passes * attention_flops(case.request, case.attention_type, parse_mask(case.mask)[1])


def make_inputs(case: Case, seed: int) -> list[Tensor]:
    """Draw q, k, v and the gradient of y: standard normal numbers, the same for every backend."""
    generator = torch.Generator().manual_seed(seed)
    r = case.request
    shapes = (
        (r.B, r.Tq, r.H, r.D),
        (r.B, r.Tk, r.G, r.D),
        (r.B, r.Tk, r.G, r.Dv),
        (r.B, r.Tq, r.H, r.Dv),
    )
    inputs = [torch.randn(shape, generator=generator).to(r.device, r.dtype) for shape in shapes]
    if case.phase == "decode":  # the memory layout of the KV cache: (B, H, T, D)
        inputs = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs]
    return inputs


def write_reference(case: Case, seed: int, path: Path) -> None:
    """Write the reference of a case: y, and dq, dk and dv if the phase has a backward pass.

    It is computed by `naive` in float64, separately for each sequence and key/value head to limit the memory.
    """
    r, doc_ids = case.request, case.doc_ids()
    device = torch.device("cpu") if r.device.type == "mps" else r.device  # MPS has no float64
    inputs = [tensor.to(device, torch.float64) for tensor in make_inputs(case, seed)]
    outputs = [torch.empty_like(inputs[i]) for i in (3, 0, 1, 2)]  # y, dq, dk, dv
    for b, g in itertools.product(range(r.B), range(r.G)):
        q, k, v, dy = (
            tensor[b : b + 1].chunk(r.G, dim=2)[g].requires_grad_(r.grad) for tensor in inputs
        )
        y = naive(
            q,
            k,
            v,
            window=r.window,
            doc_ids=None if doc_ids is None else doc_ids[b : b + 1].to(device),
        )
        gradients = torch.autograd.grad(y, (q, k, v), dy) if r.grad else ()
        for output, value in zip(outputs, (y, *gradients), strict=False):
            output[b : b + 1].chunk(r.G, dim=2)[g].copy_(value.detach())
    torch.save([output.cpu() for output in outputs[: 4 if r.grad else 1]], path)


def _compile_seconds() -> float:
    """Time that torch.compile has used in this process, for forward and backward graphs."""
    # Private: torch.compile has no public API for its own time. Checked with torch 2.13.
    dynamo = sys.modules.get("torch._dynamo.utils")
    return dynamo.calculate_time_spent()["total_wall_time"] if dynamo else 0.0
