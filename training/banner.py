"""The first and the last lines of a run. training/log.py prints the lines between."""

from pathlib import Path
from typing import Any

from common.console import PYTHON, format_duration, format_si, pluralize, print_text
from model import GPTConfig
from training.config import RunConfig
from training.run_folder import RunFolder
from training.train_state import TrainState


def format_banner(config: RunConfig, run: RunFolder, meta: dict) -> str:
    """The first lines of a run: what is trained, on which data and device.

    meta: meta.json of the data.
    """
    summary = run.summary
    tokens = meta["tokens"]
    attention = summary["attention"]
    lines = [f"run      {run.folder}"]
    if summary["step"] > 0:
        lines[-1] += f", resumed from step {summary['step']:,}"
    if config.preset is not None:
        text_bytes = format_si(sum(meta["bytes"].values()), "B")
        lines.append(f"preset   {config.preset}, for {text_bytes} of text")
    lines.append(
        f"data     {config.data.label}, {tokens['train']:,} training tokens and "
        f"{tokens['val']:,} validation tokens, "
        f"{meta['tokenizer']['name']} vocabulary of {meta['vocab_size']:,}"
    )
    n_params = summary["n_params"]
    ngrams = ""
    if config.model.max_ngram > 1:
        table_params = config.model.ngram_table_size * config.model.n_embd
        n_params -= table_params
        ngrams = f", and an n-gram table of {table_params:,}"
    lines.append(
        f"model    {config.model.name}, {describe_model(config.model)}: "
        f"a GPT with {n_params:,} parameters{ngrams}"
    )
    if config.train.init_from is not None and summary["step"] == 0:
        lines[-1] += f", starting from {config.train.init_from}"
    lines.append(
        f"device   {summary['device_name']}, {summary['dtype']}, "
        f"attention {attention['requested']} -> {attention['resolved']}"
    )
    if summary["compile"]:
        lines[-1] += ", compiled (can take a minute)"
    if summary["world_size"] > 1:
        lines[-1] += f", {summary['world_size']} processes with {config.parallel}"
    lines.append(f"training for {_describe_length(config, summary, tokens['train'])}")
    return "\n".join(lines)


def _describe_length(config: RunConfig, summary: dict[str, Any], train_tokens: int) -> str:
    """The length of a run, and how its steps are divided into micro batches."""
    train = config.train
    block_size = config.model.block_size
    tokens_per_step = train.batch_size * block_size
    limits = {"step": train.steps, "epoch": train.epochs, "minute": train.minutes}
    length = " or ".join(pluralize(n, unit) for unit, n in limits.items() if n is not None)
    length += f" of {train.batch_size} x {block_size} = {tokens_per_step:,} tokens"
    if summary["accumulation"] > 1:
        length += (
            f", {pluralize(summary['accumulation'], 'micro batch')} of "
            f"{pluralize(summary['micro_batch_size'], 'sequence')}"
        )
    if train.steps is not None and train.epochs is None:
        length += f", {format_epochs(train.steps * tokens_per_step / train_tokens)}"
    if train.n_teachers is not None:
        if train.minutes is None:
            length += f", for each of {train.n_teachers} teachers, and more for their student"
        else:
            length += f", with up to {train.n_teachers} teachers and a student if the time allows"
    return length


def describe_model(model: GPTConfig) -> str:
    """The size of a model: layers, heads, channels and context."""
    heads = pluralize(model.n_head, "head")
    if model.kv_heads != model.n_head:
        heads += f" ({model.kv_heads} key/value)"
    layers = pluralize(model.n_layer, "layer")
    return f"{layers}, {heads}, {model.n_embd} channels, context {model.block_size}"


def format_epochs(epochs: float) -> str:
    """Format passes over the training tokens as "0.25 epochs", "1 epoch"."""
    return pluralize(round(epochs) if epochs >= 10 else float(f"{epochs:.2g}"), "epoch")


def describe_finished_run(run: RunFolder, state: TrainState) -> str:
    """A line for a run that an earlier process has finished."""
    reached = [setting for setting, used in state.used_limits.items() if used >= 1]
    if state.config.n_teachers and not state.planned_teachers:  # there was no time for them
        reached = ["train.minutes"]
    return (
        f"{run.folder} is finished at step {state.step}; "
        f"set a larger {' and '.join(reached)}, or another name"
    )


def print_report(run: RunFolder) -> None:
    """Print the last lines of a run that has ended."""
    if not run.is_main:
        return
    if run.summary["status"] == "interrupted":
        print_text(f"train.py: {run.summary['error']}", stderr=True)
    else:
        print_text(format_summary(run.summary, run.folder))


def format_summary(summary: dict[str, Any], folder: Path) -> str:
    """Losses and speed of a finished run, and the command that generates a sample."""
    step = summary["step"]
    last = ""
    if summary["best_step"] != step:
        last = f"last {summary['last_val_loss']:.4f}; "
    return (
        f"best validation loss {summary['best_val_loss']:.4f}, {summary['best_val_bpb']:.3f} bits "
        f"per byte, at step {summary['best_step']}; {last}{pluralize(step, 'step')} in "
        f"{format_duration(summary['wall_seconds'])} at {summary['tokens_per_second']:,.0f} "
        f"tokens/s\n"
        f"best     {folder / 'checkpoints' / 'best.pt'}\n"
        f"curve    {folder / 'loss.png'}\n"
        f"next     {PYTHON} sample.py run={summary['name']}"
    )
