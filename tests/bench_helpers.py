"""Cases, configs, command lines and made-up rows for the tests of bench.py."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import torch

from attention_bench.cases import GRAD_PHASES, Case
from attention_bench.config import BenchConfig
from attention_bench.results import FINISHED, OUT_OF_MEMORY, Timing
from model import AttentionConfig
from model.attention import AttentionRequest

CPU = torch.device("cpu")
CONFIG = BenchConfig(
    seed=1,
    dtypes=["float32"],
    vocab_size=64,
    compile=False,
    rounds=1,
    seconds=0.001,
    time_limit=300.0,
)
REQUEST = AttentionRequest(
    B=2, Tq=16, Tk=16, H=4, G=2, D=8, Dv=6, dtype=torch.float32, device=CPU, grad=False
)
FOLDER = Path("runs/bench/x")
TINY = {
    "name": "x",
    "model.n_layer": "1",
    "model.n_embd": "16",
    "model.n_head": "2",
    "optimizer": "adamw",
    "vocab_size": "64",
    "rounds": "1",
    "repeats": "1",
    "seconds": "0.001",
    "time_limit": "300",
    "batch_size": "1",
    "wandb.mode": "disabled",
    "block_sizes": "[8]",
    "dtypes": "[float32]",
}


def make_case(
    phase: str = "forward", backend: str = "naive", *, T: int = 16, mask: str = "causal", **changes
) -> Case:
    """A small case. changes: fields of its request."""
    request = replace(REQUEST, Tq=T, Tk=T, grad=phase in GRAD_PHASES)
    if phase == "decode":
        request = replace(request, Tq=1)
    attention = AttentionConfig(backend, None, None)
    return Case(backend, attention, phase, mask, replace(request, **changes))


def make_row(backend: str, T: int, ms: float | None, spread: float = 0.01, **changes) -> Timing:
    """A made-up row. ms None: the case ran out of memory."""
    case = make_case(backend=backend, T=T)
    if ms is None:
        row = case.make_row(OUT_OF_MEMORY, reason="needed 8.0 GiB more")
    else:
        quartiles = {"ms_q1": ms * (1 - spread), "ms_q3": ms * (1 + spread)}
        row = case.make_row(FINISHED, resolved=backend, ms_median=ms, **quartiles)
    return replace(row, **changes)


def make_rows(**times: dict[int, float]) -> list[Timing]:
    """Made-up rows from {backend: {T: ms}}."""
    return [make_row(backend, T, ms) for backend, line in times.items() for T, ms in line.items()]


def make_words(*overrides: str) -> list[str]:
    """The words of a tiny bench, with other values of some keys."""
    settings = TINY | dict(word.split("=", 1) for word in overrides)
    return [f"{key}={value}" for key, value in settings.items()]


def read_rows(folder: Path = FOLDER) -> list[dict]:
    with open(folder / "attention.csv", newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def read_summary(folder: Path = FOLDER) -> dict:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))
