"""What a person sees while a model trains: a bar on a terminal, plain lines anywhere else."""

import textwrap
import time
from math import inf
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from common.console import LINE_INTERVAL_S, format_duration, pluralize, printable
from common.errors import format_value
from training.config import AUTO


class TrainingProgress:
    """Shows step, loss, tokens/s and the time left; `say` prints above the bar."""

    def __init__(self, steps: int | None, progress: float):
        self.console = Console(highlight=False, emoji=False)
        self.steps, self.first, self.started, self.said = steps, progress, time.perf_counter(), time.perf_counter()
        self.bar = Progress(
            TextColumn("{task.fields[label]}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(compact=False),
            console=self.console,
            disable=not self.console.is_terminal,
            transient=True,
            expand=True,
        )
        self.task = self.bar.add_task("", total=1.0, completed=progress, label="evaluating", numbers="")

    def __enter__(self) -> "TrainingProgress":
        self.bar.start()
        return self

    def __exit__(self, *_) -> None:
        self.bar.stop()

    def print(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, markup=False, soft_wrap=True)

    def evaluated(self, row: dict, better: bool = False) -> None:
        """A line on the validation loss, and the text that the model writes now."""
        self.print(f"step {row['step']}: validation loss {row['val/loss']:.4f}, {row['val/bpb']:.3f} bits per byte"
                 + (", the best so far" if better else ""), style="bold")  # fmt: skip
        text = printable(row.get("sample", "").strip("\n"))
        if text:
            self.print(textwrap.indent(text, "  | ", lambda line: True), style="dim")

    def update(self, step: int, progress: float, last: dict) -> None:
        """`progress`: the part of the run that is done, 0 to 1. `last`: the newest numbers, by their metric's name."""
        label = f"step {step}" + (f"/{self.steps}" if self.steps is not None else "")
        numbers = ""
        if last.get("train/loss") is not None:
            numbers = f"loss {last['train/loss']:.3f}  {last['tokens_per_second']:,.0f} tok/s"
        self.bar.update(self.task, completed=progress, label=label, numbers=numbers)
        now = time.perf_counter()
        if self.bar.disable and numbers and (now - self.said >= LINE_INTERVAL_S or progress >= 1):
            self.said = now
            left = (now - self.started) / max(1e-9, progress - self.first) * (1 - progress)
            self.print(f"{label}  {numbers}  {format_duration(left)} left")


def run_banner(folder: Path, config: Any, facts: dict, meta: dict, step: int) -> str:
    """What is about to be trained, on what, and by which kernel. `facts` as in summary.json, `meta` as in meta.json."""
    model, train, tokens, kernel = config.model, config.train, meta["tokens"], facts["attention"]
    tokens_per_step = train.batch_size * model.block_size
    budget = [pluralize(train.steps, "step")] if train.steps is not None else []
    budget += [f"{train.minutes:g} minutes"] if train.minutes is not None else []
    at_a_time = pluralize(facts["micro_batch_size"], "sequence")
    lines = {
        "run": f"{folder}" + (f", continued from step {step:,}" if step else ""),
        "text": f"{config.data.label}, {tokens['train']:,} tokens to train on and {tokens['val']:,} to validate, "
        f"{meta['tokenizer']['name']} vocabulary of {meta['vocab_size']:,}"
        + (", documents kept apart" if config.data.document_mask else ""),
        "model": f"{model.name}, {shape(model)}{_sees(model)}: {facts['n_params']:,} parameters"
        + (f", starting from {train.init_from}" if train.init_from and not step else ""),
        "runs on": f"{facts['device_name']}, {facts['dtype']}{', compiled' if facts['compile'] else ''}, "
        f"attention {kernel['requested']} -> {kernel['resolved']}"
        + (f", {facts['world_size']} processes" if facts["world_size"] > 1 else ""),
        "for": f"{' or '.join(budget)} of {train.batch_size} x {model.block_size} = {tokens_per_step:,} tokens"
        + (f" in {facts['accumulation']} parts" if facts["accumulation"] > 1 else "")
        + (f", {at_a_time} at a time, as many as fit" if train.micro_batch_size == AUTO else "")
        + (f", {epochs(train.steps * tokens_per_step / tokens['train'])}" if train.steps is not None else "")
        + (", all of them schedule.warmup_steps" if config.schedule.warmup_steps >= (train.steps or inf) else ""),
    }
    return "\n".join(f"{key:<8} {value}" for key, value in lines.items())


def shape(model: Any) -> str:
    """A GPTConfig in a few words."""
    layers, heads = pluralize(model.n_layer, "layer"), pluralize(model.n_head, "head")
    return f"{layers}, {heads}, {model.n_embd} wide, context {model.block_size}"


def epochs(count: float) -> str:
    return f"{count:,.0f} epochs" if count >= 10 else f"{count:.2g} epochs"


def _sees(model: Any) -> str:
    """What is not plain about a model's attention."""
    shared = f", {model.kv_heads} key/value heads" if model.kv_heads != model.n_head else ""
    return shared + (f", windows {format_value(model.window)}" if any(model.windows) else "")


def closing_summary(summary: dict, folder: Path) -> str:
    """How a run ended, and what to type next."""
    best, last = (f"{summary[key]:.4f}" for key in ("best_val_loss", "last_val_loss"))
    later = f", the last {last}," if last != best else ""
    return "\n".join([
        f"best validation loss {best}{later} after {pluralize(summary['step'], 'step')} and "
        f"{format_duration(summary['wall_seconds'])}, {summary['tokens_per_second']:,.0f} tokens/s in the median step",
        f"curve    {folder / 'loss.png'}",
        f"next     python sample.py run={summary['name']}",
    ])  # fmt: skip
