"""Logs a training run: what it prints, metrics.jsonl, wandb, step times and the profiler."""

import json
import math
import os
import textwrap
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch

from common.console import ProgressBar
from common.errors import EXIT_CODES, TrainingFailed, UserError, status_of
from common.machine import reset_peak_memory
from training.config import OVERFITTING_EVALS, RunConfig
from training.run_folder import RunFolder
from training.runtime import Runtime
from training.speed import Speed, StepProfiler, peak_flops
from training.train_state import TrainState
from training.wandb_logger import WandbLogger, make_training_run, make_training_summary

# names in summary.json, and the metrics whose newest values they have
SUMMARY_METRICS = {
    "last_val_loss": "val/loss",
    "last_val_bpb": "val/bpb",
    "last_train_loss": "train/loss",
    "peak_memory_bytes": "peak_memory_bytes",
    "score_variance": "attention/score_variance",
    "attention_entropy": "attention/entropy",
    "attention_distance": "attention/mean_distance",
    "step_ms": "step_ms",
    "tokens_per_second": "tokens_per_second",
    "mfu": "mfu",
}


class RunLogger(AbstractContextManager):
    """Context manager around the training loop. Only rank 0 prints and writes.

    For each step, the loop calls start_step, end_step and log_step, with phases in between.
    facts: of describe_run. Raises UserError if metrics.jsonl lacks a row.
    """

    def __init__(
        self,
        config: RunConfig,
        runtime: Runtime,
        run: RunFolder,
        state: TrainState,
        facts: dict[str, Any],
    ):
        self.config = config
        self.runtime = runtime
        self.run = run
        self.state = state
        self.tokens_per_step = config.train.batch_size * config.model.block_size
        self.flops_per_step = self.tokens_per_step * facts["flops_per_token"]
        peak = peak_flops(runtime.device, runtime.dtype) * runtime.dist.world_size
        self.speed = Speed(runtime.device, self.tokens_per_step, self.flops_per_step, peak)
        self.read_timing: Callable[[], dict] = dict  # there is no timing before the first step
        self.wandb = None
        self.metrics = None
        if run.is_main:
            self.metrics = MetricsLogger(run.folder / "metrics.jsonl", state.last_logged_step)
        self.bar = ProgressBar(1.0, initial=state.progress)
        self.profiler = None
        if config.train.profile and run.is_main:
            self.profiler = StepProfiler(runtime.device, run.folder, self.bar.console.out)

    def __enter__(self) -> Self:
        run = self.run
        if run.is_main:
            wandb_run = make_training_run(run.folder, asdict(self.config), run.summary, end=None)
            self.wandb = WandbLogger(self.config.wandb, [wandb_run], self.bar.print_text)
        self.bar.start()
        activity = "compiling" if self.runtime.compile else "evaluating"
        self.bar.show(self.state.progress, activity)
        if self.profiler:
            self.profiler.start()
        reset_peak_memory(self.runtime.device)
        self.state.start_clock()
        return self

    def __exit__(self, error_type: Any, error: BaseException | None, traceback: Any) -> None:
        if self.profiler:
            self.profiler.stop()
        self.bar.stop()
        status = status_of(error)
        if error is None and self.state.stopped:
            status = "interrupted"
        if self.wandb:
            has_model = self.config.wandb.log_model and status == "finished"
            self.wandb.finish(
                EXIT_CODES[status],
                summary=make_training_summary(self.run.summary),
                alert=str(error) if status == "failed" else None,
                model=str(self.run.best) if has_model else None,
            )

    def start_step(self) -> None:
        """Call this at the beginning of a step."""
        self.speed.start_step()

    def phase(self, name: str) -> AbstractContextManager:
        """Context manager: a phase of the current step, for the profiler."""
        return torch.profiler.record_function(name) if self.profiler else nullcontext()

    def end_step(self) -> None:
        """Call this after the weights are updated."""
        self.read_timing = self.speed.end_step()
        if self.profiler:
            self.profiler.step()

    def log_step(self, metrics: dict[str, Any] | None) -> None:
        """Print and log the metrics of a step, and of its evaluation if it has one.

        metrics: None if a signal has stopped the evaluation. Nothing is logged.
        Raises TrainingFailed if a loss is not finite.
        """
        if self.metrics is None or metrics is None:
            return
        state = self.state
        if "val/loss" in metrics:
            self._print_evaluation(metrics)
        tokens = state.step * self.tokens_per_step
        counters = {
            "step": state.step,
            "tokens": tokens,
            "seconds": state.seconds,
            "flops": state.step * self.flops_per_step,
        }
        self.metrics.log(counters | metrics, self.read_timing)
        if state.progress >= 1:
            self.metrics.flush()
        self._show_progress(self.metrics.last)

    def _show_progress(self, newest: dict[str, Any]) -> None:
        """Update the progress bar, or print a line if the output is not a terminal."""
        label = f"step {self.state.step}"
        if self.config.train.steps is not None:
            label += f"/{self.config.train.steps}"
        details = ""
        if newest.get("train/loss") is not None and newest.get("tokens_per_second") is not None:
            loss = newest["train/loss"]
            details = f"loss {loss:.3f}  {newest['tokens_per_second']:,.0f} tokens/s"
        self.bar.show(self.state.progress, label, details)

    def _print_evaluation(self, metrics: dict[str, Any]) -> None:
        """Print the validation loss, the sample, and a warning if the loss no longer falls."""
        state = self.state
        patience = self.config.train.patience
        loss = f"validation loss {metrics['val/loss']:.4f}, {metrics['val/bpb']:.3f} bits per byte"
        best = ", the best so far" if state.is_best and state.step > 0 else ""
        self.bar.print_text(f"step {state.step}: {loss}{best}", style="bold")
        sample = metrics.get("sample", "").strip("\n")
        if sample:
            lines = textwrap.indent(sample, "  | ", lambda line: True)
            self.bar.print_text(lines, "  | ", style="dim")
        # without a best step, no validation loss was finite
        if state.evals_since_best == OVERFITTING_EVALS and state.best_step is not None:
            problem = f"the validation loss has not fallen since step {state.best_step}"
            decay = [key for key in vars(self.config.optimizer) if key.endswith("weight_decay")]
            larger = " and ".join(f"optimizer.{key}" for key in decay)
            epochs = state.best_step / state.steps_per_epoch
            advice = f"start another run with train.epochs={epochs:.3g}, or a larger {larger}"
            self.bar.print_text(f"overfitting: {problem}; {advice}", style="bold yellow")
        if state.evals_since_best == patience:
            reason = f"train.patience={patience} evaluations without a lower loss"
            self.bar.print_text(f"stopping: {reason}")

    def flush(self) -> dict[str, Any]:
        """Write all metrics to the disk. Returns the results for summary.json.

        Call this before a checkpoint is saved. Raises TrainingFailed if a loss is not finite.
        """
        if self.metrics is None:
            return {}
        self.metrics.flush(sync=True)
        return self.results()

    def results(self) -> dict[str, Any]:
        """Losses, speed and memory, under their names in summary.json."""
        newest = self.metrics.last if self.metrics else {}
        metrics = {name: newest.get(metric) for name, metric in SUMMARY_METRICS.items()}
        peak = {"peak_flops": self.speed.peak}
        return self.state.summary() | metrics | peak | self.speed.median()


FLUSH_INTERVAL_S = 1.0


class MetricsLogger:
    """Writes rows to metrics.jsonl, several at a time. Rank 0 has one.

    step: rows after it, of a process that was killed, are removed.
    last: newest value of each metric, also from before a resume.
    Raises UserError if a row up to `step` is missing.
    """

    def __init__(self, path: Path, step: int):
        self.path = path
        self.last = remove_later_rows(path, step)
        self.rows: list[tuple[dict, Callable[[], dict]]] = []
        self.flushed = time.perf_counter()

    def log(self, row: dict, read_timing: Callable[[], dict] = dict) -> None:
        """Collect a row.

        read_timing: returns more columns. It waits for the device, so it is called when the row is
            written.
        """
        self.rows.append((row, read_timing))
        if time.perf_counter() - self.flushed >= FLUSH_INTERVAL_S:
            self.flush()

    def flush(self, sync: bool = False) -> None:
        """Write the collected rows. Raises TrainingFailed if a loss is not finite.

        sync: wait until the rows are on the disk.
        """
        rows = []
        for row, read_timing in self.rows:
            rows.append(_to_numbers(row | read_timing()))
        self.rows = []
        self.flushed = time.perf_counter()
        with open(self.path, "a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
            file.flush()
            if sync:
                os.fsync(file.fileno())
        for row in rows:
            self.last |= row
            for key in ("val/loss", "train/loss"):
                if key in row and row[key] is None:
                    raise TrainingFailed(
                        f"{key} is not a finite number at step {row['step']}. Lower optimizer.lr, "
                        "then run the command again: it resumes from the last checkpoint. If that "
                        "fails, copy an older checkpoint over last.pt"
                    )


def _to_numbers(row: dict[str, Any]) -> dict[str, Any]:
    """Read tensors from the device. Numbers that are not finite become None."""
    numbers = {}
    for key, value in row.items():
        if isinstance(value, torch.Tensor):
            value = value.item()
        if isinstance(value, float) and not math.isfinite(value):
            value = None
        numbers[key] = value
    return numbers


def remove_later_rows(path: Path, step: int) -> dict[str, Any]:
    """Remove the rows after `step` from metrics.jsonl. Returns the newest value of each metric.

    The first row is of step 0, or of step 1 without an initial evaluation. A process that was
    killed can leave an incomplete last line. Raises UserError if a row up to `step` is missing.
    """
    content = path.read_bytes() if path.exists() else b""
    newest: dict[str, Any] = {"step": -1}
    size = 0  # bytes of the rows that stay
    for line in content.splitlines(keepends=True):
        row = _parse_row(line)
        expected = (0, 1) if size == 0 else (newest["step"] + 1,)
        if row.get("step") not in expected or row["step"] > step:
            break
        newest |= row
        size += len(line)
    if step > 0 and newest["step"] != step:
        raise UserError(
            f"{path} has no row of step {newest['step'] + 1}; restore it, or set another name"
        )
    path.touch()
    os.truncate(path, size)
    return newest


def _parse_row(line: bytes) -> dict[str, Any]:
    """Parse a line of metrics.jsonl. Returns {} for an incomplete or damaged line."""
    try:
        row = json.loads(line)
    except ValueError:
        return {}
    return row if isinstance(row, dict) else {}
