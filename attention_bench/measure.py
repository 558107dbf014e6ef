"""Measures a case in the current process: calls of attention alone, or training steps.

worker.py calls `measure` in a separate process. cases.py has the notation.
"""

import itertools
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from attention_bench.cases import Case, configure_model
from attention_bench.config import BenchConfig
from attention_bench.results import FINISHED, NO_ATTENTION, Timing
from common.machine import autocast, peak_memory_bytes, reset_peak_memory, resolve_dtype
from common.process import call_glibc
from model import AttentionConfig
from model.attention import get_attention_fn
from model.attention.backends import naive, repeat_kv
from model.attention.linear import linear_attention_state, linear_attention_step
from model.attention.resolve import pin_kernel_under_compile, resolve, resolve_model
from model.gpt import GPT
from training import speed
from training.optimizer import build_optimizers, optimizer_step
from training.runtime import build_grad_scaler, configure_backends

MAX_CALLS = 10_000  # timed calls per round
INPUT_BYTES = 2**28  # inputs of consecutive calls: more than the caches of CPUs and GPUs


def measure(case: Case, config: BenchConfig, reference: Path) -> tuple[Timing, list[float]]:
    """Measure one round of a case in this process.

    reference: file of write_reference. Without the file, errors stay unknown, as always for linear
        attention.
    Returns a row without times, and the seconds of each timed call. Raises UserError if the case
    cannot run here.
    """
    device = case.request.device
    configure_backends(device, deterministic=False, tf32=config.tf32)
    # M_MMAP_THRESHOLD: freed blocks are returned; otherwise they would be in the peak, by chance
    call_glibc("mallopt", -3, 2**16)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # compile for the shapes of this case, as a new process does
    make_call = make_training_step if case.phase == "step" else make_attention_call
    kernel, call = make_call(case, config)
    row = case.make_row(FINISHED, resolved=kernel)

    started = time.perf_counter()
    outputs = call()
    speed.synchronize(device)
    row.first_call_s = time.perf_counter() - started
    if reference.exists() and case.attention_type == "softmax":
        expected = torch.load(reference, weights_only=True)
        pairs = zip(outputs, expected, strict=True)
        errors = torch.stack([(output.detach().cpu() - y).abs().max() for output, y in pairs])
        row.error_y = errors[0].item()
        if case.request.grad:
            row.error_gradients = errors[1:].max().item()
    del outputs

    call_glibc("malloc_trim", 0)  # the peak would not count freed blocks that are used again
    reset_peak_memory(device)
    before = peak_memory_bytes(device)
    call()
    speed.synchronize(device)
    peak = peak_memory_bytes(device)
    if peak is not None:
        row.peak_memory_bytes = max(0, peak - before)

    configure_backends(device, deterministic=False, tf32=config.tf32)  # malloc as in train.py
    return row, speed.time_calls(call, device, config.repeats, config.seconds, MAX_CALLS)


def make_attention_call(case: Case, config: BenchConfig) -> tuple[str, Callable]:
    """Prepare calls of attention alone.

    Returns the kernel that runs, and a function that returns y, dq, dk and dv, or y alone. Its
    first call has the inputs of the reference. Consecutive calls have different inputs, which are
    not in a cache of the device.
    """
    kernel = resolve(case.attention, case.request).resolved
    inputs = make_inputs(case, config.seed)
    if case.attention_type == "linear" and case.phase == "decode":
        attend = _linear_decoder(*inputs[1:3])
    else:
        masks = {"window": case.request.window, "doc_ids": case.doc_ids()}
        attend = partial(get_attention_fn(case.attention), **masks)
    n_copies = min(MAX_CALLS, INPUT_BYTES // sum(tensor.nbytes for tensor in inputs))
    copies = [[tensor.clone() for tensor in inputs] for _ in range(1 + n_copies)]
    for q, k, v, _ in copies:
        for tensor in (q, k, v):
            tensor.requires_grad_(case.request.grad)
    next_inputs = itertools.cycle(copies)

    def call() -> tuple[Tensor, ...]:
        q, k, v, dy = next(next_inputs)
        y = attend(q, k, v)
        if not case.request.grad:
            return (y,)
        return (y, *torch.autograd.grad(y, (q, k, v), dy))

    return kernel, call


def _linear_decoder(k: Tensor, v: Tensor) -> Callable[..., Tensor]:
    """Linear attention decodes with a state of all keys but the last, instead of a KV cache."""
    state = linear_attention_state(k, v, lengths=torch.tensor(k.shape[1] - 1))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return linear_attention_step(state, q, k[:, -1:], v[:, -1:])

    return attend


def make_training_step(case: Case, config: BenchConfig) -> tuple[str, Callable]:
    """Prepare optimizer steps of the complete model, as in train.py, on B sequences of T tokens.

    Returns the attention kernel that runs, and a function that trains for one step.
    """
    B = case.request.B
    device = case.request.device
    dtype = resolve_dtype(case.dtype_name, device)  # raises UserError for an inference dtype
    model_config = configure_model(case, config)
    attention = case.attention
    if case.attention_type != "softmax":
        attention = AttentionConfig()  # no layer uses it
    if case.name == NO_ATTENTION:
        kernel = NO_ATTENTION
        attend = _no_attention
    else:
        options = {"B": B, "dtype": dtype, "device": device, "grad": True}
        attend, record = resolve_model(attention, model_config, **options)
        kernel = record.resolved
    torch.manual_seed(config.seed)
    model = GPT(model_config, config.vocab_size, attend).to(device)
    forward = model
    if config.compile:
        pin_kernel_under_compile(attention)
        forward = torch.compile(model, dynamic=False)
    optimizers = build_optimizers(model, config.optimizer, dtype)
    scaler = build_grad_scaler(device, dtype)
    shape = (8, 2, B, model_config.block_size)  # eight batches of x and y
    batches = itertools.cycle(torch.randint(config.vocab_size, shape, device=device))

    def step() -> None:
        x, y = next(batches)
        with autocast(device, dtype):
            loss = forward(x, y)
        scaler.scale(loss).backward()
        optimizer_step(model, optimizers, scaler, max_grad_norm=None)

    return kernel, step


def _no_attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Add q, k and v. Returns y (B, T, H, D).

    All weights have gradients, so that the rest of the step stays the same.
    """
    return q + repeat_kv(k + v, q.shape[2])


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

    It is computed by `naive` in float64, separately for each key/value head to limit the memory.
    """
    r = case.request
    device = torch.device("cpu") if r.device.type == "mps" else r.device  # MPS has no float64
    inputs = [tensor.to(device, torch.float64) for tensor in make_inputs(case, seed)]
    doc_ids = case.doc_ids()
    if doc_ids is not None:
        doc_ids = doc_ids.to(device)
    results = []
    for q, k, v, dy in zip(*(tensor.chunk(r.G, dim=2) for tensor in inputs), strict=True):
        qkv = [tensor.detach().requires_grad_(r.grad) for tensor in (q, k, v)]
        y = naive(*qkv, window=r.window, doc_ids=doc_ids)
        gradients = torch.autograd.grad(y, qkv, dy) if r.grad else ()
        results.append((y.detach(), *gradients))
    outputs = [torch.cat(heads, dim=2).cpu() for heads in zip(*results, strict=True)]
    torch.save(outputs, path)
