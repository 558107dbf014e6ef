"""Checks the times of bench.py with torch.utils.benchmark and another implementation of attention.

    python benchmarks/attention_check.py 1024 4096        contexts; 8 heads of 64, float32, CPU

Both sides time the same call, in separate processes and in turns, so that a change of the machine's
speed affects both. The table shows medians over ROUNDS, and their ratio. In phase decode, its last
column shows the bytes of keys and values that a call reads, and the bytes per second. The first
line shows the memory bandwidth for comparison.
"""

import argparse
import itertools
import math
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer

sys.path.insert(0, str(Path(__file__).parent.parent))


from attention_bench.config import BenchConfig
from attention_bench.measure import list_cases, measure

ROUNDS = 5
SECONDS_PER_ROUND = 0.5
CACHE_BYTES = 64 * 2**20  # larger than the caches of common CPUs
PHASES = ("forward", "forward+backward", "decode")
H = 8
D = 64


def naive(q, k, v):
    """Causal attention from its formula. q, k, v: (1, H, T, D). One query attends to all keys."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(D)
    Tq, Tk = scores.shape[-2:]
    is_masked = torch.ones(Tq, Tk, dtype=torch.bool).triu(Tk - Tq + 1)
    return F.softmax(scores.masked_fill(is_masked, -math.inf), dim=-1) @ v


def sdpa(q, k, v, kernel):
    with sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] == k.shape[2])


VARIANTS = {
    "naive": naive,
    "sdpa:math": lambda *qkv: sdpa(*qkv, SDPBackend.MATH),
    "flash": lambda *qkv: sdpa(*qkv, SDPBackend.FLASH_ATTENTION),
}


def kv_bytes(T: int) -> int:
    """Size of the keys and values of T tokens in float32."""
    return 2 * T * H * D * 4


def draw(T: int, phase: str) -> torch.Tensor:
    """Random numbers (1, H, T, D), with the memory layout of a KV cache or a linear layer."""
    if phase == "decode":
        return torch.randn(1, H, T, D)
    return torch.randn(1, T, H, D).transpose(1, 2)


def time_with_torch(variant: str, phase: str, T: int) -> float:
    """Measure the seconds of a call with torch.utils.benchmark."""
    Tq = 1 if phase == "decode" else T
    has_backward = phase == "forward+backward"
    attend = VARIANTS[variant]
    inputs = []
    # Different inputs in turns, of more than the cache: a call does not find its inputs there.
    for _ in range(1 + CACHE_BYTES // (kv_bytes(T) + kv_bytes(Tq))):
        q, k, v, dy = [draw(length, phase) for length in (Tq, T, T, Tq)]
        for x in (q, k, v):
            x.requires_grad_(has_backward)
        inputs.append((q, k, v, dy))
    next_inputs = itertools.cycle(inputs)

    def call():
        q, k, v, dy = next(next_inputs)
        y = attend(q, k, v)
        if has_backward:
            torch.autograd.grad(y, (q, k, v), dy)

    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=SECONDS_PER_ROUND).median


def time_with_bench(variant: str, phase: str, T: int) -> float:
    """Measure the seconds of a call with the code of bench.py."""
    config = BenchConfig(
        device="cpu",
        dtypes=["float32"],
        backends=[variant],
        phases=[phase],
        block_sizes=[T],
        n_head=H,
        head_size=D,
        seconds=SECONDS_PER_ROUND,
    )
    ((case,),) = list_cases(config, torch.device("cpu"))
    _, seconds = measure(case, config)
    return statistics.median(seconds)


def measure_bandwidth() -> float:
    """Measure the bytes per second that a sum over a large tensor reads."""
    x = torch.ones(CACHE_BYTES)
    timer = Timer("x.sum()", globals={"x": x}, num_threads=torch.get_num_threads())
    return x.nbytes / timer.blocked_autorange(min_run_time=1.0).median


def main(contexts: list[int]) -> None:
    spawn = get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as bench, ProcessPoolExecutor(1, spawn) as check:
        bandwidth = check.submit(measure_bandwidth).result()
        print(f"memory bandwidth: {bandwidth / 1e9:.1f} GB/s")
        header = f"{'phase':<17}{'T':>6}  {'attention':<10}"
        print(f"{header}{'bench, ms':>10}{'check, ms':>10}{'ratio':>7}")
        for phase, T, variant in itertools.product(PHASES, contexts, VARIANTS):
            bench_times = []
            check_times = []
            for _ in range(ROUNDS):
                bench_times.append(bench.submit(time_with_bench, variant, phase, T).result())
                check_times.append(check.submit(time_with_torch, variant, phase, T).result())
            bench_s = statistics.median(bench_times)
            check_s = statistics.median(check_times)
            line = f"{phase:<17}{T:>6}  {variant:<10}"
            line += f"{1e3 * bench_s:>10.3f}{1e3 * check_s:>10.3f}{bench_s / check_s:>7.2f}"
            if phase == "decode":
                gigabytes = kv_bytes(T) / 1e9
                line += f"  {kv_bytes(T) / 2**20:.0f} MiB of keys and values"
                line += f" at {gigabytes / bench_s:.1f} GB/s"
            print(line, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("T", type=int, nargs="*", default=[1024, 4096], help="context lengths")
    main(parser.parse_args().T)
