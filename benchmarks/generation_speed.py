"""Compare the generation speed of trilGPT, transformers and nanoGPT: GPT-2 124M with the same random weights.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/generation_speed.py nanoGPT
    python benchmarks/generation_speed.py nanoGPT --device cuda --dtype bfloat16

Cases: one sample from 64 to 128 tokens, one from 1000 to 1024 tokens (all of block_size), and 32 samples from 64 to 128
tokens. Decoding is greedy, and all programs generate the same number of tokens, in turns. First, the logits of the
other programs are compared with those of trilGPT for each token of a sample. The exit code is 1 if they differ.

"tokens/s" includes the prefill. "ms per token" is the median decode step. "speed-up" is how many times as fast the
first row is, by the figure to its left. "of the bound" is the time to read all weights once, at the measured memory
speed, as a percentage of the median decode step.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from io import StringIO
from itertools import pairwise
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from nanogpt_parity import BLOCK_MODULES, OUTER_MODULES, import_model  # noqa: E402

from configs.cli import config_from_python  # noqa: E402
from model.attention import get_attention_fn  # noqa: E402
from model.generation.decode_linear import convert_linears  # noqa: E402
from model.generation.engine import Engine, Prompt  # noqa: E402
from model.gpt import GPT  # noqa: E402

VOCAB_SIZE = 50_257
GREEDY = config_from_python("sample", temperature=0.0)
MAX_LOGIT_DIFFERENCE = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
CASES = {
    "64 -> 128": (64, 64, 1),
    "1000 -> 1024": (1000, 24, 1),
    "32 x 64 -> 128": (64, 64, 32),
}  # tokens of the prompt, new tokens, samples


@dataclass
class Program:
    """A program to compare, and its measurements.

    generate(prompt (B, T), new) -> tokens (B, T + new), and the time at which each new token was finished.
    weight_bytes: read for each token. seconds, token_ms: one value per round; token_ms is the median over tokens.
    """

    name: str
    generate: Callable[[Tensor, int], tuple[Tensor, list[float]]]
    weight_bytes: int
    cases: tuple[str, ...] = tuple(CASES)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    token_ms: dict[str, list[float]] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=list(MAX_LOGIT_DIFFERENCE), help="dtype of the weights")
    arguments = parser.parse_args()
    if not (arguments.nanogpt / "model.py").is_file():
        parser.error(f"{arguments.nanogpt / 'model.py'} does not exist; pass the folder of a nanoGPT checkout")
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)

    torch.set_grad_enabled(False)
    torch.manual_seed(1)
    config = config_from_python("train", model="gpt2").model
    original = GPT(config, VOCAB_SIZE, get_attention_fn(config_from_python("sample").attention)).eval()
    for name, weight in original.named_parameters():
        if name.endswith("bias"):  # at zero, a missing bias would not be noticed
            nn.init.normal_(weight, std=0.02)
    prompts = {case: torch.randint(VOCAB_SIZE, (B, T)) for case, (T, _, B) in CASES.items()}

    theirs = [
        build_transformers_model(original).to(device, dtype),
        build_nanogpt_model(original, arguments.nanogpt).to(device, dtype),
    ]
    dtypes = ["float32", "bfloat16", "float16"] if device.type == "cpu" else [arguments.dtype]
    ours = {name: convert_linears(deepcopy(original).to(device), getattr(torch, name)) for name in dtypes}
    exact_gelu = GPT(
        replace(config, mlp="gelu"),
        VOCAB_SIZE,
        get_attention_fn(config_from_python("sample").attention),
        weights=original.state_dict(),
    )
    # nanoGPT has the exact GELU, and GPT-2 the tanh approximation
    exact_gelu = convert_linears(exact_gelu.to(device).eval(), dtype)
    differences = [
        compare_logits(model, other, prompts["64 -> 128"], device)
        for model, other in zip((ours[arguments.dtype], exact_gelu), theirs, strict=True)
    ]
    print(
        f"largest difference of logits from trilGPT: transformers {differences[0]:.1e}, nanoGPT {differences[1]:.1e}, "
        f"allowed {MAX_LOGIT_DIFFERENCE[arguments.dtype]:.0e}\n"
    )

    weight_sizes = weight_bytes(original)
    programs = [
        Program(f"trilGPT {name}", partial(generate, model, device), weight_sizes[name]) for name, model in ours.items()
    ]
    other_programs = {
        "transformers": partial(generate_transformers, theirs[0], device),
        "nanoGPT": partial(generate_nanogpt, theirs[1], device),
    }
    for name, function in other_programs.items():
        cases = ("64 -> 128", "1000 -> 1024") if name == "nanoGPT" else tuple(CASES)
        programs.append(Program(f"{name} {arguments.dtype}", function, weight_sizes[arguments.dtype], cases))
    memory_speed = measure_programs(programs, prompts, arguments.rounds, device, max(weight_sizes.values()))
    print_tables(programs, memory_speed)
    return int(not max(differences) <= MAX_LOGIT_DIFFERENCE[arguments.dtype])


def generate(model: GPT, device: torch.device, prompt: Tensor, new: int) -> tuple[Tensor, list[float]]:
    engine = Engine(model, GREEDY, len(prompt), prompt.shape[1] + new, cuda_graphs=True)
    engine.add([Prompt(row, seed=0) for row in prompt.tolist()])
    times = []
    for _ in range(new):
        engine.step()
        times.append(time.perf_counter())
    return torch.tensor([sequence.tokens for sequence in engine.sequences]), times


class TimeRecorder:
    """A transformers streamer, which records the time of each new token. It receives the prompt before the tokens."""

    def __init__(self):
        self.times = []

    def put(self, tokens: Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        del self.times[0]  # the prompt


def generate_transformers(
    model: nn.Module, device: torch.device, prompt: Tensor, new: int
) -> tuple[Tensor, list[float]]:
    prompt, streamer = prompt.to(device), TimeRecorder()
    mask = torch.ones_like(prompt)
    tokens = model.generate(
        prompt, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, streamer=streamer
    )
    return tokens, streamer.times


def generate_nanogpt(model: nn.Module, device: torch.device, prompt: Tensor, new: int) -> tuple[Tensor, list[float]]:
    """Without a KV cache, nanoGPT processes all tokens in each step. Assumes that all steps take the same time."""
    started = time.perf_counter()
    tokens = model.generate(prompt.to(device), new, top_k=1)
    if device.type == "cuda":
        torch.cuda.synchronize()
    token_s = (time.perf_counter() - started) / new
    return tokens, [started + token_s * number for number in range(1, new + 1)]


def measure_programs(
    programs: list[Program], prompts: dict, rounds: int, device: torch.device, memory_bytes: int
) -> list[float]:
    """Measure the programs in turns, and store their times -> memory speed of each round, in bytes per second.

    memory_bytes: size of the tensor whose sum measures the memory speed.
    """
    memory = torch.ones(memory_bytes // 4, device=device)
    memory_speed = []
    for program in programs:  # warmup
        program.generate(prompts["64 -> 128"], 4)
    for number in range(rounds):
        sum_seconds = [time_call(memory.sum, device)[1] for _ in range(5)]
        memory_speed.append(memory.nbytes / statistics.median(sum_seconds))
        for case, (T, new, _) in CASES.items():
            for program in programs:
                if case not in program.cases:
                    continue
                print(f"round {number + 1}/{rounds}  {case}  {program.name} ...", end="\r", file=sys.stderr, flush=True)
                (tokens, times), seconds = time_call(partial(program.generate, prompts[case], new), device)
                assert tokens.shape[1] == T + new and len(times) == new, f"{program.name} did not generate {new} tokens"
                gaps = [after - before for before, after in pairwise(times)]
                program.seconds.setdefault(case, []).append(seconds)
                program.token_ms.setdefault(case, []).append(1e3 * statistics.median(gaps))
    print(" " * 60, end="\r", file=sys.stderr)
    return memory_speed


def time_call(call: Callable[[], object], device: torch.device) -> tuple[object, float]:
    started = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - started


def print_tables(programs: list[Program], memory_speed: list[float]) -> None:
    console = Console(width=118, highlight=False)
    console.print(f"memory speed: {format_spread([value / 1e9 for value in memory_speed], '.1f')} GB/s")
    for case, (_, new, B) in CASES.items():
        table = Table(title=case, title_justify="left")
        for title in ("", "tokens/s", "speed-up", "ms per token", "speed-up", "of the bound"):
            table.add_column(title, justify="right" if title else "left")
        trilgpt = programs[0]
        for program in programs:
            if case not in program.cases:
                continue
            seconds, token_ms = program.seconds[case], program.token_ms[case]
            ratios = [theirs / ours for theirs, ours in zip(seconds, trilgpt.seconds[case], strict=True)]
            token_ratios = [theirs / ours for theirs, ours in zip(token_ms, trilgpt.token_ms[case], strict=True)]
            bound = [1e3 * program.weight_bytes / rate / ms for rate, ms in zip(memory_speed, token_ms, strict=True)]
            cells = [
                format_spread([B * new / value for value in seconds], ".1f"),
                format_spread(ratios, ".2f"),
                format_spread(token_ms, ".1f"),
                format_spread(token_ratios, ".2f"),
                format_spread([100 * value for value in bound], ".0f") + " %",
            ]
            table.add_row(program.name, *cells)
        console.print(table)


def format_spread(values: list[float], form: str) -> str:
    """Median, minimum and maximum."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def weight_bytes(model: GPT) -> dict[str, int]:
    """Bytes of the weights of all linear layers, by dtype. Each token reads them, and one row of each embedding."""
    count = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    return {"float32": 4 * count, "bfloat16": 2 * count, "float16": 2 * count}


def compare_logits(model: GPT, other: nn.Module, prompt: Tensor, device: torch.device, new: int = 64) -> float:
    """Largest difference between the logits of two models, for each token of a greedy sample of `model`."""
    recorded = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, logits: recorded.append(logits))
    sample, _ = generate(model, device, prompt, new)
    hook.remove()
    ours = torch.cat(recorded)[:, :VOCAB_SIZE].float()  # (new, V)
    inputs = sample[:, :-1].to(device)
    # without targets, nanoGPT returns only the logits of the last token
    theirs = other(inputs).logits if hasattr(other, "generation_config") else other(inputs, torch.zeros_like(inputs))[0]
    return (theirs[0, -new:].float() - ours).abs().max().item()


def build_transformers_model(model: GPT) -> nn.Module:
    """transformers' GPT-2 with the weights of `model`."""
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(GPT2Config()).eval()
    theirs.generation_config.eos_token_id, theirs.generation_config.pad_token_id = None, 0
    names = {"wte": "wte", "wpe": "wpe", "norm": "ln_f"} | {
        f"blocks.{i}.{ours}": f"h.{i}.{other}"
        for i in range(model.config.n_layer)
        for ours, other in BLOCK_MODULES.items()
    }
    source, target = model.state_dict(), theirs.transformer.state_dict()
    remaining = set(target)
    for ours, other in names.items():
        for kind in ("weight", "bias"):
            if f"{ours}.{kind}" in source:
                value = source[f"{ours}.{kind}"]
                is_transposed = ".c_" in other and kind == "weight"  # transformers stores inputs x outputs
                target[f"{other}.{kind}"].copy_(value.T if is_transposed else value[: len(target[f"{other}.{kind}"])])
                remaining.remove(f"{other}.{kind}")
    assert not remaining, remaining
    return theirs


def build_nanogpt_model(model: GPT, checkout: Path) -> nn.Module:
    """nanoGPT's GPT-2 with the weights of `model`."""
    module = import_model(checkout / "model.py")
    with redirect_stdout(StringIO()):
        theirs = module.GPT(module.GPTConfig(vocab_size=VOCAB_SIZE, dropout=0.0)).eval()
    source, target = model.state_dict(), theirs.state_dict()
    block_modules = {
        f"blocks.{i}.{ours}": f"transformer.h.{i}.{other}"
        for i in range(model.config.n_layer)
        for ours, other in BLOCK_MODULES.items()
    }
    remaining = set(target)
    for name, value in source.items():
        ours, kind = name.rsplit(".", 1)
        other = f"{({**OUTER_MODULES, **block_modules})[ours]}.{kind}"
        target[other].copy_(value[: len(target[other])])
        remaining.discard(other)
    assert not remaining, remaining
    return theirs


if __name__ == "__main__":
    sys.exit(main())
