"""Measures groups of cases: each backend has a process, and the backends take turns in rounds.

If the machine becomes slower or faster during the bench, all backends are therefore affected
equally. A crash, a time limit or a lack of memory ends one row and not the bench.

A case is a row of attention.csv before it is measured: a dict whose keys are COLUMNS.
B batch, T keys, H query heads, G key/value heads, D head dimension of queries and keys, Dv of
values. There are T queries, except in phase decode, which has one query on a KV cache of T keys.
"""

import itertools
import multiprocessing
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attention_bench.config import TOKENS_PER_CALL, BenchConfig, mask_length
from common.errors import UserError, is_out_of_memory
from common.machine import (
    DTYPES,
    peak_memory_bytes,
    reset_peak_memory,
    resolve_device,
    resolve_dtype,
)
from common.process import call_glibc, keep_freed_memory
from common.settings import unknown_value
from model.attention import (
    BACKENDS,
    NON_SOFTMAX,
    AttentionRequest,
    all_variants,
    get_attention_fn,
    naive,
    resolve,
)
from training.runtime import configure_backends
from training.speed import synchronize, time_calls

# Unknown values are None.
COLUMNS = (
    "backend",  # as requested
    "resolved",  # the kernel that ran
    "status",  # finished, refused, out of memory, time limit or failed
    "reason",  # why the row is not finished
    "phase",
    "mask",
    "device",
    "dtype",
    "B",
    "T",
    "H",
    "G",
    "D",
    "Dv",
    "ms_median",  # milliseconds of a call, without compilation
    "ms_q1",
    "ms_q3",
    "peak_memory_bytes",  # of a call, besides its inputs
    "error_y",  # largest absolute difference from naive in float64
    "error_gradients",  # the same, of dq, dk and dv
    "first_call_s",  # seconds of the first call, which loads libraries and compiles
)
MIN_CALLS = 2  # timed calls per round
MAX_CALLS = 10_000
INPUT_BYTES = 2**28  # inputs of consecutive calls: more than the caches of CPUs and GPUs


def list_cases(config: BenchConfig, device: torch.device) -> list[list[dict]]:
    """List all cases, in one group per dtype, phase, mask and T, from short to long contexts.

    Raises UserError for unknown backends.
    """
    backends = config.backends or [
        name
        for name, backend in BACKENDS.items()
        if device.type in backend.on and "training" not in backend.on[device.type].lacks
    ]
    for name in set(backends) - all_variants().keys():
        raise unknown_value("backends", name, all_variants())
    auto = str(resolve_dtype("auto", device)).removeprefix("torch.")
    dtypes = dict.fromkeys(name.replace("auto", auto) for name in config.dtypes)  # each once
    contexts = sorted(config.block_sizes)
    groups = []
    for dtype, phase, mask, T in itertools.product(dtypes, config.phases, config.masks, contexts):
        tokens = T if phase == "decode" else TOKENS_PER_CALL
        case = {
            "phase": phase,
            "mask": mask,
            "device": device.type,
            "dtype": dtype,
            "B": config.batch_size or max(1, tokens // T),
            "T": T,
            "H": config.n_head,
            "G": config.n_kv_head or config.n_head,
            "D": config.head_size,
            "Dv": config.value_size or config.head_size,
        }
        groups.append([dict.fromkeys(COLUMNS) | case | {"backend": name} for name in backends])
    return groups


def make_request(case: dict) -> AttentionRequest:
    """The shapes and options of a case's call."""
    return AttentionRequest(
        B=case["B"],
        Tq=1 if case["phase"] == "decode" else case["T"],
        Tk=case["T"],
        H=case["H"],
        G=case["G"],
        D=case["D"],
        Dv=case["Dv"],
        dtype=DTYPES[case["dtype"]],
        device=resolve_device(case["device"]),
        grad=case["phase"] == "forward+backward",
        window=mask_length(case["mask"], "window"),
        document_mask=mask_length(case["mask"], "documents") is not None,
    )


def make_inputs(case: dict, seed: int) -> tuple[list[Tensor], dict[str, Any]]:
    """Draw q, k, v and the gradient of y: standard normal numbers, the same for every backend.

    Returns them, and the masks of the call.
    """
    r = make_request(case)
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (r.B, r.Tq, r.H, r.D),
        (r.B, r.Tk, r.G, r.D),
        (r.B, r.Tk, r.G, r.Dv),
        (r.B, r.Tq, r.H, r.Dv),
    )
    inputs = [torch.randn(shape, generator=generator).to(r.device, r.dtype) for shape in shapes]
    if case["phase"] == "decode":  # the memory layout of the KV cache: (B, H, T, D)
        inputs = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in inputs]
    doc_ids = None
    if r.document_mask:
        document_length = mask_length(case["mask"], "documents")
        doc_ids = (torch.arange(r.Tk, device=r.device) // document_length).repeat(r.B, 1)
    return inputs, {"window": r.window, "doc_ids": doc_ids}


def compute_reference(case: dict, seed: int) -> list[np.ndarray]:
    """Compute y, and dq, dk and dv if the phase has a backward pass, with `naive` in float64.

    It runs on the CPU and for one key/value head after another, to limit the memory.
    """
    inputs, masks = make_inputs(case | {"device": "cpu"}, seed)
    has_backward = make_request(case).grad
    heads = [tensor.double().chunk(case["G"], dim=2) for tensor in inputs]
    results = []
    for q, k, v, dy in zip(*heads, strict=True):
        qkv = [tensor.detach().requires_grad_(has_backward) for tensor in (q, k, v)]
        y = naive(*qkv, **masks)
        gradients = torch.autograd.grad(y, qkv, dy) if has_backward else ()
        results.append((y.detach(), *gradients))
    return [torch.cat(parts, dim=2).numpy() for parts in zip(*results, strict=True)]


def make_call(case: dict, seed: int) -> Callable[[], tuple[Tensor, ...]]:
    """Make a function that calls the backend and returns y, dq, dk and dv, or y alone.

    Its first call has the inputs of the reference. Consecutive calls have different inputs, which
    are not in a cache of the device.
    """
    inputs, masks = make_inputs(case, seed)
    attend = partial(get_attention_fn(all_variants()[case["backend"]]), **masks)
    has_backward = make_request(case).grad
    count = 1 + min(MAX_CALLS, INPUT_BYTES // sum(tensor.nbytes for tensor in inputs))
    copies = [[x.clone().requires_grad_(has_backward) for x in inputs] for _ in range(count)]
    next_inputs = itertools.cycle(copies)

    def call() -> tuple[Tensor, ...]:
        q, k, v, dy = next(next_inputs)
        y = attend(q, k, v)
        if not has_backward:
            return (y,)
        return (y, *torch.autograd.grad(y, (q, k, v), dy))

    return call


def measure(
    case: dict, config: BenchConfig, reference: list[np.ndarray] | None = None
) -> tuple[dict, list[float]]:
    """Measure one round of a case in this process.

    reference: of compute_reference. Without it, errors stay unknown, as always for linear
        attention.
    Returns the row without times, and the seconds of each timed call. Raises UserError if the
    backend cannot run the case.
    """
    request = make_request(case)
    configure_backends(request.device, deterministic=False, tf32=config.tf32)
    # M_MMAP_THRESHOLD: freed blocks are returned; otherwise they would be in the peak, by chance
    call_glibc("mallopt", -3, 2**16)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # compile for the shapes of this case, as a new process does
    row = case | {"resolved": resolve(all_variants()[case["backend"]], request).resolved}
    call = make_call(case, config.seed)

    started = time.perf_counter()
    outputs = call()
    synchronize(request.device)
    row["first_call_s"] = time.perf_counter() - started
    if reference is not None and case["backend"] not in NON_SOFTMAX:
        pairs = zip(outputs, map(torch.from_numpy, reference), strict=True)
        errors = torch.stack([(output.detach().cpu() - y).abs().max() for output, y in pairs])
        row["error_y"] = errors[0].item()
        if request.grad:
            row["error_gradients"] = errors[1:].max().item()
    del outputs

    call_glibc("malloc_trim", 0)  # the peak would not count freed blocks that are used again
    reset_peak_memory(request.device)
    before = peak_memory_bytes(request.device)
    call()
    synchronize(request.device)
    peak = peak_memory_bytes(request.device)
    if peak is not None:
        row["peak_memory_bytes"] = max(0, peak - before)

    keep_freed_memory()  # as in train.py
    return row, time_calls(call, request.device, MIN_CALLS, config.seconds, MAX_CALLS)


def measure_group(
    group: list[dict], config: BenchConfig, pools: dict[str, ProcessPoolExecutor]
) -> list[dict]:
    """Measure the cases of one phase, mask, dtype and T. Returns a row per case.

    pools: empty at first. Processes are started when they are needed.
    """
    status, reference = call_process(
        pools, "reference", config.time_limit, compute_reference, group[0], config.seed
    )
    if status != "finished":
        reference = None  # the errors stay unknown
    rounds: dict[str, list] = {case["backend"]: [] for case in group}
    failures = {}
    for case in config.rounds * group:
        name = case["backend"]
        if name in failures:
            continue
        status, result = call_process(
            pools, name, config.time_limit, measure, case, config, reference
        )
        if status == "finished":
            rounds[name].append(result)
        else:
            failures[name] = case | {"status": status, "reason": result}
    return [failures.get(name) or summarize(results) for name, results in rounds.items()]


def summarize(rounds: list[tuple[dict, list[float]]]) -> dict:
    """Make a row of the results of `measure`."""
    row, _ = rounds[0]  # in later rounds, the first call does not compile
    seconds = np.concatenate([times for _, times in rounds])
    q1, median, q3 = (1000 * np.quantile(seconds, [0.25, 0.5, 0.75])).tolist()
    return row | {"status": "finished", "ms_median": median, "ms_q1": q1, "ms_q3": q3}


def call_process(
    pools: dict[str, ProcessPoolExecutor],
    name: str,
    time_limit: float,
    function: Callable,
    *arguments: Any,
) -> tuple[str, Any]:
    """Call a function of a module in the process `name`.

    time_limit: seconds, with the start of the process.
    Returns ("finished", result), or another status and the reason.
    """
    if name not in pools:
        pools[name] = ProcessPoolExecutor(
            1,
            multiprocessing.get_context("spawn"),
            # PR_SET_PDEATHSIG: if this process is killed, the new one is, too
            initializer=call_glibc,
            initargs=("prctl", 1, signal.SIGKILL),
        )
    try:
        # Ctrl-C reaches all processes of a terminal. A new process inherits that it is blocked.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        future = pools[name].submit(try_call, function, *arguments)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        answer = future.result(time_limit)
    except TimeoutError:
        answer = "time limit", f"took longer than {time_limit:g} s"
    except BrokenProcessPool:
        answer = "failed", "its process crashed, or Linux killed it for lack of memory"
    if answer[0] in ("time limit", "failed"):
        kill_processes(pools)  # one is busy or damaged, as it is after an error on a GPU
    return answer


def kill_processes(pools: dict[str, ProcessPoolExecutor]) -> None:
    """Kill the processes of all pools, even during a call. The next call starts new ones."""
    for process in multiprocessing.active_children():
        process.kill()
    pools.clear()


def try_call(function: Callable, *arguments: Any) -> tuple[str, Any]:
    """Call the function. Returns ("finished", result), or another status and the reason."""
    try:
        return "finished", function(*arguments)
    except UserError as error:
        return "refused", str(error).split("; set ")[0]  # the advice is for train.py
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        status = "out of memory" if is_out_of_memory(error) else "failed"
        return status, f"{type(error).__name__}: {first_line}"
    finally:
        torch.cuda.empty_cache()  # the processes of other backends need the memory
