"""The first and the last lines of a training run. training/run_logger.py prints the lines between."""

import math
from pathlib import Path
from typing import Any

from common.console import PYTHON, format_duration, format_si, pluralize, print_text
from common.errors import EXIT_CODES
from model import GPTConfig
from training.config import RunConfig
from training.plots import plot_run
from training.run_folder import RunFolder
from training.train_state import TrainState


def print_banner(config: RunConfig, run: RunFolder, meta: dict) -> None:
    """Print what is trained, on which data and device. meta: meta.json of the data."""
    print_text(format_banner(config, run.folder, run.summary, meta))


def format_banner(config: RunConfig, folder: Path, summary: dict[str, Any], meta: dict) -> str:
    """The first lines of a run. summary, meta: content of summary.json and of the data's meta.json."""
    step = summary["step"]
    run = str(folder)
    if step > 0:
        run += f", resumed from step {step:,}"
    lines = [f"run      {run}"]

    if config.preset is not None:
        text_bytes = format_si(meta["bytes"]["train"], "B")
        lines.append(f"preset   {config.preset}, for {text_bytes} of text")

    tokens = meta["tokens"]
    vocabulary = f"{meta['tokenizer']['name']} vocabulary of {meta['vocab_size']:,}"
    lines.append(
        f"data     {config.data.name}, {tokens['train']:,} training tokens and "
        f"{tokens['val']:,} validation tokens, {vocabulary}"
    )

    model = f"{describe_model(config.model)}: {summary['n_params']:,} parameters"
    if config.model.max_ngram > 1:
        ngram_parameters = config.model.ngram_table_size * config.model.n_embd
        model += f", {ngram_parameters:,} of them in the n-gram table"
    if config.train.init_from is not None and step == 0:
        model += f", starting from {config.train.init_from}"
    lines.append(f"model    {config.model.name}, {model}")

    device = f"{summary['device_name']}, {summary['dtype']}"
    if summary["compile"]:
        device += ", compiled (can take a minute)"
    attention = summary["attention"]
    device += f", attention {attention['requested']} -> {attention['resolved']}"
    if summary["world_size"] > 1:
        device += f", {summary['world_size']} processes with {config.parallel}"
    lines.append(f"device   {device}")

    lines.append(f"training for {_describe_length(config, summary, tokens['train'])}")
    return "\n".join(lines)


def _describe_length(config: RunConfig, summary: dict[str, Any], train_tokens: int) -> str:
    """The length of a run, and how its steps are divided into micro batches."""
    train = config.train
    limits = []
    if train.steps is not None:
        limits.append(pluralize(train.steps, "step"))
    if train.minutes is not None:
        limits.append(f"{train.minutes:g} minutes")
    block_size = config.model.block_size
    tokens_per_step = train.batch_size * block_size
    step = f"{train.batch_size} x {block_size} = {tokens_per_step:,} tokens"
    parts = [f"{' or '.join(limits)} of {step}"]
    if summary["accumulation"] > 1:
        count = pluralize(summary["accumulation"], "micro batch")
        parts.append(f"{count} of {pluralize(summary['micro_batch_size'], 'sequence')}")
    if train.steps is not None:
        parts.append(format_epochs(train.steps * tokens_per_step / train_tokens))
    warmup_steps = config.schedule.warmup_steps
    if warmup_steps >= (train.steps or math.inf):
        parts.append(f"all of them warmup (schedule.warmup_steps={warmup_steps:,})")
    return ", ".join(parts)


def describe_model(model: GPTConfig) -> str:
    """The size of a model: layers, heads, channels and context."""
    heads = pluralize(model.n_head, "head")
    if model.kv_heads != model.n_head:
        heads += f" ({model.kv_heads} key/value)"
    layers = pluralize(model.n_layer, "layer")
    return f"{layers}, {heads}, {model.n_embd} channels, context {model.block_size}"


def format_epochs(epochs: float) -> str:
    """Format passes over the training tokens as "0.25 epochs", "12 epochs"."""
    return f"{epochs:,.0f} epochs" if epochs >= 10 else f"{epochs:.2g} epochs"


def describe_finished_run(run: RunFolder, state: TrainState) -> str:
    """A line for a run that an earlier process has finished."""
    reached = [setting for setting, used in state.limits.items() if used >= 1]
    advice = f"set a larger {' and '.join(reached)}, or another name"
    return f"{run.folder} is finished at step {state.step}; {advice}"


def report(run: RunFolder) -> int:
    """Plot the metrics of a run that has ended, and print its last lines. Returns the exit code."""
    if run.is_main:
        plot_run(run.folder)
        if run.summary["status"] == "interrupted":
            print_text(f"train.py: {run.summary['error']}", stderr=True)
        else:
            print_text(format_summary(run.summary, run.folder))
    return EXIT_CODES[run.summary["status"]]


def format_summary(summary: dict[str, Any], folder: Path) -> str:
    """Losses and speed of a finished run, and the command that generates a sample."""
    step = summary["step"]
    if summary["best_step"] is None:  # an older checkpoint was copied over last.pt
        return f"finished at step {step:,}, without an evaluation since the older checkpoint"
    best = f"best validation loss {summary['best_val_loss']:.4f}"
    best += f", {summary['best_val_bpb']:.3f} bits per byte, at step {summary['best_step']}"
    last = ""
    if summary["best_step"] != step:
        last = f"last {summary['last_val_loss']:.4f}; "
    duration = format_duration(summary["wall_seconds"])
    speed = f"{summary['tokens_per_second']:,.0f} tokens/s"
    return "\n".join(
        [
            f"{best}; {last}{pluralize(step, 'step')} in {duration} at {speed}",
            f"best     {folder / 'checkpoints' / 'best.pt'}",
            f"curve    {folder / 'loss.png'}",
            f"next     {PYTHON} sample.py run={summary['name']}",
        ]
    )
