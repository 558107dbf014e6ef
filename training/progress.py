"""Progress of a training run on the console: the first lines, a progress bar, evaluations, and the last lines."""

import textwrap
from math import inf
from pathlib import Path
from typing import Any

from common.console import ProgressBar, format_duration, pluralize, printable
from common.errors import format_value
from model import GPTConfig
from training.config import AUTO


class TrainingProgress(ProgressBar):
    """A progress bar with step, loss, tokens/s and remaining time; lines are printed above it.

    steps: train.steps. progress: the finished part of the run, 0 to 1.
    """

    def __init__(self, steps: int | None, progress: float):
        super().__init__(1.0, initial=progress)
        self.steps = steps
        self.update(progress, "evaluating")

    def print_evaluation(self, row: dict, is_best: bool) -> None:
        """Print the validation loss and the sample of an evaluation."""
        line = f"step {row['step']}: validation loss {row['val/loss']:.4f}, {row['val/bpb']:.3f} bits per byte"
        self.print(line + (", the best so far" if is_best else ""), style="bold")
        sample = printable(row.get("sample", "").strip("\n"))
        if sample:
            self.print(textwrap.indent(sample, "  | ", lambda line: True), style="dim")

    def show(self, step: int, progress: float, last: dict) -> None:
        """Update the bar. last: the newest value of each metric."""
        label = f"step {step}" + (f"/{self.steps}" if self.steps is not None else "")
        details = ""
        if last.get("train/loss") is not None:
            details = f"loss {last['train/loss']:.3f}  {last['tokens_per_second']:,.0f} tokens/s"
        self.update(progress, label, details)


def format_banner(folder: Path, config: Any, run_info: dict, meta: dict, step: int) -> str:
    """The first lines of a run: what is trained, on which data and device.

    config: the config of train.py. run_info: as in summary.json. meta: the data's meta.json. step: finished steps.
    """
    model, train = config.model, config.train
    tokens, tokens_per_step = meta["tokens"], train.batch_size * model.block_size
    run = [str(folder)]
    if step:
        run.append(f"resumed from step {step:,}")

    data = [
        config.data.label,
        f"{tokens['train']:,} training tokens and {tokens['val']:,} validation tokens",
        f"{meta['tokenizer']['name']} vocabulary of {meta['vocab_size']:,}",
    ]
    if config.data.document_mask:
        data.append("attention within documents only")

    parameters = f"{run_info['n_params']:,} parameters"
    if model.max_ngram > 1:
        parameters += f", {model.ngram_table_size * model.n_embd:,} of them in the n-gram table"
    if train.init_from and not step:
        parameters += f", starting from {train.init_from}"

    kernel = run_info["attention"]
    device = [run_info["device_name"], run_info["dtype"]]
    if run_info["compile"]:
        device.append("compiled")
    device.append(f"attention {kernel['requested']} -> {kernel['resolved']}")
    if run_info["world_size"] > 1:
        device.append(pluralize(run_info["world_size"], "process"))

    limits = [pluralize(train.steps, "step")] if train.steps is not None else []
    limits += [f"{train.minutes:g} minutes"] if train.minutes is not None else []
    length = [f"{' or '.join(limits)} of {train.batch_size} x {model.block_size} = {tokens_per_step:,} tokens"]
    if run_info["accumulation"] > 1 or train.micro_batch_size == AUTO:
        size = pluralize(run_info["micro_batch_size"], "sequence")
        length.append(f"{pluralize(run_info['accumulation'], 'micro batch')} of {size}")
    if train.micro_batch_size == AUTO:
        length[-1] += " (the largest that fits)"
    if train.steps is not None:
        length.append(format_epochs(train.steps * tokens_per_step / tokens["train"]))
    if config.schedule.warmup_steps >= (train.steps or inf):
        length.append(f"all of them warmup (schedule.warmup_steps={config.schedule.warmup_steps:,})")

    lines = [
        f"run      {', '.join(run)}",
        f"data     {', '.join(data)}",
        f"model    {model.name}, {describe_model(model)}: {parameters}",
        f"device   {', '.join(device)}",
        f"training for {', '.join(length)}",
    ]
    return "\n".join(lines)


def describe_model(model: GPTConfig) -> str:
    """The size of a model: layers, heads, channels, context and windows."""
    words = [pluralize(model.n_layer, "layer"), pluralize(model.n_head, "head")]
    if model.kv_heads != model.n_head:
        words.append(f"{model.kv_heads} key/value heads")
    words += [f"{model.n_embd} channels", f"context {model.block_size}"]
    if any(model.windows):
        words.append(f"windows {format_value(model.window)}")
    return ", ".join(words)


def format_epochs(epochs: float) -> str:
    return f"{epochs:,.0f} epochs" if epochs >= 10 else f"{epochs:.2g} epochs"


def format_summary(summary: dict, folder: Path) -> str:
    """The last lines of a run: its losses and speed, and the command for a sample. summary: as in summary.json."""
    best, last = (f"{summary[key]:.4f}" for key in ("best_val_loss", "last_val_loss"))
    losses = f"best validation loss {best}" + (f", last {last}," if last != best else "")
    steps, duration = pluralize(summary["step"], "step"), format_duration(summary["wall_seconds"])
    lines = [
        f"{losses} after {steps} in {duration}, at a median speed of {summary['tokens_per_second']:,.0f} tokens/s",
        f"curve    {folder / 'loss.png'}",
        f"next     python sample.py run={summary['name']}",
    ]
    return "\n".join(lines)
