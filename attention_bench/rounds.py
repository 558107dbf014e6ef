"""Measures groups of cases: each backend has a process, and the backends take turns in rounds.

If the machine becomes slower or faster during the bench, all backends are therefore affected
equally. A crash, a time limit or a lack of memory ends one row and not the bench.
"""

import multiprocessing
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import numpy as np
import torch

from attention_bench.config import BenchConfig, mask_length
from attention_bench.measure import compute_reference, make_request, measure
from common.errors import UserError, is_out_of_memory
from common.process import call_glibc
from model.attention import NON_SOFTMAX
from model.flops import attention_flops


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
    q1, median, q3 = np.quantile(seconds, [0.25, 0.5, 0.75]).tolist()
    times = {"ms_median": 1000 * median, "ms_q1": 1000 * q1, "ms_q3": 1000 * q3}
    return row | times | {"status": "finished", "flops_per_second": count_flops(row) / median}


def count_flops(case: dict) -> int:
    """Count the FLOPs of a call. A backward pass takes twice the FLOPs of a forward pass."""
    request = make_request(case)
    attention_type = case["backend"] if case["backend"] in NON_SOFTMAX else "softmax"
    forward = attention_flops(request, attention_type, mask_length(case["mask"], "documents"))
    return 3 * forward if request.grad else forward


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
        # PR_SET_PDEATHSIG: if this process is killed, the new one is, too
        options = {"initializer": call_glibc, "initargs": ("prctl", 1, signal.SIGKILL)}
        pools[name] = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), **options)
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
