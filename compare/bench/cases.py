"""Attention, or a whole training step with it, timed in this process and held against float64.

Legend as in model/attention; T is how many keys there are, and queries as well but for decode, which has one.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import cycle
from math import inf
from pathlib import Path

import torch
from torch import Tensor

from common import system
from model import AttentionConfig, GPTConfig
from model.attention import (
    BACKENDS,
    AttentionRequest,
    Resolved,
    get_attention_fn,
    naive,
    pin_kernel_under_compile,
    resolve,
    resolve_model,
)
from model.flops import attention_flops, flops_per_token
from model.gpt import GPT
from training import optimizer, speed
from training.config import AdamWConfig, MuonConfig
from training.device import autocast, configure_backends, grad_scaler, resolve_dtype

MOST_CALLS = 10_000  # that a process times
NAMES = ("y", "dq", "dk", "dv")  # of what attention gives, and of its gradients


@dataclass(frozen=True)
class Case:
    """What a row is of. phase: one of PHASES."""

    attention: AttentionConfig
    phase: str
    device: torch.device
    dtype: torch.dtype
    B: int
    T: int
    H: int
    G: int
    D: int
    Dv: int

    @property
    def trains(self) -> bool:
        return self.phase not in ("forward", "decode")

    @property
    def need(self) -> AttentionRequest:
        return AttentionRequest(
            B=self.B, Tq=1 if self.phase == "decode" else self.T, Tk=self.T, H=self.H, G=self.G, D=self.D, Dv=self.Dv,
            dtype=self.dtype, device=self.device, grad=self.trains,
        )  # fmt: skip


@dataclass(frozen=True)
class BenchSettings:
    """What all rows share. model, optimizer, vocab_size, compile: of whole training steps.

    rounds: in how many processes each row is timed; repeats: the fewest calls that each of them times, and seconds:
    how long it goes on. time_limit: seconds that a row may take in all.
    """

    model: GPTConfig
    optimizer: AdamWConfig | MuonConfig
    vocab_size: int
    compile: bool
    tf32: bool
    seed: int
    rounds: int
    repeats: int
    seconds: float
    time_limit: float


@dataclass(frozen=True)
class BenchResult:
    """What one process found. tokens, flops: of a call; seconds: each timed call's.

    peak_memory_bytes: what a call takes beyond what was there before, its inputs, or, of a whole step, before the
    model. compile_s: None: there was nothing to compile. errors: the largest distance of y, dq, dk and dv from
    float64's, of those there are.
    """

    resolved: Resolved
    tokens: int
    flops: int
    seconds: list[float]
    peak_memory_bytes: int | None
    compile_s: float | None
    errors: dict[str, float]


@dataclass(frozen=True)
class Workload:
    """Something that can be called again and again, and what a call amounts to.

    memory: bytes in use before there was anything of it that counts; None: as when it is called. results: its y, and
    its gradients where it has any, for the inputs of the reference; None: it has no reference.
    """

    resolved: Resolved
    call: Callable[[], object]
    tokens: int
    flops: int
    compiles: bool
    memory: int | None = None
    results: Callable[[], tuple[Tensor, ...]] | None = None


def measure(case: Case, settings: BenchSettings, reference: Path) -> BenchResult:
    """Time `case` in this process. reference: a file of write_reference; where there is none, there are no errors.

    Raises UserError where it cannot run here.
    """
    device = case.device
    configure_backends(device, deterministic=False, tf32=settings.tf32)
    work = PHASES[case.phase](case, settings)
    work.call()  # compiles, where there is something to compile, and loads what kernels load at first use
    peak_memory = _peak_memory(work, device)
    seconds = speed.time_calls(work.call, device, settings.repeats, settings.seconds, MOST_CALLS)
    errors = {}
    if work.results is not None and reference.exists():
        expected = torch.load(reference, weights_only=True)
        for name, result in zip(NAMES, work.results(), strict=False):
            errors[name] = (result.detach().cpu().double() - expected[name]).abs().max().item()
    compile_s = speed.compile_seconds() if work.compiles else None
    return BenchResult(work.resolved, work.tokens, work.flops, seconds, peak_memory, compile_s, errors)


def _peak_memory(work: Workload, device: torch.device) -> int | None:
    system.return_freed_memory()
    before = system.memory_in_use(device) if work.memory is None else work.memory
    system.reset_peak_memory(device)
    work.call()
    speed.synchronize(device)
    peak = system.peak_memory_bytes(device)
    return None if peak is None or before is None else max(0, peak - before)


def _kernel(case: Case, settings: BenchSettings) -> Workload:
    """Attention alone, on random inputs that no cache still holds from the call before."""
    resolved, attend = resolve(case.attention, case.need), get_attention_fn(case.attention)

    def attention(q, k, v, dy) -> tuple[Tensor, ...]:
        y = attend(q, k, v)
        return (y, *torch.autograd.grad(y, (q, k, v), dy)) if case.trains else (y,)

    drawn = inputs(case, settings.seed)
    size = sum(tensor.nbytes for tensor in drawn)
    copies = min(MOST_CALLS, 2 * system.cache_bytes(case.device) // size + 1)
    rotating = [drawn, *(tuple(tensor.clone() for tensor in drawn) for _ in range(copies - 1))]
    for q, k, v, _ in rotating:
        for tensor in (q, k, v):
            tensor.requires_grad_(case.trains)
    turn = cycle(rotating)
    return Workload(
        resolved, lambda: attention(*next(turn)), tokens=case.B * case.need.Tq, flops=flops(case, settings),
        compiles=BACKENDS[case.attention.backend].needs_compiler, results=lambda: attention(*drawn),
    )  # fmt: skip


def _step(case: Case, settings: BenchSettings) -> Workload:
    """An optimizer step of the whole model as train.py makes it, on B sequences of T random tokens."""
    device, dtype = case.device, case.dtype
    resolve_dtype(str(dtype).removeprefix("torch."), device)  # not all that kernels can is for training
    config = replace(settings.model, block_size=case.T)
    resolved = resolve_model(case.attention, config, B=case.B, dtype=dtype, device=device, grad=True)
    small = replace(config, n_layer=1, window=None, block_size=8, ngram_table_size=64)
    _training_step(small, replace(case, B=1, T=8), replace(settings, vocab_size=64, compile=False))()  # loads libraries
    system.return_freed_memory()
    before = system.memory_in_use(device)
    step = _training_step(config, case, settings)
    return Workload(
        resolved, step, tokens=case.B * case.T, flops=flops(case, settings), compiles=settings.compile, memory=before
    )


def _training_step(config: GPTConfig, case: Case, settings: BenchSettings) -> Callable[[], None]:
    device, dtype = case.device, case.dtype
    torch.manual_seed(settings.seed)
    model = GPT(config, settings.vocab_size, get_attention_fn(case.attention)).to(device)
    forward = model
    if settings.compile:
        pin_kernel_under_compile(case.attention)
        forward = torch.compile(model, dynamic=False)
    optimizers = optimizer.build_optimizers(model, settings.optimizer)
    scaler = grad_scaler(device, dtype)
    batches = cycle(torch.randint(settings.vocab_size, (8, 2, case.B, case.T), device=device))

    def step() -> None:
        x, y = next(batches)
        with autocast(device, dtype):
            loss = forward(x, y)
        scaler.scale(loss).backward()
        for each in optimizers:
            scaler.unscale_(each)
        torch.nn.utils.clip_grad_norm_(model.parameters(), inf)
        for each in optimizers:
            scaler.step(each)
        scaler.update()
        model.zero_grad(set_to_none=True)

    return step


PHASES = {"forward": _kernel, "forward+backward": _kernel, "decode": _kernel, "step": _step}


def flops(case: Case, settings: BenchSettings) -> int:
    """Of one call: see model/flops.py. (A whole step's are counted as train.py counts them for mfu.)"""
    if case.phase == "step":
        config = replace(settings.model, block_size=case.T)
        return case.B * case.T * flops_per_token(config, settings.vocab_size, case.T)
    return attention_flops(case.need)


def inputs(case: Case, seed: int) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of y: normal numbers, the same for every backend."""
    generator = torch.Generator().manual_seed(seed)
    n = case.need
    shapes = (n.B, n.Tq, n.H, n.D), (n.B, n.Tk, n.G, n.D), (n.B, n.Tk, n.G, n.Dv), (n.B, n.Tq, n.H, n.Dv)
    drawn = [torch.randn(shape, generator=generator).to(case.device, case.dtype) for shape in shapes]
    if case.phase == "decode":  # head by head in memory, as a cache is read fastest
        drawn = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in drawn]
    return tuple(drawn)


def write_reference(case: Case, seed: int, path: Path) -> None:
    """Write y, and dq, dk, dv where there are gradients, of `naive` in float64 on the inputs of `case`.

    Heads do not see each other, so that they are computed one group after another, which bounds the memory.
    """
    device = torch.device("cpu") if case.device.type == "mps" else case.device  # which has no float64
    q, k, v, dy = (tensor.to(device, torch.float64) for tensor in inputs(case, seed))
    names = NAMES if case.trains else NAMES[:1]
    whole = {
        name: torch.empty(like.shape, dtype=torch.float64) for name, like in zip(NAMES, (dy, q, k, v), strict=True)
    }
    each = case.H // case.G  # query heads of a key/value head
    for b in range(case.B):
        for g in range(case.G):
            queries, keys = slice(g * each, (g + 1) * each), slice(g, g + 1)
            parts = [tensor[b : b + 1, :, heads] for tensor, heads in ((q, queries), (k, keys), (v, keys))]
            for part in parts:
                part.requires_grad_(case.trains)
            y = naive(*parts)
            results = (y, *torch.autograd.grad(y, parts, dy[b : b + 1, :, queries])) if case.trains else (y,)
            for name, result in zip(names, results, strict=True):
                whole[name][b, :, keys if name in ("dk", "dv") else queries] = result[0].detach().cpu()
    torch.save({name: whole[name] for name in names}, path)


def peak_flops(device: torch.device, dtype: torch.dtype, tf32: bool) -> float:
    """FLOP/s that matrix products reach, for a process that is started to measure it.

    A CPU without instructions for `dtype` computes it by those for float32, in attention at least.
    """
    configure_backends(device, deterministic=False, tf32=tf32)
    dtypes = {dtype, torch.float32} if device.type == "cpu" else {dtype}
    return max(speed.peak_flops(device, each) for each in dtypes)
