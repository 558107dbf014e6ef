"""The first and the last lines that a training run prints."""

from math import inf
from pathlib import Path

from common.console import PYTHON, format_duration, format_si, pluralize
from model import GPTConfig
from training.config import AUTO, RunConfig


def format_banner(config: RunConfig, folder: Path, summary: dict, meta: dict) -> str:
    """The first lines of a run: what is trained, on which data and device. summary, meta: content of the JSON files."""
    model, train, tokens, step = config.model, config.train, meta["tokens"], summary["step"]
    attention, accumulation = summary["attention"], summary["accumulation"]
    tokens_per_step, warmup_steps = (
        train.batch_size * model.block_size,
        config.schedule.warmup_steps,
    )
    steps, minutes = (
        train.steps and pluralize(train.steps, "step"),
        train.minutes and f"{train.minutes:g} minutes",
    )
    limits = " or ".join(filter(None, [steps, minutes]))
    micro_batches = f"{pluralize(accumulation, 'micro batch')} of {pluralize(summary['micro_batch_size'], 'sequence')}"
    lines = {
        "run      ": [folder, step and f"resumed from step {step:,}"],
        "preset   ": [
            config.preset
            and f"{config.preset}, for {format_si(meta['bytes']['train'], 'B')} of text"
        ],
        "data     ": [
            f"{config.data.name}, {tokens['train']:,} training tokens and {tokens['val']:,} validation tokens",
            f"{meta['tokenizer']['name']} vocabulary of {meta['vocab_size']:,}",
        ],
        "model    ": [
            f"{model.name}, {describe_model(model)}: {summary['n_params']:,} parameters",
            model.max_ngram > 1
            and f"{model.ngram_table_size * model.n_embd:,} of them in the n-gram table",
            train.init_from and not step and f"starting from {train.init_from}",
        ],
        "device   ": [
            f"{summary['device_name']}, {summary['dtype']}{', compiled (can take a minute)' * summary['compile']}",
            f"attention {attention['requested']} -> {attention['resolved']}",
            summary["world_size"] > 1
            and f"{summary['world_size']} processes with {config.parallel}",
        ],
        "training for ": [
            f"{limits} of {train.batch_size} x {model.block_size} = {tokens_per_step:,} tokens",
            (accumulation > 1 or train.micro_batch_size == AUTO) and micro_batches,
            train.steps and format_epochs(train.steps * tokens_per_step / tokens["train"]),
            warmup_steps >= (train.steps or inf)
            and f"all of them warmup (schedule.warmup_steps={warmup_steps:,})",
        ],
    }
    return "\n".join(
        name + ", ".join(map(str, filter(None, parts)))
        for name, parts in lines.items()
        if any(parts)
    )


def describe_model(model: GPTConfig) -> str:
    """The size of a model: layers, heads, channels and context."""
    layers, heads = pluralize(model.n_layer, "layer"), pluralize(model.n_head, "head")
    kv_heads = f" ({model.kv_heads} key/value)" if model.kv_heads != model.n_head else ""
    return f"{layers}, {heads}{kv_heads}, {model.n_embd} channels, context {model.block_size}"


def format_epochs(epochs: float) -> str:
    return f"{epochs:,.0f} epochs" if epochs >= 10 else f"{epochs:.2g} epochs"


def format_summary(summary: dict, folder: Path) -> str:
    """The last lines of a run: its losses and speed, and the command that generates a sample."""
    if (
        summary["best_step"] is None
    ):  # no step was left after an older checkpoint was copied over last.pt
        return f"finished at step {summary['step']:,}, without an evaluation since the older checkpoint"
    last = (
        f"last {summary['last_val_loss']:.4f}; " if summary["best_step"] != summary["step"] else ""
    )
    return (
        f"best validation loss {summary['best_val_loss']:.4f}, {summary['best_val_bpb']:.3f} bits per byte, at step "
        f"{summary['best_step']}; {last}{pluralize(summary['step'], 'step')} in "
        f"{format_duration(summary['wall_seconds'])} at {summary['tokens_per_second']:,.0f} tokens/s\n"
        f"best     {folder / 'checkpoints' / 'best.pt'}\n"
        f"curve    {folder / 'loss.png'}\n"
        f"next     {PYTHON} sample.py run={summary['name']}"
    )
