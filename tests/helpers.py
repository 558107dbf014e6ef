"""A small document, configs, a small model, and readers of run folders, for several test files."""

import importlib
import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from common.checkpoint_file import load_checkpoint
from common.process import run_main
from configs.cli import parse_config
from data import DataConfig, TokenizerConfig
from generation.config import SamplingConfig
from model import GPTConfig
from model.attention import BACKENDS, naive
from model.gpt import GPT
from training.config import AdamWConfig, MuonConfig

ROOT = Path(__file__).parent.parent
ON_CPU = [name for name, backend in BACKENDS.items() if "cpu" in backend.on]
TRAINS_ON_CPU = [name for name in ON_CPU if "training" not in BACKENDS[name].on["cpu"].lacks]
TEXT = "".join(
    f"The {n}th line says {n * n} and no more; après tout, it's a line.\n" for n in range(400)
)
TEXT_SOURCE = DataConfig(path="text.txt")
CHAR, BYTE = TokenizerConfig("char", None, None), TokenizerConfig("byte", None, None)
BPE, GPT2 = TokenizerConfig("bpe", 300, None), TokenizerConfig("gpt2", None, None)
TINY = [
    "model.n_layer=2", "model.n_head=2", "model.n_embd=16", "model.block_size=16",
    "model.ngram_table_size=64",
    "train.batch_size=4",
    "train.steps=6", "eval.every=3", "eval.windows=8", "eval.sample.max_new_tokens=4",
    "checkpoint.every=3",
    "dtype=float32",  # auto is bfloat16 on some CPUs
    "wandb.mode=disabled", "tokenizer=char", "data=text", "data.path=text.txt",
]  # fmt: skip

ADAMW = AdamWConfig(name="adamw", lr=1e-3, betas=[0.9, 0.95], eps=1e-8, weight_decay=0.1)
MUON = MuonConfig(
    name="muon", lr=0.02, momentum=0.95, ns_steps=5, weight_decay=0.01, embedding_lr=0.01,
    ngram_weight_decay=1.0,
    head_lr=0.003, norm_lr=0.01, betas=[0.9, 0.95], eps=1e-8,
)  # fmt: skip


def tiny_model(**changed) -> GPT:
    """A GPT-2 with 20 tokens and a context of 8."""
    torch.manual_seed(0)
    settings = dict(
        n_layer=2, n_head=2, n_embd=16, block_size=8, bias=True, norm="layernorm", mlp="gelu",
        position="learned",
        qk_norm=False, key_offset=False, tie_embeddings=True, max_ngram=1, ngram_table_size=64,
    )  # fmt: skip
    return GPT(GPTConfig(**settings | changed), 20, naive)


def train_step(model, optimizers, seed=0) -> float:
    """One step of `tiny_model` on random tokens -> the loss."""
    tokens = torch.randint(0, 20, (4, 9), generator=torch.Generator().manual_seed(seed))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def sampling(**changed):
    """A SamplingConfig whose filters are off, with changes."""
    return SamplingConfig(**dict(max_new_tokens=20, temperature=1.0) | changed)


def train_here(*overrides: str) -> int:
    """Train a tiny model in this process and in the current folder -> exit code."""
    from train import main, show_plan

    config = parse_config("train", "", [*TINY, *overrides])
    return run_main(show_plan if config.plan else main, config)


def run_command(script: str, *words: str) -> int:
    """Run a command in this process and in the current folder -> exit code."""
    module = importlib.import_module(script)
    try:
        config = parse_config(script, module.__doc__, list(words))
    except SystemExit as end:  # refused, or --help
        return int(end.code or 0)
    is_plan = script == "train" and config.plan
    return run_main(module.show_plan if is_plan else module.main, config)


@contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """Context manager: a file cannot grow beyond `size` bytes, as on a full disk."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# Fields of a row that depend on the clock or the machine.
TIMED = {
    "seconds",
    "step_ms",
    "tokens_per_second",
    "mfu",
    "peak_memory_bytes",
}


def read_jsonl(file):
    return [json.loads(line) for line in Path(file).read_text(encoding="utf-8").split("\n")[:-1]]


def metrics(name):
    return read_jsonl(f"runs/{name}/metrics.jsonl")


def untimed(rows):
    return [{key: value for key, value in row.items() if key not in TIMED} for row in rows]


def summary(name):
    with open(f"runs/{name}/summary.json", encoding="utf-8") as f:
        return json.load(f)


def load(run: str, checkpoint: str = "last") -> dict:
    return load_checkpoint(Path(f"runs/{run}/checkpoints/{checkpoint}.pt"))


def wait_for_step(name: str, step: int, process: subprocess.Popen) -> None:
    """Wait until the metrics of a run have the step, or the process has ended."""
    file = Path(f"runs/{name}/metrics.jsonl")
    while process.poll() is None and not (
        file.exists() and file.read_text(encoding="utf-8").count("\n") > step
    ):
        time.sleep(0.02)
