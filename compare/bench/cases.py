"""The cases of a bench, and their measurement in the current process: calls of attention alone, or training steps.

B batch, T keys, H query heads, G key/value heads, D head dimension of queries and keys, Dv of values. There are T
queries, except in phases decode and prefill, which have one query or a chunk of queries on a KV cache of T keys.
"""

import itertools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from common import system
from common.errors import UserError
from compare.bench.config import CAUSAL, BenchConfig, parse_mask
from compare.bench.results import NO_ATTENTION
from model import AttentionConfig
from model.attention import (
    BACKENDS,
    MIXERS,
    AttentionRequest,
    ResolvedAttention,
    all_variants,
    attention_mask,
    get_attention_fn,
    naive,
    pin_kernel_under_compile,
    resolve,
    resolve_model,
)
from model.attention.backends import repeat_kv
from model.attention.linear import linear_attention_state, linear_attention_step
from model.flops import attention_flops, flops_per_token, visible_pairs, weight_flops_per_token
from model.gpt import GPT
from training import speed
from training.device import DTYPES, autocast, build_grad_scaler, configure_backends, resolve_dtype
from training.optimizer import build_optimizers, optimizer_step

MAX_CALLS = 10_000  # timed calls per round
MASK_SECONDS = 0.02  # for timing how long a mask takes to build
CACHE_PHASES = ("prefill", "decode")  # read keys and values in the memory layout of the KV cache
GRAD_PHASES = ("backward", "forward+backward", "step")
OUTPUT_NAMES = ("y", "dq", "dk", "dv")  # the output of attention and the gradients of its inputs


@dataclass(frozen=True)
class Case:
    """One backend, phase, mask and shape to measure: a row of the table.

    name: the backend as requested, such as "sdpa:math". attention: its config. request: shapes, dtype and device.
    """

    name: str
    attention: AttentionConfig
    phase: str
    mask: str
    request: AttentionRequest

    def __str__(self) -> str:
        mask = "" if self.mask == CAUSAL else f"{self.mask}, "
        return f"{self.phase}, {mask}{self.dtype_name}, T = {self.request.Tk:,}"

    @property
    def dtype_name(self) -> str:
        return str(self.request.dtype).removeprefix("torch.")

    @property
    def mixer(self) -> str:
        """The value of model.mixer that the case measures."""
        return (BACKENDS | MIXERS)[self.attention.backend].mixer

    @property
    def tokens(self) -> int:
        """Tokens that one call processes."""
        return self.request.B * self.request.Tq

    @property
    def document_length(self) -> int | None:
        return parse_mask(self.mask)[1]

    def doc_ids(self) -> Tensor | None:
        """The document of each key -> (B, Tk); None: one document."""
        if self.document_length is None:
            return None
        ids = torch.arange(self.request.Tk, device=self.request.device) // self.document_length
        return ids.expand(self.request.B, -1).contiguous()


def select_variants(config: BenchConfig, device: torch.device) -> tuple[dict[str, AttentionConfig], list[torch.dtype]]:
    """The backends, by name, and the dtypes to measure. Raises UserError for unknown names."""
    variants, dtypes = all_variants(), DTYPES | {"auto": resolve_dtype("auto", device)}
    support = {name: backend.on.get(device.type) for name, backend in (BACKENDS | MIXERS).items()}
    backends = config.backends or [name for name, row in support.items() if row is not None and row.gradients]
    for key, names, choices in (("backends", backends, variants), ("dtypes", config.dtypes, dtypes)):
        for name in names:
            if name not in choices:
                raise UserError(f"{key}: {name} is unknown; set one or more of {', '.join(choices)}")
    return {name: variants[name] for name in backends}, list(dict.fromkeys(dtypes[name] for name in config.dtypes))


def build_groups(config: BenchConfig, device: torch.device) -> list[list[Case]]:
    """List all cases: one group per dtype, phase, mask and T, from short contexts to long ones. Raises UserError.

    Phase step comes last, because its prediction needs the other phases. It has the mask of the model.
    """
    variants, dtypes = select_variants(config, device)
    groups, phases = [], sorted(config.phases, key=lambda phase: phase == "step")
    lengths = sorted(config.block_sizes)
    for dtype, phase, mask, T in itertools.product(dtypes, phases, config.masks, lengths):
        H, G, D, Dv = config.kernel_shape()
        if phase == "step":
            if mask != config.masks[0]:
                continue
            H, G, D, Dv, mask = *config.model_shape(), CAUSAL
        Tq = {"decode": 1, "prefill": min(config.chunk_size, T)}.get(phase, T)
        shape = {"B": config.batch_size, "Tq": Tq, "Tk": T, "H": H, "G": G, "D": D, "Dv": Dv}
        window, document_length = parse_mask(mask)
        options = {"window": window, "document_mask": document_length is not None, "grad": phase in GRAD_PHASES}
        request = AttentionRequest(**shape, **options, dtype=dtype, device=device)
        group = [Case(name, attention, phase, mask, request) for name, attention in variants.items()]
        if phase == "step":
            group.append(replace(group[0], name=NO_ATTENTION, attention=next(iter(all_variants().values()))))
        groups.append(group)
    return groups


@dataclass(frozen=True)
class BenchResult:
    """The measurements of one round.

    seconds: duration of each timed call. wall_seconds: duration of the complete round. peak_memory_bytes: memory of a
    call besides its inputs; phase step includes the model and the optimizer. compile_s: None if nothing was compiled.
    errors: largest absolute differences of y, dq, dk and dv from the reference; empty without a reference, and for
        linear attention, which computes something else.
    mask_seconds: time to build the mask; None for causal masks, which many kernels do not need to read.
    """

    resolved: ResolvedAttention
    seconds: list[float]
    wall_seconds: float
    peak_memory_bytes: int | None
    compile_s: float | None
    errors: dict[str, float]
    mask_seconds: float | None


@dataclass(frozen=True)
class Workload:
    """A function to time. memory_before: bytes in use before its model was built; None: it has no model.

    setup: called before each call, untimed.
    compute_outputs: returns y and its gradients for the inputs of the reference; None: there is no reference.
    """

    resolved: ResolvedAttention
    call: Callable[[], object]
    is_compiled: bool
    memory_before: int | None = None
    setup: Callable[[], object] = lambda: None
    compute_outputs: Callable[[], tuple[Tensor, ...]] | None = None


def measure(case: Case, config: BenchConfig, reference: Path) -> BenchResult:
    """Measure one round of `case` in this process. Raises UserError if the case cannot run here.

    reference: the file that write_reference has written. If the file does not exist, the errors stay unknown.
    """
    started = time.perf_counter()
    device = case.request.device
    configure_backends(device, deterministic=False, tf32=config.tf32)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # compile for the shapes of this case, as a new process does
    workload = (_training_workload if case.phase == "step" else _attention_workload)(case, config)
    compiled_before = speed.compile_seconds() if workload.is_compiled else 0.0
    workload.setup()
    workload.call()  # the first call compiles, and loads the libraries of the kernels
    compile_s = speed.compile_seconds() - compiled_before if workload.is_compiled else None
    peak_memory = _measure_peak_memory(workload, device)
    seconds = speed.time_calls(workload.call, device, config.repeats, config.seconds, MAX_CALLS, workload.setup)
    mask_seconds = None if case.mask == CAUSAL else _measure_mask_seconds(case)
    errors = {}
    if workload.compute_outputs is not None and case.mixer == "softmax" and reference.exists():
        expected = torch.load(reference, weights_only=True)
        for name, output in zip(OUTPUT_NAMES, workload.compute_outputs(), strict=False):
            errors[name] = (output.detach().cpu().double() - expected[name]).abs().max().item()
    wall_seconds = time.perf_counter() - started
    return BenchResult(workload.resolved, seconds, wall_seconds, peak_memory, compile_s, errors, mask_seconds)


def _measure_mask_seconds(case: Case) -> float:
    build = BACKENDS[case.attention.backend].build_mask or attention_mask
    r, doc_ids = case.request, case.doc_ids()
    call = lambda: build(r.Tq, r.Tk, window=r.window, doc_ids=doc_ids, device=r.device)  # noqa: E731
    return statistics.median(speed.time_calls(call, r.device, 2, MASK_SECONDS, MAX_CALLS))


def _measure_peak_memory(workload: Workload, device: torch.device) -> int | None:
    system.return_freed_memory()
    workload.setup()
    before = system.memory_in_use(device) if workload.memory_before is None else workload.memory_before
    system.reset_peak_memory(device)
    workload.call()
    speed.synchronize(device)
    peak = system.peak_memory_bytes(device)
    return None if peak is None or before is None else max(0, peak - before)


def _attention_workload(case: Case, config: BenchConfig) -> Workload:
    """Attention alone. Consecutive calls use different inputs, so that no CPU or GPU cache contains them."""
    resolved, attend = resolve(case.attention, case.request), get_attention_fn(case.attention)
    attend = partial(attend, window=case.request.window, doc_ids=case.doc_ids())

    def attention(q, k, v, dy) -> tuple[Tensor, ...]:
        y = attend(q, k, v)
        return (y, *torch.autograd.grad(y, (q, k, v), dy)) if case.request.grad else (y,)

    def forward() -> None:
        nonlocal outputs
        q, k, v, dy = next(next_inputs)
        outputs = attend(q, k, v), (q, k, v), dy

    def call() -> object:
        return torch.autograd.grad(*outputs) if case.phase == "backward" else attention(*next(next_inputs))

    inputs = make_inputs(case, config.seed)
    if case.mixer == "linear" and case.phase == "decode":  # with a state instead of the keys of all tokens
        state = linear_attention_state(*inputs[1:3], lengths=torch.tensor(case.request.Tk - 1))
        attend = lambda q, k, v: linear_attention_step(state, q, k[:, -1:], v[:, -1:])  # noqa: E731
    size = sum(tensor.nbytes for tensor in inputs)
    n_copies = min(MAX_CALLS, 2 * system.cache_bytes(case.request.device) // size + 1)
    copies = [inputs, *(tuple(tensor.clone() for tensor in inputs) for _ in range(n_copies - 1))]
    for q, k, v, _ in copies:
        for tensor in (q, k, v):
            tensor.requires_grad_(case.request.grad)
    next_inputs = itertools.cycle(copies)
    outputs = ()
    return Workload(
        resolved,
        call,
        is_compiled=(BACKENDS | MIXERS)[case.attention.backend].needs_compiler,
        setup=forward if case.phase == "backward" else lambda: None,
        compute_outputs=lambda: attention(*inputs),
    )


def _training_workload(case: Case, config: BenchConfig) -> Workload:
    """One optimizer step of the complete model, as in train.py, on B sequences of T random tokens."""
    B, dtype, device = case.request.B, case.request.dtype, case.request.device
    resolve_dtype(case.dtype_name, device)  # raises for a dtype that only inference supports
    if case.mixer != "softmax":
        config = replace(config, model=replace(config.model, mixer=case.mixer))
        case = replace(case, attention=next(iter(all_variants().values())))  # no layer uses it
    model = replace(config.model, block_size=case.request.Tk)
    resolved = resolve_model(case.attention, model, B=B, dtype=dtype, device=device, grad=True)
    if case.name == NO_ATTENTION:
        resolved = ResolvedAttention(NO_ATTENTION, NO_ATTENTION)
    # A step of a tiny model loads the libraries, which should not count as memory of the step.
    tiny = replace(
        model, n_layer=1, mixer=model.mixers[0], window=None, mlp_width=None, block_size=8, ngram_table_size=64
    )
    _training_step(case, replace(config, model=tiny, vocab_size=64, compile=False))()
    system.return_freed_memory()
    memory_before = system.memory_in_use(device)
    step = _training_step(case, replace(config, model=model))
    return Workload(resolved, step, is_compiled=config.compile, memory_before=memory_before)


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
    """Adds q, k and v, so that each has a gradient and the rest of the step stays the same -> (B, T, H, D)."""
    return q + repeat_kv(k + v, q.shape[2])


def count_flops(case: Case, config: BenchConfig) -> int:
    """FLOPs of one call, as in model/flops.py. Those of a training step are counted as for train.py's mfu."""
    if case.name == NO_ATTENTION:
        return case.tokens * weight_flops_per_token(config.model, config.vocab_size)
    if case.phase == "step":
        T = case.request.Tk
        model = config.model if case.mixer == "softmax" else replace(config.model, mixer=case.mixer)
        return case.tokens * flops_per_token(replace(model, block_size=T), config.vocab_size, T)
    passes = {"backward": 2, "forward+backward": 3}.get(case.phase, 1)  # a backward pass takes twice the FLOPs
    return passes * attention_flops(case.request, case.mixer, case.document_length)


def count_bytes(case: Case) -> int | None:
    """Bytes that a call of softmax attention alone has to read and write: its inputs and outputs, once. Else None.

    Keys that no query attends to do not count. A backward pass reads q, k, v, y and dy, and writes dq, dk and dv.
    """
    if case.phase == "step" or case.mixer != "softmax":
        return None
    r = case.request
    window, document_length = r.window or r.Tk, case.document_length or r.Tk
    oldest_visible = (r.Tk - r.Tq) // document_length * document_length  # start of the first query's document
    keys = r.Tk - max(oldest_visible, r.Tk - r.Tq + 1 - window, 0)
    passes = {"backward": 2, "forward+backward": 3}.get(case.phase, 1)
    return passes * r.B * (r.Tq * r.H + keys * r.G) * (r.D + r.Dv) * r.dtype.itemsize


def count_pairs(case: Case) -> int | None:
    """Visible pairs of a query and a key in a call of softmax attention alone, in all heads. Else None."""
    if case.phase == "step" or case.mixer != "softmax":
        return None
    r = case.request
    return r.B * r.H * visible_pairs(r.Tq, r.Tk, r.window, case.document_length)


def make_inputs(case: Case, seed: int) -> tuple[Tensor, ...]:
    """Return q, k, v and the gradient of y: standard normal numbers, the same for every backend."""
    generator = torch.Generator().manual_seed(seed)
    r = case.request
    shapes = (r.B, r.Tq, r.H, r.D), (r.B, r.Tk, r.G, r.D), (r.B, r.Tk, r.G, r.Dv), (r.B, r.Tq, r.H, r.Dv)
    inputs = [torch.randn(shape, generator=generator).to(r.device, r.dtype) for shape in shapes]
    if case.phase in CACHE_PHASES:  # the memory layout of the KV cache: (B, H, T, D)
        inputs = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs]
    return tuple(inputs)


def write_reference(case: Case, seed: int, path: Path) -> None:
    """Write the reference of `case`: y, and dq, dk and dv if the phase has a backward pass."""
    mask = {"window": case.request.window, "doc_ids": case.doc_ids()}
    torch.save(compute_reference(make_inputs(case, seed), case.request.grad, **mask), path)


def compute_reference(
    inputs: Sequence[Tensor], grad: bool, doc_ids: Tensor | None = None, **options
) -> dict[str, Tensor]:
    """y, and with grad also dq, dk and dv, of inputs q, k, v, dy: computed by `naive` in float64, on the CPU.

    Each key/value head is computed separately, to limit the memory. options: window and softcap.
    """
    device = torch.device("cpu") if inputs[0].device.type == "mps" else inputs[0].device  # MPS has no float64
    q, k, v, dy = (tensor.to(device, torch.float64) for tensor in inputs)
    doc_ids = None if doc_ids is None else doc_ids.to(device)
    outputs = dict(zip(OUTPUT_NAMES, (torch.empty_like(like, device="cpu") for like in (dy, q, k, v)), strict=True))
    B, G, queries_per_key = q.shape[0], k.shape[2], q.shape[2] // k.shape[2]
    for b in range(B):
        for g in range(G):
            queries, keys = slice(g * queries_per_key, (g + 1) * queries_per_key), slice(g, g + 1)
            qkv = [tensor[b : b + 1, :, heads] for tensor, heads in ((q, queries), (k, keys), (v, keys))]
            for tensor in qkv:
                tensor.requires_grad_(grad)
            y = naive(*qkv, doc_ids=None if doc_ids is None else doc_ids[b : b + 1], **options)
            gradients = torch.autograd.grad(y, qkv, dy[b : b + 1, :, queries]) if grad else ()
            for name, output in zip(OUTPUT_NAMES, (y, *gradients), strict=False):
                outputs[name][b, :, keys if name in ("dk", "dv") else queries] = output[0].detach().cpu()
    return outputs if grad else {"y": outputs["y"]}


def measure_peaks(device: torch.device, dtype: torch.dtype, tf32: bool) -> tuple[float, float]:
    """Measure the FLOP/s of large matrix products in `dtype`, and the memory bandwidth in bytes per second.

    On a CPU, the FLOP/s are those in float32 if they are higher: attention computes in float32 if the CPU lacks
    instructions for `dtype`.
    """
    configure_backends(device, deterministic=False, tf32=tf32)
    dtypes = {dtype, torch.float32} if device.type == "cpu" else {dtype}
    return max(speed.peak_flops(device, dtype) for dtype in dtypes), speed.memory_bandwidth(device)
