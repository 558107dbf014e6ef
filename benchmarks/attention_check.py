"""Hold what bench.py measures against torch.utils.benchmark, on attention that is written here.

    python benchmarks/attention_check.py 1024 4096        for these contexts; 8 heads of 64, float32, on a CPU

Both sides time the same call in processes of their own, in turns, so that a machine that drifts does so for both; the
ratio is of the medians over ROUNDS. For decode it says as well how many bytes of keys and values a call has to read,
and how fast it reads them, beside the speed at which the machine reads memory.
"""

import itertools
import math
import statistics
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer

sys.path.insert(0, str(Path(__file__).parent.parent))

from compare.bench.cases import BenchSettings, Case, measure
from compare.bench.worker import run_isolated
from model.attention import all_variants

ROUNDS, SECONDS = 5, 0.5
MORE_THAN_CACHES = 64 * 2**20  # bytes
PHASES = ("forward", "forward+backward", "decode")
H, D = 8, 64


def by_hand(q, k, v):
    """Causal attention by its formula; q, k, v (1, H, T, D), a single query sees all keys."""
    scores = q @ k.transpose(-1, -2) / math.sqrt(D)
    Tq, Tk = scores.shape[-2:]
    hidden = torch.ones(Tq, Tk, dtype=torch.bool).triu(Tk - Tq + 1)
    return F.softmax(scores.masked_fill(hidden, -math.inf), dim=-1) @ v


def by_torch(q, k, v, kernel):
    with sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] == k.shape[2])


WAYS = {
    "naive": by_hand,
    "sdpa:math": lambda *qkv: by_torch(*qkv, SDPBackend.MATH),
    "flash": lambda *qkv: by_torch(*qkv, SDPBackend.FLASH_ATTENTION),
}


def theirs(way: str, phase: str, T: int) -> float:
    """Seconds of a call, by torch.utils.benchmark."""
    Tq, gradients = 1 if phase == "decode" else T, phase == "forward+backward"

    def draw(length):
        if phase == "decode":
            return torch.randn(1, H, length, D)
        return torch.randn(1, length, H, D).transpose(1, 2)  # as they come out of a linear layer

    def call():
        q, k, v, dy = next(turn)
        y = WAYS[way](q, k, v)
        if gradients:
            torch.autograd.grad(y, (q, k, v), dy)

    size = 2 * (T + Tq) * H * D * 4
    inputs = [[draw(length) for length in (Tq, T, T, Tq)] for _ in range(1 + MORE_THAN_CACHES // size)]
    for each in itertools.chain(*(qkv for *qkv, _ in inputs)):
        each.requires_grad_(gradients)
    turn = itertools.cycle(inputs)
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return timer.blocked_autorange(min_run_time=SECONDS).median


def ours(way: str, phase: str, T: int) -> float:
    """Seconds of a call, as bench.py has them."""
    case = Case(all_variants()[way], phase, torch.device("cpu"), torch.float32, B=1, T=T, H=H, G=H, D=D, Dv=D)
    settings = BenchSettings(
        None, None, 0, False, False, seed=1, rounds=1, repeats=2, seconds=SECONDS, time_limit=math.inf
    )
    return statistics.median(measure(case, settings, Path("no reference")).seconds)


def read_bandwidth() -> float:
    """Bytes per second that a sum reads."""
    x = torch.ones(MORE_THAN_CACHES)
    timer = Timer("x.sum()", globals={"x": x}, num_threads=torch.get_num_threads())
    return x.nbytes / timer.blocked_autorange(min_run_time=1.0).median


def main(Ts: list[int]) -> None:
    print(f"a sum reads memory at {run_isolated(read_bandwidth) / 1e9:.1f} GB/s")
    print(f"{'phase':<17}{'T':>6}  {'attention':<10}{'bench, ms':>10}{'check, ms':>10}{'ratio':>7}")
    for phase, T, way in itertools.product(PHASES, Ts, WAYS):
        pairs = [(run_isolated(ours, way, phase, T), run_isolated(theirs, way, phase, T)) for _ in range(ROUNDS)]
        a, b = (statistics.median(times) for times in zip(*pairs, strict=True))
        read = ""
        if phase == "decode":
            size = 2 * T * H * D * 4
            read = f"  {size / 2**20:.0f} MiB of keys and values at {size / a / 1e9:.1f} GB/s"
        print(f"{phase:<17}{T:>6}  {way:<10}{1e3 * a:>10.3f}{1e3 * b:>10.3f}{a / b:>7.2f}{read}", flush=True)


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or [1024, 4096])
