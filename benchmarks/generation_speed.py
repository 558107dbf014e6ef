"""Compare the generation speed of trilGPT, transformers and nanoGPT: GPT-2 124M with the same random weights.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/generation_speed.py nanoGPT
    python benchmarks/generation_speed.py nanoGPT --device cuda --dtype bfloat16

Cases: one sample from 64 to 128 tokens, one from 1000 to 1024 tokens (all of block_size), and 32 samples from 64 to 128
tokens. Decoding is greedy, and all programs generate the same number of tokens, in turns. First, the logits of the
other programs are compared with those of trilGPT along its sample; the exit code is 1 if they differ.

"tokens/s" includes the prefill. "ms per token" is the median decode step. "of the bound" compares it with the time to
read all weights once, at the speed that this machine reads this amount of memory.
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
}  # prompt tokens, new tokens, samples


@dataclass
class Generator:
    """generate(prompt (B, T), new) -> tokens (B, T + new), and the time at which each new token was finished.

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
    parser.add_argument("--dtype", default="float32", choices=list(MAX_LOGIT_DIFFERENCE), help="of the weights")
    arguments = parser.parse_args()
    if not (arguments.nanogpt / "model.py").is_file():
        parser.error(f"{arguments.nanogpt / 'model.py'} does not exist; name a checkout of nanoGPT")
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)

    torch.set_grad_enabled(False)
    torch.manual_seed(1)
    config = config_from_python("train", model="gpt2").model
    original = GPT(config, VOCAB_SIZE, get_attention_fn(config_from_python("sample").attention)).eval()
    for name, weight in original.named_parameters():
        if name.endswith("bias"):  # at zero, a missing bias would not be noticed
            nn.init.normal_(weight, std=0.02)
    prompts = {case: torch.randint(VOCAB_SIZE, (B, T)) for case, (T, _, B) in CASES.items()}

    theirs = [hugging_face(original).to(device, dtype), nano_gpt(original, arguments.nanogpt).to(device, dtype)]
    dtypes = {"cpu": ["float32", "bfloat16", "float16"]}.get(device.type, [arguments.dtype])
    ours = {name: convert_linears(deepcopy(original).to(device), getattr(torch, name)) for name in dtypes}
    exact = GPT(
        replace(config, mlp="gelu"),
        VOCAB_SIZE,
        get_attention_fn(config_from_python("sample").attention),
        weights=original.state_dict(),
    )
    exact = convert_linears(exact.to(device).eval(), dtype)  # nanoGPT has the exact GELU, GPT-2 the tanh approximation
    differences = [
        compare_logits(model, other, prompts["64 -> 128"], device)
        for model, other in zip((ours[arguments.dtype], exact), theirs, strict=True)
    ]
    worst = max(differences)
    print(
        f"largest difference of logits from trilGPT: transformers {differences[0]:.1e}, nanoGPT {differences[1]:.1e}, "
        f"allowed {MAX_LOGIT_DIFFERENCE[arguments.dtype]:.0e}\n"
    )

    read = weight_bytes(original)
    generators = [
        Generator(f"trilGPT {name}", partial(generate, model, device), read[name]) for name, model in ours.items()
    ]
    other_programs = {
        "transformers": partial(generate_transformers, theirs[0], device),
        "nanoGPT": partial(generate_nanogpt, theirs[1], device),
    }
    for name, function in other_programs.items():
        cases = ("64 -> 128", "1000 -> 1024") if name == "nanoGPT" else tuple(CASES)
        generators.append(Generator(f"{name} {arguments.dtype}", function, read[arguments.dtype], cases))
    speed = measure(generators, prompts, arguments.rounds, device, max(read.values()))
    report(generators, speed)
    return int(not worst <= MAX_LOGIT_DIFFERENCE[arguments.dtype])


def generate(model: GPT, device: torch.device, prompt: Tensor, new: int) -> tuple[Tensor, list[float]]:
    engine = Engine(model, GREEDY, len(prompt), prompt.shape[1] + new, cuda_graphs=True)
    engine.add([Prompt(row, seed=0) for row in prompt.tolist()])
    stamps = []
    for _ in range(new):
        engine.step()
        stamps.append(time.perf_counter())
    return torch.tensor([row.tokens for row in engine.sequences]), stamps


class Stamps:
    """A streamer of transformers, which receives the prompt and then each token: records the times."""

    def __init__(self):
        self.stamps = []

    def put(self, tokens: Tensor) -> None:
        self.stamps.append(time.perf_counter())

    def end(self) -> None:
        del self.stamps[0]


def generate_transformers(
    model: nn.Module, device: torch.device, prompt: Tensor, new: int
) -> tuple[Tensor, list[float]]:
    prompt, streamer = prompt.to(device), Stamps()
    mask = torch.ones_like(prompt)
    made = model.generate(
        prompt, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, streamer=streamer
    )
    return made, streamer.stamps


def generate_nanogpt(model: nn.Module, device: torch.device, prompt: Tensor, new: int) -> tuple[Tensor, list[float]]:
    """nanoGPT has no KV cache: all tokens are assumed to take the same time."""
    started = time.perf_counter()
    made = model.generate(prompt.to(device), new, top_k=1)
    if device.type == "cuda":
        torch.cuda.synchronize()
    token_s = (time.perf_counter() - started) / new
    return made, [started + token_s * number for number in range(1, new + 1)]


def measure(generators: list[Generator], prompts: dict, rounds: int, device: torch.device, most: int) -> list[float]:
    """Measure the generators in turns, and store their times -> bytes per second that memory is read at, by round."""
    memory = torch.ones(most // 4, device=device)
    speed = []
    for generator in generators:  # warm-up
        generator.generate(prompts["64 -> 128"], 4)
    for number in range(rounds):
        passes = [timed(memory.sum, device)[1] for _ in range(5)]
        speed.append(memory.nbytes / statistics.median(passes))
        for case, (T, new, _) in CASES.items():
            for generator in generators:
                if case not in generator.cases:
                    continue
                print(
                    f"round {number + 1}/{rounds}  {case}  {generator.name} ...", end="\r", file=sys.stderr, flush=True
                )
                (made, stamps), seconds = timed(partial(generator.generate, prompts[case], new), device)
                assert made.shape[1] == T + new and len(stamps) == new, (
                    f"{generator.name} did not generate {new} tokens"
                )
                gaps = [after - before for before, after in pairwise(stamps)]
                generator.seconds.setdefault(case, []).append(seconds)
                generator.token_ms.setdefault(case, []).append(1e3 * statistics.median(gaps))
    print(" " * 60, end="\r", file=sys.stderr)
    return speed


def timed(call: Callable[[], object], device: torch.device) -> tuple[object, float]:
    started = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - started


def report(generators: list[Generator], speed: list[float]) -> None:
    console = Console(width=118, highlight=False)
    console.print(f"memory read at {spread([value / 1e9 for value in speed], '.1f')} GB/s")
    for case, (_, new, B) in CASES.items():
        table = Table(title=case, title_justify="left")
        for title in ("", "tokens/s", "speed-up", "ms per token", "speed-up", "of the bound"):
            table.add_column(title, justify="right" if title else "left")
        trilgpt = generators[0]
        for generator in generators:
            if case not in generator.cases:
                continue
            seconds, token = generator.seconds[case], generator.token_ms[case]
            ratios = [theirs / ours for theirs, ours in zip(seconds, trilgpt.seconds[case], strict=True)]
            token_ratios = [theirs / ours for theirs, ours in zip(token, trilgpt.token_ms[case], strict=True)]
            bound = [1e3 * generator.weight_bytes / rate / ms for rate, ms in zip(speed, token, strict=True)]
            cells = [
                spread([B * new / value for value in seconds], ".1f"),
                spread(ratios, ".2f"),
                spread(token, ".1f"),
                spread(token_ratios, ".2f"),
                spread([100 * value for value in bound], ".0f") + " %",
            ]
            table.add_row(generator.name, *cells)
        console.print(table)


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def weight_bytes(model: GPT) -> dict[str, int]:
    """Bytes of the linear layers by dtype, which each token reads. (Of the embeddings, it reads one row.)"""
    numbers = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    return {"float32": 4 * numbers, "bfloat16": 2 * numbers, "float16": 2 * numbers}


def compare_logits(model: GPT, other: nn.Module, prompt: Tensor, device: torch.device, new: int = 64) -> float:
    """Largest difference of the logits along a greedy sample of `model`."""
    recorded = []
    hook = model.lm_head.register_forward_hook(lambda module, inputs, logits: recorded.append(logits))
    sample, _ = generate(model, device, prompt, new)
    hook.remove()
    ours = torch.cat(recorded)[:, :VOCAB_SIZE].float()  # (new, V)
    inputs = sample[:, :-1].to(device)
    # without targets, nanoGPT returns only the logits of the last token
    theirs = other(inputs).logits if hasattr(other, "generation_config") else other(inputs, torch.zeros_like(inputs))[0]
    return (theirs[0, -new:].float() - ours).abs().max().item()


def hugging_face(model: GPT) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(GPT2Config()).eval()
    theirs.generation_config.eos_token_id, theirs.generation_config.pad_token_id = None, 0
    names = {"wte": "wte", "wpe": "wpe", "norm": "ln_f"} | {
        f"blocks.{i}.{ours}": f"h.{i}.{other}"
        for i in range(model.config.n_layer)
        for ours, other in BLOCK_MODULES.items()
    }
    source, target = model.state_dict(), theirs.transformer.state_dict()
    left = set(target)
    for ours, other in names.items():
        for kind in ("weight", "bias"):
            if f"{ours}.{kind}" in source:
                value = source[f"{ours}.{kind}"]
                flip = ".c_" in other and kind == "weight"  # transformers stores inputs x outputs
                target[f"{other}.{kind}"].copy_(value.T if flip else value[: len(target[f"{other}.{kind}"])])
                left.remove(f"{other}.{kind}")
    assert not left, left
    return theirs


def nano_gpt(model: GPT, checkout: Path) -> nn.Module:
    module = import_model(checkout / "model.py")
    with redirect_stdout(StringIO()):
        theirs = module.GPT(module.GPTConfig(vocab_size=VOCAB_SIZE, dropout=0.0)).eval()
    source, target = model.state_dict(), theirs.state_dict()
    inside = {
        f"blocks.{i}.{ours}": f"transformer.h.{i}.{other}"
        for i in range(model.config.n_layer)
        for ours, other in BLOCK_MODULES.items()
    }
    left = set(target)
    for name, value in source.items():
        place, kind = name.rsplit(".", 1)
        other = f"{({**OUTER_MODULES, **inside})[place]}.{kind}"
        target[other].copy_(value[: len(target[other])])
        left.discard(other)
    assert not left, left
    return theirs


if __name__ == "__main__":
    sys.exit(main())
