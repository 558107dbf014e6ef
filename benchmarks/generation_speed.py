"""Compare the generation speed of trilGPT and other programs: GPT-2 124M with the same random weights.

    pip install transformers ctranslate2 llama-cpp-python gguf openvino-genai optimum-intel
    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/generation_speed.py nanoGPT
    python benchmarks/generation_speed.py nanoGPT --device cuda --dtype bfloat16

Programs that are not installed are skipped. optimum-intel needs its own version of transformers.

Cases: one sample from 64 to 128 tokens, one from 1000 to 1024 tokens (all of block_size), and 4 and 32 samples from 64
to 128 tokens. Decoding is greedy, and all programs generate the same number of tokens, in turns. First, the logits of
each program are compared with the logits of trilGPT in float32. The exit code is 1 if they differ.

"tokens/s" includes the prefill. "ms per token" is the median decode step. "speed-up" is how many times as fast trilGPT
is with weights of the same dtype, by the figure to its left. "of the bound" is the time to read all weights once, at
the measured memory speed, as a percentage of the median decode step.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from generation_programs import (
    BUILDERS,
    CPU_ONLY,
    MAX_SAMPLES,
    VOCAB_SIZE,
    Setup,
    build_model,
    measure_difference,
    measure_speed,
    missing_package,
    start,
)
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

PYTORCH_DTYPES = ("float32", "bfloat16", "float16")
CPU_DTYPES = {
    "trilGPT": ("float32", "bfloat16", "int8"),
    "CTranslate2": ("float32", "int8"),
    "llama.cpp": ("float32", "int8"),
    "OpenVINO": ("float32", "bfloat16", "int8"),
}  # programs that are not listed run with --dtype
MAX_LOGIT_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02, "int8": 0.2}
LLAMA_CPP_DIFFERENCE = 2e-3  # llama.cpp looks up the GELU in a table of float16 numbers
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
CASES = {
    "64 -> 128": (64, 64, 1),
    "1000 -> 1024": (1000, 24, 1),
    "4 x 64 -> 128": (64, 64, 4),
    "32 x 64 -> 128": (64, 64, 32),
}  # tokens of the prompt, new tokens, samples


@dataclass
class Candidate:
    """A program with one dtype, its process, and its measurements: one value per round for each case.

    token_ms: the median decode step.
    """

    setup: Setup
    process: ProcessPoolExecutor
    seconds: dict[str, list[float]] = field(default_factory=dict)
    token_ms: dict[str, list[float]] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return f"{self.setup.name} {self.setup.dtype}"

    def runs(self, case: str) -> bool:
        return CASES[case][2] <= MAX_SAMPLES.get(self.setup.name, 32)


def main() -> int:
    arguments = parse_arguments()
    torch.manual_seed(2)
    prompts = {case: torch.randint(VOCAB_SIZE, (B, T)) for case, (T, _, B) in CASES.items()}
    with TemporaryDirectory() as folder:
        candidates = start_programs(arguments, Path(folder))
        is_different = print_differences(candidates, prompts["64 -> 128"][0])
        memory_speed = measure_programs(
            candidates, prompts, arguments.rounds, torch.device(arguments.device)
        )
    print_tables(candidates, memory_speed)
    for candidate in candidates:
        candidate.process.shutdown()
    return int(is_different)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("nanogpt", type=Path, nargs="?", help="a checkout of nanoGPT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--programs", nargs="+", default=list(BUILDERS)[1:], choices=list(BUILDERS)[1:]
    )
    parser.add_argument(
        "--dtype", default="float32", choices=PYTORCH_DTYPES, help="weights of the PyTorch programs"
    )
    arguments = parser.parse_args()
    if arguments.nanogpt is not None and not (arguments.nanogpt / "model.py").is_file():
        parser.error(
            f"{arguments.nanogpt / 'model.py'} does not exist; pass the folder of a nanoGPT checkout"
        )
    return arguments


def start_programs(arguments: argparse.Namespace, folder: Path) -> list[Candidate]:
    """Start every program that is installed. On a CPU, some run with several dtypes."""
    context, candidates = multiprocessing.get_context("spawn"), []
    for name in ["trilGPT", *arguments.programs]:
        if name == "nanoGPT" and arguments.nanogpt is None:
            print("nanoGPT is skipped; pass the folder of a checkout", file=sys.stderr)
            continue
        if package := missing_package(name):
            print(f"{name} is skipped; it needs the package {package}", file=sys.stderr)
            continue
        on_cpu = arguments.device == "cpu"
        if not on_cpu and name in CPU_ONLY:
            continue
        for dtype in CPU_DTYPES.get(name, [arguments.dtype]) if on_cpu else [arguments.dtype]:
            setup = Setup(name, dtype, arguments.device, arguments.nanogpt, folder)
            candidates.append(Candidate(setup, ProcessPoolExecutor(1, context, start, (setup,))))
    return candidates


def print_differences(candidates: list[Candidate], tokens: Tensor) -> bool:
    """Print the differences between the logits of each program and of trilGPT. Returns whether any is too large."""
    is_different = False
    for candidate in candidates:
        difference = candidate.process.submit(measure_difference, tokens).result()
        allowed = MAX_LOGIT_DIFFERENCE[candidate.setup.dtype]
        if candidate.setup.name == "llama.cpp":
            allowed = max(allowed, LLAMA_CPP_DIFFERENCE)
        is_different |= not difference <= allowed
        print(
            f"largest difference of logits, {candidate.label}: {difference:.1e}, allowed {allowed:.0e}"
        )
    return is_different


def measure_programs(
    candidates: list[Candidate], prompts: dict[str, Tensor], rounds: int, device: torch.device
) -> list[float]:
    """Measure the programs in turns, and store their times. Returns the memory speed of each round, in bytes/s."""
    memory = torch.ones(count_weights(), device=device)
    memory_speed = []
    for candidate in candidates:  # warmup
        for case in CASES:
            if candidate.runs(case):
                candidate.process.submit(measure_speed, prompts[case][:, :64], 4).result()
    for number in range(rounds):
        sum_seconds = [time_sum(memory) for _ in range(5)]
        memory_speed.append(memory.nbytes / statistics.median(sum_seconds))
        for case, (_, new, _) in CASES.items():
            for candidate in candidates:
                if not candidate.runs(case):
                    continue
                label = f"round {number + 1}/{rounds}  {case}  {candidate.label}"
                if sys.stderr.isatty():
                    print(f"\r\033[K{label} ...", end="", file=sys.stderr)
                seconds, token_ms = candidate.process.submit(
                    measure_speed, prompts[case], new
                ).result()
                candidate.seconds.setdefault(case, []).append(seconds)
                candidate.token_ms.setdefault(case, []).append(token_ms)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    return memory_speed


def count_weights() -> int:
    """Weights of all linear layers. Each token reads them, and one row of each embedding."""
    return sum(
        module.weight.numel() for module in build_model().modules() if isinstance(module, nn.Linear)
    )


def time_sum(memory: Tensor) -> float:
    started = time.perf_counter()
    memory.sum().item()
    return time.perf_counter() - started


def print_tables(candidates: list[Candidate], memory_speed: list[float]) -> None:
    console = Console(width=118, highlight=False)
    console.print(
        f"memory speed: {format_spread([value / 1e9 for value in memory_speed], '.1f')} GB/s"
    )
    references = {c.setup.dtype: c for c in candidates if c.setup.name == "trilGPT"}
    weights = count_weights()
    for case, (_, new, B) in CASES.items():
        table = Table(title=case, title_justify="left")
        for title in ("", "tokens/s", "speed-up", "ms per token", "speed-up", "of the bound"):
            table.add_column(title, justify="right" if title else "left")
        for candidate in candidates:
            if not candidate.runs(case):
                continue
            dtype, seconds, token_ms = (
                candidate.setup.dtype,
                candidate.seconds[case],
                candidate.token_ms[case],
            )
            reference = references[dtype]
            weight_bytes = weights * WEIGHT_BYTES[dtype]
            bound = [
                1e3 * weight_bytes / rate / ms
                for rate, ms in zip(memory_speed, token_ms, strict=True)
            ]
            cells = [
                format_spread([B * new / value for value in seconds], ".1f"),
                "" if candidate is reference else format_ratios(seconds, reference.seconds[case]),
                format_spread(token_ms, ".1f"),
                "" if candidate is reference else format_ratios(token_ms, reference.token_ms[case]),
                format_spread([100 * value for value in bound], ".0f") + " %",
            ]
            table.add_row(candidate.label, *cells)
        console.print(table)


def format_ratios(theirs: list[float], ours: list[float]) -> str:
    return format_spread([a / b for a, b in zip(theirs, ours, strict=True)], ".2f")


def format_spread(values: list[float], form: str) -> str:
    """Median, minimum and maximum."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


if __name__ == "__main__":
    sys.exit(main())
