"""Checks the times of bench.py with torch.utils.benchmark and separate implementations of attention.

    python benchmarks/attention_check.py 1024 4096        contexts; 8 heads of 64, float32, CPU

Both sides time the same call, in separate processes and in turns, so that a change of the machine's speed affects both.
The table shows medians over ROUNDS, and their ratio. In phase decode, its last column shows the bytes of keys and
values that a call reads, and the bytes per second. The first line shows the memory bandwidth for comparison.
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

from comparison.bench.cases import build_groups, measure
from comparison.bench.config import BenchConfig

ROUNDS = 5
SECONDS_PER_ROUND = 0.5
CACHE_BYTES = 64 * 2**20  # larger than the caches of common CPUs
PHASES = ("forward", "forward+backward", "decode")
H, D = 8, 64


def naive(q, k, v):
    """Causal attention from its formula. q, k, v: (1, H, T, D); a single query attends to all keys."""
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


def time_with_torch(variant: str, phase: str, T: int) -> float:
    """Measure the seconds of a call with torch.utils.benchmark."""
    Tq, has_backward = 1 if phase == "decode" else T, phase == "forward+backward"

    def draw(length):
        if phase == "decode":
            return torch.randn(1, H, length, D)
        return torch.randn(1, length, H, D).transpose(
            1, 2
        )  # the memory layout of a linear layer's output

    def call():
        q, k, v, dy = next(next_inputs)
        y = VARIANTS[variant](q, k, v)
        if has_backward:
            torch.autograd.grad(y, (q, k, v), dy)

    size = 2 * (T + Tq) * H * D * 4
    inputs = [[draw(length) for length in (Tq, T, T, Tq)] for _ in range(1 + CACHE_BYTES // size)]
    for tensor in itertools.chain(*(qkv for *qkv, _ in inputs)):
        tensor.requires_grad_(has_backward)
    next_inputs = itertools.cycle(inputs)
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
    ((case,),) = build_groups(config, torch.device("cpu"))
    _, seconds = measure(case, config, Path("no reference"))
    return statistics.median(seconds)


def measure_bandwidth() -> float:
    """Measure the bytes per second that a sum over a large tensor reads."""
    x = torch.ones(CACHE_BYTES)
    timer = Timer("x.sum()", globals={"x": x}, num_threads=torch.get_num_threads())
    return x.nbytes / timer.blocked_autorange(min_run_time=1.0).median


def main(Ts: list[int]) -> None:
    context = get_context("spawn")
    with ProcessPoolExecutor(1, context) as bench, ProcessPoolExecutor(1, context) as check:
        print(f"memory bandwidth: {check.submit(measure_bandwidth).result() / 1e9:.1f} GB/s")
        print(
            f"{'phase':<17}{'T':>6}  {'attention':<10}{'bench, ms':>10}{'check, ms':>10}{'ratio':>7}"
        )
        for phase, T, variant in itertools.product(PHASES, Ts, VARIANTS):
            arguments = variant, phase, T
            pairs = [
                (
                    bench.submit(time_with_bench, *arguments).result(),
                    check.submit(time_with_torch, *arguments).result(),
                )
                for _ in range(ROUNDS)
            ]
            bench_s, check_s = (statistics.median(seconds) for seconds in zip(*pairs, strict=True))
            bytes_read = ""
            if phase == "decode":
                size = 2 * T * H * D * 4
                bytes_read = f"  {size / 2**20:.0f} MiB of keys and values at {size / bench_s / 1e9:.1f} GB/s"
            times = f"{1e3 * bench_s:>10.3f}{1e3 * check_s:>10.3f}{bench_s / check_s:>7.2f}"
            print(f"{phase:<17}{T:>6}  {variant:<10}{times}{bytes_read}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("T", type=int, nargs="*", default=[1024, 4096], help="context lengths")
    main(parser.parse_args().T)
