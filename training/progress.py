"""The first and the last lines that a training run prints."""

from math import inf
from pathlib import Path
from typing import Any

from common.console import format_bytes, format_duration, pluralize
from common.errors import format_value
from model import GPTConfig
from training.config import AUTO


def format_banner(config: Any, folder: Path, summary: dict, meta: dict) -> str:
    """The first lines of a run: what is trained, on which data and device.

    config: the config of train.py. summary: as in summary.json. meta: the data's meta.json.
    """
    model, train, tokens, step = config.model, config.train, meta["tokens"], summary["step"]
    kernel, is_auto = summary["attention"], train.micro_batch_size == AUTO
    tokens_per_step = train.batch_size * model.block_size
    limits = [train.steps and pluralize(train.steps, "step"), train.minutes and f"{train.minutes:g} minutes"]
    size_of_step = f"{train.batch_size} x {model.block_size} = {tokens_per_step:,} tokens"
    micro_batches = pluralize(summary["accumulation"], "micro batch")
    micro_batches += f" of {pluralize(summary['micro_batch_size'], 'sequence')}"
    lines = {
        "run      ": [str(folder), step and f"resumed from step {step:,}"],
        "preset   ": [
            config.text_size and f"text_size={config.text_size}, for {format_bytes(meta['bytes']['train'])} of text",
        ],
        "data     ": [
            config.data.label,
            f"{tokens['train']:,} training tokens and {tokens['val']:,} validation tokens",
            f"{meta['tokenizer']['name']} vocabulary of {meta['vocab_size']:,}",
            config.data.document_mask and "attention within documents only",
        ],
        "model    ": [
            f"{model.name}, {describe_model(model)}: {summary['n_params']:,} parameters",
            model.max_ngram > 1 and f"{model.ngram_table_size * model.n_embd:,} of them in the n-gram table",
            train.init_from and not step and f"starting from {train.init_from}",
        ],
        "device   ": [
            summary["device_name"],
            summary["dtype"],
            summary["compile"] and "compiled",
            f"attention {kernel['requested']} -> {kernel['resolved']}",
            summary["world_size"] > 1 and f"{summary['world_size']} processes with {config.parallel}",
        ],
        "training for ": [
            f"{' or '.join(filter(None, limits))} of {size_of_step}",
            (summary["accumulation"] > 1 or is_auto) and micro_batches + " (the largest that fits)" * is_auto,
            train.activation_checkpointing != "none" and f"activation checkpointing: {train.activation_checkpointing}",
            train.steps and format_epochs(train.steps * tokens_per_step / tokens["train"]),
            config.schedule.warmup_steps >= (train.steps or inf)
            and f"all of them warmup (schedule.warmup_steps={config.schedule.warmup_steps:,})",
        ],
    }
    return "\n".join(name + ", ".join(filter(None, parts)) for name, parts in lines.items() if any(parts))


def describe_model(model: GPTConfig) -> str:
    """The size of a model: layers, heads, channels, context and windows."""
    words = [pluralize(model.n_layer, "layer"), pluralize(model.n_head, "head")]
    if model.kv_heads != model.n_head:
        words.append(f"{model.kv_heads} key/value heads")
    words += [f"{model.n_embd} channels", f"context {model.block_size}"]
    if any(model.windows):
        words.append(f"windows {format_value(model.window)}")
    if "linear" in model.mixers:
        words.append(f"mixer {format_value(model.mixer)}")
    return ", ".join(words)


def format_epochs(epochs: float) -> str:
    return f"{epochs:,.0f} epochs" if epochs >= 10 else f"{epochs:.2g} epochs"


def format_summary(summary: dict, folder: Path) -> str:
    """The last lines of a run: its losses and speed, and the command for a sample. summary: as in summary.json."""
    steps, duration = pluralize(summary["step"], "step"), format_duration(summary["wall_seconds"])
    last = f"last {summary['last_val_loss']:.4f}; " if summary["best_step"] != summary["step"] else ""
    bpb = summary["best_val_bpb"]  # None: the run began before it was recorded
    bpb = f"{bpb:.3f} bits per byte, " if bpb is not None else ""
    speed = summary.get("tokens_per_second")  # None: only the last evaluation was left to do
    speed = f" at {speed:,.0f} tokens/s" if speed is not None else ""
    return (
        f"best validation loss {summary['best_val_loss']:.4f}, {bpb}"
        f"at step {summary['best_step']}; {last}{steps} in {duration}{speed}\n"
        f"best     {folder / 'checkpoints' / 'best.pt'}, which sample.py uses\n"
        f"curve    {folder / 'loss.png'}\n"
        f"next     python sample.py run={summary['name']}"
    )
