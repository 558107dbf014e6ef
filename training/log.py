"""Logs a training run: what it prints, metrics.jsonl, and step times."""

import json
import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Self

import torch

from common.console import ProgressBar
from common.errors import TrainingFailed
from common.machine import reset_peak_memory
from training.config import OVERFITTING_EVALS, STUDENT_LENGTH, RunConfig
from training.run_folder import RunFolder, read_rows, summary_key
from training.runtime import Runtime
from training.speed import Speed, peak_flops
from training.train_state import TrainState

PRINTED_SAMPLE_LINES = 3  # of each evaluation; metrics.jsonl has the complete sample


class RunLogger(AbstractContextManager):
    """Context manager around the training loop. Only rank 0 prints and writes.

    For each step, the loop calls start_step, end_step and log_step.
    facts: what describe_run returns.
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
        self.state = state
        self.tokens_per_step = config.train.batch_size * config.model.block_size
        self.flops_per_step = self.tokens_per_step * facts["flops_per_token"]
        peak = peak_flops(runtime.device, runtime.dtype) * runtime.dist.world_size
        self.speed = Speed(runtime.device, self.tokens_per_step, self.flops_per_step, peak)
        self.read_timing: Callable[[], dict] = dict  # of the last step; empty before the first
        self.metrics = MetricsLogger(run) if run.is_main else None
        self.bar = ProgressBar(1.0, initial=state.progress)

    def __enter__(self) -> Self:
        self.bar.start()
        self.bar.show(self.state.progress, "compiling" if self.runtime.compile else "evaluating")
        reset_peak_memory(self.runtime.device)
        self.state.start_clock()
        return self

    def __exit__(self, error_type: Any, error: BaseException | None, traceback: Any) -> None:
        self.bar.stop()

    def start_step(self) -> None:
        """Call this at the beginning of a step."""
        self.speed.start_step()

    def end_step(self) -> None:
        """Call this after the weights are updated."""
        self.read_timing = self.speed.end_step()

    def log_step(self, metrics: dict[str, Any]) -> None:
        """Print and log the metrics of a step, and of its evaluation if it has one.

        Raises TrainingFailed if a loss is not finite.
        """
        if self.metrics is None:
            return
        state = self.state
        if "val/loss" in metrics:
            self._print_evaluation(metrics)
        counters = {
            "step": state.step,
            "tokens": state.step * self.tokens_per_step,
            "seconds": state.seconds,
            "flops": state.step * self.flops_per_step,
        }
        if state.config.n_teachers is not None:
            counters["teachers"] = len(state.teachers)
        self.metrics.log(counters | metrics, self.read_timing)
        if state.is_finished:
            self.metrics.flush()
        self._show_progress(self.metrics.newest)

    def _show_progress(self, newest: dict[str, Any]) -> None:
        """Update the progress bar, or print a line if the output is not a terminal."""
        label = f"step {self.state.step}"
        if self.config.train.steps is not None:
            n_teachers = self.state.planned_teachers
            models = n_teachers + STUDENT_LENGTH if n_teachers else 1
            label += f"/{self.config.train.steps * models}"
        label += self.state.role
        details = ""
        if newest.get("train/loss") is not None and newest.get("tokens_per_second") is not None:
            details = (
                f"loss {newest['train/loss']:.3f}  {newest['tokens_per_second']:,.0f} tokens/s"
            )
        self.bar.show(self.state.progress, label, details)

    def _print_evaluation(self, metrics: dict[str, Any]) -> None:
        """Print the validation loss, the sample, and a warning if the loss no longer falls."""
        state = self.state
        loss = f"validation loss {metrics['val/loss']:.4f}, {metrics['val/bpb']:.3f} bits per byte"
        best = ", the best so far" if state.is_best and state.step > 0 else ""
        self.bar.print_text(f"step {state.step}{state.role}: {loss}{best}", style="bold")
        sample = metrics.get("sample", "").strip("\n")
        if sample:
            margin = "  | "
            first_lines = sample.split("\n")[:PRINTED_SAMPLE_LINES]
            text = margin + f"\n{margin}".join(first_lines)
            self.bar.print_text(text, margin, style="dim")
        if self.config.train.n_teachers is not None and state.planned_teachers == 0:
            self.bar.print_text(
                "train.minutes has no time for two teachers and a student: this model is the result"
            )
        # without a best step, no validation loss was finite
        if state.evals_since_best == OVERFITTING_EVALS and state.best_step is not None:
            advice = "start another run with a lower optimizer.lr"
            if state.best_step > 0:
                epochs = state.best_step / state.steps_per_epoch
                advice = f"start another run with train.epochs={epochs:.3g}, or more weight decay"
            self.bar.print_text(
                f"overfitting: the validation loss has not fallen since step {state.best_step}; "
                f"{advice}",
                style="bold yellow",
            )
        if state.evals_since_best == self.config.train.patience:
            self.bar.print_text(
                f"stopping: train.patience={state.evals_since_best} evaluations "
                "without a lower loss"
            )

    def flush(self) -> None:
        """Wait until all metrics are on the disk. Call this before a checkpoint is saved.

        Raises TrainingFailed if a loss is not finite.
        """
        if self.metrics is not None:
            self.metrics.flush(sync=True)

    def results(self) -> dict[str, Any]:
        """The newest metrics, the best evaluation and the speed, as in summary.json."""
        results = {"peak_flops": self.speed.peak}
        if self.metrics is not None:
            for name, value in self.metrics.newest.items():
                if not isinstance(value, str):  # samples, and the names of pictures
                    results[summary_key(name)] = value
        return results | self.state.summary() | self.speed.median()


FLUSH_INTERVAL_S = 1.0


class MetricsLogger:
    """Writes rows to metrics.jsonl, several at a time. Rank 0 has one.

    newest: newest value of each metric, also from before a resume.
    """

    def __init__(self, run: RunFolder):
        self.run = run
        self.newest: dict[str, Any] = {}
        read_rows(run.folder, self.newest.update)
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
        with open(self.run.folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row) + "\n")
            file.flush()
            if sync:
                os.fsync(file.fileno())
        for row in rows:
            self.newest |= row
            for key in ("val/loss", "train/loss"):
                if key in row and row[key] is None:
                    raise TrainingFailed(
                        f"{key} is not a finite number at step {row['step']}. Lower optimizer.lr, "
                        f"then resume with the same command and name={self.run.name}. If that "
                        "fails, start another run from an older checkpoint with train.init_from"
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
