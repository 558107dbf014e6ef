"""Observers of a training run, combined in one object that the loop notifies."""

import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from typing import Self

import torch

from common.console import ProgressBar
from common.run_dir import EXIT_CODES, RunDir, status_of
from training.checkpoint import TrainState
from training.config import OVERFITTING_EVALS, RunConfig
from training.device import Runtime
from training.metrics import MetricsLogger, summarize
from training.profiler import StepProfiler
from training.speed import Speed, compile_seconds, peak_flops
from training.wandb_logger import WandbRun


class Observers(ExitStack):
    """Step timing, profiler, progress bar, metrics.jsonl and wandb. A context manager around the loop.

    For each step, the loop calls start_step, end_step and log_step, with phases in between. The row of a step includes
    its evaluation, if any. config: the config of train.py. run: after its start. progress: finished part of the run, 0
    to 1.
    """

    def __init__(self, config: RunConfig, runtime: Runtime, run: RunDir, state: TrainState, progress: float):
        super().__init__()
        self.config, self.state, self.is_compiled = config.train, state, runtime.compile
        self._read_timing = dict  # no step yet
        self.tokens_per_step = config.train.batch_size * config.model.block_size
        flops = self.tokens_per_step * run.summary["flops_per_token"]
        peak = peak_flops(runtime.device, runtime.dtype) * runtime.dist.world_size
        self.speed = Speed(runtime.device, self.tokens_per_step, flops, peak)
        self.progress = ProgressBar(1.0, initial=progress)
        self.progress.update(progress, "evaluating")
        self.profiler = None
        if config.train.profile and run.is_main:
            trace = run.folder / "trace.json.gz"
            self.profiler = StepProfiler(runtime.device, run.summary["accumulation"], trace, self.progress.print)
        run_config = asdict(config) | {"attention": asdict(config.attention) | run.summary["attention"]}
        self.wandb = WandbRun(config.wandb, run.folder, run_config, state.wandb_id, name=run.name)
        # the gradient scaler skips steps whose gradients overflow
        must_be_finite = ["val/loss", "train/loss"] + ["grad_norm"] * (not state.scaler.is_enabled())
        self.metrics = MetricsLogger(run.folder if run.is_main else None, state.step, self.wandb, must_be_finite)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context manager: a phase of the current step, for the profiler."""
        with torch.profiler.record_function(name) if self.profiler else nullcontext():
            yield

    def start_step(self) -> None:
        self.speed.start_step()

    def end_step(self) -> None:
        self._read_timing = self.speed.end_step()
        if self.profiler:
            self.profiler.step()

    def log_step(self, row: dict, progress: float, is_best: bool = False) -> None:
        """Log a step's metrics, and those of an evaluation if there was one. progress: part of the run, 0 to 1.

        is_best: the evaluation found the lowest validation loss so far. Raises TrainingFailed if a loss is not finite.
        """
        step = self.state.step
        row = {"step": step, "tokens": step * self.tokens_per_step, "seconds": self.state.seconds} | row
        if "val/loss" in row:
            self._print_evaluation(row, is_best)
        self.metrics.log(row, self._read_timing)
        if progress >= 1:
            self.metrics.flush()
        label, last = f"step {step}" + f"/{self.config.steps}" * (self.config.steps is not None), self.metrics.last
        has_loss = last.get("train/loss") is not None
        details = f"loss {last['train/loss']:.3f}  {last['tokens_per_second']:,.0f} tokens/s" if has_loss else ""
        self.progress.update(progress, label, details)

    def _print_evaluation(self, row: dict, is_best: bool) -> None:
        """Print the validation loss, the sample, and a warning if the validation loss no longer falls."""
        line = f"step {row['step']}: validation loss {row['val/loss']:.4f}, {row['val/bpb']:.3f} bits per byte"
        self.progress.print(line + ", the best so far" * is_best, style="bold")
        if sample := row.get("sample", "").strip("\n"):
            self.progress.print(textwrap.indent(sample, "  | ", lambda line: True), style="dim")
        if self.state.evals_since_best == OVERFITTING_EVALS:
            best = self.state.best_step  # 0: the weights of train.init_from are the best
            self.progress.print(
                f"overfitting: the validation loss has not fallen since step {best} ({self.state.best_val_loss:.4f}); "
                f"for the next run, set {f'train.steps={best}, or ' if best else ''}a lower optimizer.lr or more "
                "weight decay",
                style="bold yellow",
            )
        if self.state.evals_since_best == self.config.patience:
            self.progress.print(f"stopping: train.patience={self.config.patience} evaluations without a lower loss")

    def flush(self) -> None:
        """Write all metrics to the disk. Raises TrainingFailed if a loss is not finite."""
        self.metrics.flush(sync=True)

    def summary(self) -> dict:
        """Speed, losses and memory, under their names in summary.json."""
        compile_s = compile_seconds() if self.is_compiled else None
        return summarize(self.metrics.last) | self.speed.median() | {"compile_s": compile_s}

    def __enter__(self) -> Self:
        self.push(lambda kind, error, traceback: self.wandb.finish(EXIT_CODES[status_of(error)]))
        self.enter_context(self.progress)
        if self.profiler:
            self.enter_context(self.profiler)
        return self
