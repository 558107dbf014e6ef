"""Small texts, configs, models and readers of run folders that several test files use."""

import json
from pathlib import Path

from data import DataConfig, TokenizerConfig
from model import SamplingConfig
from model.attention import BACKENDS

ROOT = Path(__file__).parent.parent
ON_CPU = [name for name, each in BACKENDS.items() if "cpu" in each.on]
TRAINS_ON_CPU = [name for name in ON_CPU if BACKENDS[name].on["cpu"].gradients]
TEXT = "".join(f"The {n}th line says {n * n} and no more; après tout, it's a line.\n" for n in range(400))
TEXT_SOURCE = DataConfig(
    name="text", source="text", path="text.txt", url=None, repo=None, config=None, split=None, revision=None,
    stream=False, text_column="text", row_is_document=True, max_documents=None, val_path=None, val_split=None,
    val_documents=None, val_fraction=0.1, mix={}, weight=1.0, document_mask=False,
)  # fmt: skip
CHAR, BYTE = TokenizerConfig("char", None, None), TokenizerConfig("byte", None, None)
BPE, GPT2 = TokenizerConfig("bpe", 300, None), TokenizerConfig("gpt2", None, None)
TINY = [
    "model.n_layer=2", "model.n_head=2", "model.n_embd=16", "model.block_size=16", "model.ngram_table_size=64",
    "train.batch_size=4",
    "train.steps=6", "eval.every=3", "eval.batches=2", "eval.sample.max_new_tokens=4", "checkpoint.every=3",
    "wandb.mode=disabled", "tokenizer=char", "data=text", "data.path=text.txt",
]  # fmt: skip


def sampling(**changed):
    """Settings that filter nothing, but for what is changed."""
    plain = dict(max_new_tokens=20, temperature=1.0, top_k=None, top_p=None, min_p=None, repetition_penalty=1.0)
    return SamplingConfig(**plain | dict(stop=None) | changed)


def train_here(*overrides: str) -> int:
    from configs.cli import parse_config, run_main
    from train import main

    return run_main(main, parse_config("train", "", [*TINY, *overrides]))


# Fields of a row that depend on the clock or the machine.
TIMED = {"seconds", "step_ms", "data_wait_ms", "tokens_per_second", "mfu", "peak_memory_bytes"}


def metrics(name):
    with open(f"runs/{name}/metrics.jsonl") as f:
        return [json.loads(line) for line in f]


def untimed(rows):
    return [{key: value for key, value in row.items() if key not in TIMED} for row in rows]


def summary(name):
    with open(f"runs/{name}/summary.json") as f:
        return json.load(f)
