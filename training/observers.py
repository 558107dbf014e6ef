"""Observers of a training run: speed, profiler, progress bar, metrics.jsonl and wandb.

metrics.jsonl is the source of truth, and wandb gets the same rows. A row may contain tensors. They stay on the device
until the rows are written, about once a second, so that no step waits for the device. A Path in a row is a picture.
"""

import json
import math
import os
import textwrap
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch

from common.console import ProgressBar
from common.errors import EXIT_CODES, TrainingFailed, UserError, status_of
from common.system import reset_peak_memory
from training.checkpoint import TrainState
from training.config import OVERFITTING_EVALS, RunConfig
from training.device import Runtime
from training.peak_flops import peak_flops
from training.profiler import StepProfiler
from training.run_folder import RunFolder
from training.speed import Speed
from training.wandb_logger import WandbRun

FLUSH_INTERVAL_S = 1.0
SUMMARY_NAMES = {
    "last_val_loss": "val/loss", "last_val_bpb": "val/bpb", "last_train_loss": "train/loss",
    "peak_memory_bytes": "peak_memory_bytes", "score_variance": "attention/score_variance",
    "attention_entropy": "attention/entropy", "attention_distance": "attention/mean_distance",
    "step_ms": "step_ms", "tokens_per_second": "tokens_per_second", "mfu": "mfu",
}  # fmt: skip


class Observers(ExitStack):
    """Step timing, profiler, progress bar, metrics.jsonl and wandb. A context manager around the loop.

    For each step, the loop calls start_step, end_step and log_step, with phases in between. Only rank 0 logs.
    """

    def __init__(self, config: RunConfig, runtime: Runtime, run: RunFolder, state: TrainState):
        super().__init__()
        self.config, self.runtime, self.run, self.state = config.train, runtime, run, state
        self.decay_keys = [
            f"optimizer.{key}" for key in vars(config.optimizer) if key.endswith("weight_decay")
        ]
        self.tokens_per_step = config.train.batch_size * config.model.block_size
        flops = self.tokens_per_step * run.summary["flops_per_token"]
        peak = peak_flops(runtime.device, runtime.dtype) * runtime.dist.world_size
        self.speed = Speed(runtime.device, self.tokens_per_step, flops, peak)
        self.start_step = self.speed.start_step
        self.read_timing = dict  # no step yet
        self.bar = ProgressBar(1.0, initial=state.progress)
        self.bar.show(state.progress, "compiling" if runtime.compile else "evaluating")
        profiles = config.train.profile and run.is_main
        self.profiler = (
            StepProfiler(runtime.device, run.folder, self.bar.console.out) if profiles else None
        )
        run_config = asdict(config) | {
            "attention": asdict(config.attention) | run.summary["attention"]
        }
        self.wandb = WandbRun(config.wandb, run.folder, run_config, state.wandb_id, name=run.name)
        state.wandb_id = self.wandb.id
        self.metrics = MetricsLogger(run.folder, state.metrics, self.wandb) if run.is_main else None

    def __enter__(self) -> Self:
        self.push(self._finish_wandb)
        self.enter_context(self.bar)
        if self.profiler:
            self.enter_context(self.profiler)
        self.run.update(self.results())  # no step may be left
        reset_peak_memory(self.runtime.device)
        self.state.started = time.perf_counter() - self.state.seconds
        return self

    def _finish_wandb(self, error_type, error, traceback) -> None:
        is_interrupted = error is None and self.state.stopped
        self.wandb.finish(EXIT_CODES["interrupted" if is_interrupted else status_of(error)])

    def phase(self, name: str) -> AbstractContextManager:
        """Context manager: a phase of the current step, for the profiler."""
        return torch.profiler.record_function(name) if self.profiler else nullcontext()

    def end_step(self) -> None:
        self.read_timing = self.speed.end_step()
        if self.profiler:
            self.profiler.step()

    def log_step(self, metrics: dict[str, Any]) -> None:
        """Log the metrics of a step and of its evaluation, if any. Raises TrainingFailed if a loss is not finite."""
        if self.metrics is None or not metrics:
            return
        state = self.state
        if "val/loss" in metrics:
            self._print_evaluation(metrics)
        counters = {
            "step": state.step,
            "tokens": state.step * self.tokens_per_step,
            "seconds": state.seconds,
        }
        self.metrics.log(counters | metrics, self.read_timing)
        if state.progress >= 1:
            self.metrics.flush()
        label = f"step {state.step}" + (
            f"/{self.config.steps}" if self.config.steps is not None else ""
        )
        loss, speed = (self.metrics.last.get(key) for key in ("train/loss", "tokens_per_second"))
        self.bar.show(
            state.progress,
            label,
            "" if None in (loss, speed) else f"loss {loss:.3f}  {speed:,.0f} tokens/s",
        )

    def _print_evaluation(self, metrics: dict[str, Any]) -> None:
        """Print the validation loss, the sample, and a warning if the validation loss no longer falls."""
        state, patience = self.state, self.config.patience
        line = f"step {state.step}: validation loss {metrics['val/loss']:.4f}, {metrics['val/bpb']:.3f} bits per byte"
        self.bar.print_text(
            line + (", the best so far" if state.is_best and state.step > 0 else ""), style="bold"
        )
        if sample := metrics.get("sample", "").strip("\n"):
            self.bar.print_text(
                textwrap.indent(sample, "  | ", lambda line: True), "  | ", style="dim"
            )
        if state.evals_since_best == OVERFITTING_EVALS:
            advice = f"start another run with train.steps={state.best_step}, or a larger {' and '.join(self.decay_keys)}"
            line = f"overfitting: the validation loss has not fallen since step {state.best_step}; {advice}"
            self.bar.print_text(line, style="bold yellow")
        if state.evals_since_best == patience:
            self.bar.print_text(
                f"stopping: train.patience={patience} evaluations without a lower loss"
            )

    def flush(self) -> dict:
        """Write all metrics to the disk. Returns results. Raises TrainingFailed if a loss is not finite."""
        self.metrics.flush(sync=True)
        results = self.results()
        self.wandb.set_summary(self.run.summary | results)
        return results

    def results(self) -> dict:
        """Losses, speed and memory, under their names in summary.json."""
        last = self.metrics.last if self.metrics else {}
        newest = {name: last.get(metric) for name, metric in SUMMARY_NAMES.items()}
        return self.state.summary() | newest | self.speed.median()


class MetricsLogger:
    """Collects rows, and writes several at a time to metrics.jsonl and wandb.

    last: newest value of each metric, also from before a resume.
    """

    def __init__(self, folder: Path, last: dict, wandb: WandbRun):
        self.path, self.last, self.wandb = folder / "metrics.jsonl", last, wandb
        self.rows: list[tuple[dict, Callable[[], dict]]] = []
        self.flushed = time.perf_counter()
        if (
            wandb.is_enabled and not (folder / "wandb").exists()
        ):  # it was off, or killed before it has started
            wandb.log([json.loads(line) for line in self.path.read_bytes().splitlines()])

    def log(self, row: dict, read: Callable[[], dict] = dict) -> None:
        """Collect a row. read: called when the row is written. Returns more columns, such as device times."""
        self.rows.append((row, read))
        if time.perf_counter() - self.flushed >= FLUSH_INTERVAL_S:
            self.flush()

    def flush(self, sync: bool = False) -> None:
        """Write the collected rows. sync: also to the disk. Raises TrainingFailed if a loss is not finite."""
        rows, self.rows = [_to_numbers(row | read()) for row, read in self.rows], []
        self.flushed = time.perf_counter()
        with open(self.path, "a", encoding="utf-8") as file:
            file.writelines(
                json.dumps(row, default=str) + "\n" for row in rows
            )  # str: a picture's path
            file.flush()
            if sync:
                os.fsync(file.fileno())
        self.wandb.log(rows)
        for row in rows:
            self.last |= row
            if bad := [key for key in ("val/loss", "train/loss") if row.get(key, 0.0) is None]:
                raise TrainingFailed(
                    f"{bad[0]} is not a finite number at step {row['step']}. Lower optimizer.lr, then run the command "
                    "again: it resumes from the last checkpoint. If that fails, copy an older checkpoint over last.pt"
                )


def remove_later_rows(path: Path, step: int) -> dict:
    """Remove the rows after `step`. Returns the newest value of each metric. Raises UserError if a row is missing."""
    size, last = 0, {"step": -1}
    with suppress(
        FileNotFoundError, ValueError, TypeError, LookupError
    ):  # a damaged row, or the process was killed
        for line in path.read_bytes().splitlines(keepends=True):
            row = json.loads(line)
            if row["step"] > step or row["step"] not in ((last["step"] + 1,) if size else (0, 1)):
                break
            last |= row
            size += len(line)
    if 0 < step != last["step"]:
        raise UserError(
            f"{path} has no row of step {last['step'] + 1}; restore the file, or set another name"
        )
    path.touch()
    os.truncate(path, size)
    return last


def _to_numbers(row: dict) -> dict:
    """Read tensors from the device. Numbers that are not finite become None."""
    numbers = {
        key: value.item() if isinstance(value, torch.Tensor) else value
        for key, value in row.items()
    }
    return {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in numbers.items()
    }
