"""Tokens per second of trilGPT, transformers and nanoGPT in turns: GPT-2 124M with the same random weights.

    git clone https://github.com/karpathy/nanoGPT
    python benchmarks/generation_speed.py nanoGPT
    python benchmarks/generation_speed.py nanoGPT --device cuda --dtype bfloat16

One text from 64 tokens to 128, one from 1000 to 1024, the whole of block_size, and 32 texts from 64 to 128. All are
greedy and make the same number of tokens. First each peer reads what ours has written, and its logits are held against
those by which ours wrote it. Seconds include reading the prompt; the column "a token more" does not: it is what a token
takes once the text is under way, and beside it stands the bound from reading all weights once, at the speed at which
this machine was seen to read that much memory. The exit code is 1 where logits differ.
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

from nanogpt_parity import INSIDE, OUTSIDE, import_model  # noqa: E402

from configs.cli import config_from_python  # noqa: E402
from model.attention import get_attention_fn  # noqa: E402
from model.generation.decode_linear import convert_linears  # noqa: E402
from model.generation.engine import Engine, Prompt  # noqa: E402
from model.gpt import GPT  # noqa: E402

VOCAB = 50_257
GREEDY = config_from_python("sample", temperature=0.0)
LARGEST = {"float32": 1e-4, "bfloat16": 0.1, "float16": 0.02}
CASES = {"64 -> 128": (64, 64, 1), "1000 -> 1024": (1000, 24, 1), "32 x 64 -> 128": (64, 64, 32)}  # prompt, new, texts


@dataclass
class Writer:
    """write(prompt (B, T), new) -> the whole (B, T + new), and when each token was there.

    bytes: of weights that are read for a token. seconds, token_ms: of each round, token_ms the median of its tokens.
    """

    name: str
    write: Callable[[Tensor, int], tuple[Tensor, list[float]]]
    bytes: int
    cases: tuple[str, ...] = tuple(CASES)
    seconds: dict[str, list[float]] = field(default_factory=dict)
    token_ms: dict[str, list[float]] = field(default_factory=dict)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nanogpt", type=Path, help="a checkout of nanoGPT")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=list(LARGEST), help="of the peers' weights, and of ours")
    arguments = parser.parse_args()
    if not (arguments.nanogpt / "model.py").is_file():
        parser.error(f"{arguments.nanogpt / 'model.py'} does not exist; name a checkout of nanoGPT")
    device, dtype = torch.device(arguments.device), getattr(torch, arguments.dtype)

    torch.set_grad_enabled(False)
    torch.manual_seed(1)
    config = config_from_python("train", model="gpt2").model
    original = GPT(config, VOCAB, get_attention_fn(config_from_python("sample").attention)).eval()
    for name, weight in original.named_parameters():
        if name.endswith("bias"):  # zero at the start, which would hide one that is left out
            nn.init.normal_(weight, std=0.02)
    prompts = {case: torch.randint(VOCAB, (B, T)) for case, (T, _, B) in CASES.items()}

    theirs = [hugging_face(original).to(device, dtype), nano_gpt(original, arguments.nanogpt).to(device, dtype)]
    dtypes = {"cpu": ["float32", "bfloat16", "float16"]}.get(device.type, [arguments.dtype])
    ours = {name: convert_linears(deepcopy(original).to(device), getattr(torch, name)) for name in dtypes}
    exact = GPT(
        replace(config, mlp="gelu"),
        VOCAB,
        get_attention_fn(config_from_python("sample").attention),
        weights=original.state_dict(),
    )
    exact = convert_linears(exact.to(device).eval(), dtype)  # nanoGPT has GELU itself, and GPT-2 its tanh form
    apart = [
        logits_apart(model, other, prompts["64 -> 128"], device)
        for model, other in zip((ours[arguments.dtype], exact), theirs, strict=True)
    ]
    worst = max(apart)
    print(f"largest distance from our logits: transformers {apart[0]:.1e}, nanoGPT {apart[1]:.1e}, "
          f"allowed {LARGEST[arguments.dtype]:.0e}\n")  # fmt: skip

    read = weight_bytes(original)
    writers = [Writer(f"trilGPT {name}", partial(write, model, device), read[name]) for name, model in ours.items()]
    their_ways = {
        "transformers": partial(their_write, theirs[0], device),
        "nanoGPT": partial(nano_write, theirs[1], device),
    }
    for name, way in their_ways.items():
        cases = ("64 -> 128", "1000 -> 1024") if name == "nanoGPT" else tuple(CASES)
        writers.append(Writer(f"{name} {arguments.dtype}", way, read[arguments.dtype], cases))
    speed = measure(writers, prompts, arguments.rounds, device, max(read.values()))
    report(writers, speed)
    return int(not worst <= LARGEST[arguments.dtype])


def write(model: GPT, device: torch.device, prompt: Tensor, new: int) -> tuple[Tensor, list[float]]:
    decoder = Engine(model, GREEDY, len(prompt), prompt.shape[1] + new, cuda_graphs=True)
    decoder.add([Prompt(row, seed=0) for row in prompt.tolist()])
    stamps = []
    for _ in range(new):
        decoder.step()
        stamps.append(time.perf_counter())
    return torch.tensor([row.tokens for row in decoder.sequences]), stamps


class Stamps:
    """What transformers calls a streamer: it is handed the prompt, and then each token."""

    def __init__(self):
        self.stamps = []

    def put(self, tokens: Tensor) -> None:
        self.stamps.append(time.perf_counter())

    def end(self) -> None:
        del self.stamps[0]


def their_write(model: nn.Module, device: torch.device, prompt: Tensor, new: int) -> tuple[Tensor, list[float]]:
    prompt, streamer = prompt.to(device), Stamps()
    mask = torch.ones_like(prompt)
    made = model.generate(
        prompt, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, streamer=streamer
    )
    return made, streamer.stamps


def nano_write(model: nn.Module, device: torch.device, prompt: Tensor, new: int) -> tuple[Tensor, list[float]]:
    """It reads everything anew for each token, so that all are taken to be alike."""
    began = time.perf_counter()
    made = model.generate(prompt.to(device), new, top_k=1)
    if device.type == "cuda":
        torch.cuda.synchronize()
    each = (time.perf_counter() - began) / new
    return made, [began + each * number for number in range(1, new + 1)]


def measure(writers: list[Writer], prompts: dict, rounds: int, device: torch.device, most: int) -> list[float]:
    """Fills in the writers' times, all in turns, and returns the bytes per second read in each round."""
    memory = torch.ones(most // 4, device=device)
    speed = []
    for writer in writers:  # warm-up, and whatever is loaded or recorded at first use
        writer.write(prompts["64 -> 128"], 4)
    for number in range(rounds):
        passes = [timed(memory.sum, device)[1] for _ in range(5)]
        speed.append(memory.nbytes / statistics.median(passes))
        for case, (T, new, _) in CASES.items():
            for writer in writers:
                if case not in writer.cases:
                    continue
                print(f"round {number + 1}/{rounds}  {case}  {writer.name} ...", end="\r", file=sys.stderr, flush=True)
                (made, stamps), seconds = timed(partial(writer.write, prompts[case], new), device)
                assert made.shape[1] == T + new and len(stamps) == new, f"{writer.name} made other than {new} tokens"
                gaps = [after - before for before, after in pairwise(stamps)]
                writer.seconds.setdefault(case, []).append(seconds)
                writer.token_ms.setdefault(case, []).append(1e3 * statistics.median(gaps))
    print(" " * 60, end="\r", file=sys.stderr)
    return speed


def timed(call: Callable[[], object], device: torch.device) -> tuple[object, float]:
    began = time.perf_counter()
    result = call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - began


def report(writers: list[Writer], speed: list[float]) -> None:
    console = Console(width=118, highlight=False)
    console.print(f"memory read at {spread([each / 1e9 for each in speed], '.1f')} GB/s")
    for case, (_, new, B) in CASES.items():
        table = Table(title=case, title_justify="left")
        for title in ("", "tokens/s", "ours, times as fast", "a token more, ms", "ours, times as fast", "of the bound"):
            table.add_column(title, justify="right" if title else "left")
        mine = writers[0]
        for writer in writers:
            if case not in writer.cases:
                continue
            seconds, token = writer.seconds[case], writer.token_ms[case]
            ratios = [theirs / ours for theirs, ours in zip(seconds, mine.seconds[case], strict=True)]
            token_ratios = [theirs / ours for theirs, ours in zip(token, mine.token_ms[case], strict=True)]
            bound = [1e3 * writer.bytes / each / ms for each, ms in zip(speed, token, strict=True)]
            table.add_row(
                writer.name, spread([B * new / each for each in seconds], ".1f"), spread(ratios, ".2f"),
                spread(token, ".1f"), spread(token_ratios, ".2f"), spread([100 * each for each in bound], ".0f") + " %",
            )  # fmt: skip
        console.print(table)


def spread(values: list[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def weight_bytes(model: GPT) -> dict[str, int]:
    """Of all that a token reads: the linear layers, the head with them. (Of the embeddings it reads a row each.)"""
    numbers = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Linear))
    return {"float32": 4 * numbers, "bfloat16": 2 * numbers, "float16": 2 * numbers}


def logits_apart(model: GPT, other: nn.Module, prompt: Tensor, device: torch.device, new: int = 64) -> float:
    """The largest distance of the other's logits from those by which ours writes its text, token by token."""
    seen = []
    head = model.lm_head.forward
    model.lm_head.forward = lambda x: seen.append(head(x)) or seen[-1]
    try:
        text, _ = write(model, device, prompt, new)
    finally:
        del model.lm_head.forward
    ours = torch.cat(seen)[:, :VOCAB].float()  # (new, V)
    fed = text[:, :-1].to(device)
    # Without targets nanoGPT gives the logits of the last token alone.
    theirs = other(fed).logits if hasattr(other, "generation_config") else other(fed, torch.zeros_like(fed))[0]
    return (theirs[0, -new:].float() - ours).abs().max().item()


def hugging_face(model: GPT) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    theirs = GPT2LMHeadModel(GPT2Config()).eval()
    theirs.generation_config.eos_token_id, theirs.generation_config.pad_token_id = None, 0
    names = {"wte": "wte", "wpe": "wpe", "norm": "ln_f"} | {
        f"blocks.{i}.{ours}": f"h.{i}.{other}" for i in range(model.config.n_layer) for ours, other in INSIDE.items()
    }
    source, target = model.state_dict(), theirs.transformer.state_dict()
    left = set(target)
    for ours, other in names.items():
        for kind in ("weight", "bias"):
            if f"{ours}.{kind}" in source:
                value = source[f"{ours}.{kind}"]
                flip = ".c_" in other and kind == "weight"  # theirs are laid out as inputs x outputs
                target[f"{other}.{kind}"].copy_(value.T if flip else value[: len(target[f"{other}.{kind}"])])
                left.remove(f"{other}.{kind}")
    assert not left, left
    return theirs


def nano_gpt(model: GPT, checkout: Path) -> nn.Module:
    module = import_model(checkout / "model.py")
    with redirect_stdout(StringIO()):
        theirs = module.GPT(module.GPTConfig(vocab_size=VOCAB, dropout=0.0)).eval()
    source, target = model.state_dict(), theirs.state_dict()
    inside = {
        f"blocks.{i}.{ours}": f"transformer.h.{i}.{other}"
        for i in range(model.config.n_layer) for ours, other in INSIDE.items()
    }  # fmt: skip
    left = set(target)
    for name, value in source.items():
        place, kind = name.rsplit(".", 1)
        other = f"{({**OUTSIDE, **inside})[place]}.{kind}"
        target[other].copy_(value[: len(target[other])])
        left.discard(other)
    assert not left, left
    return theirs


if __name__ == "__main__":
    sys.exit(main())
