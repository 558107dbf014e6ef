"""Observers of a training run, combined in one object that the loop notifies."""

import textwrap
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict
from typing import Any, Self

import torch

from common.console import ProgressBar
from common.run_dir import EXIT_CODES, RunDir, status_of
from common.system import reset_peak_memory
from training.checkpoint import TrainState
from training.config import OVERFITTING_EVALS, RunConfig
from training.device import Runtime
from training.metrics import MetricsLogger
from training.profiler import StepProfiler
from training.speed import Speed, compile_seconds, peak_flops
from training.wandb_logger import WandbRun

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

    def __init__(self, config: RunConfig, runtime: Runtime, run: RunDir, state: TrainState):
        super().__init__()
        self.config, self.runtime, self.run, self.state = config.train, runtime, run, state
        self.tokens_per_step = config.train.batch_size * config.model.block_size
        flops = self.tokens_per_step * run.summary["flops_per_token"]
        peak = peak_flops(runtime.device, runtime.dtype) * runtime.dist.world_size
        self.speed = Speed(runtime.device, self.tokens_per_step, flops, peak)
        self.start_step = self.speed.start_step
        self.read_timing = dict  # no step yet
        self.bar = ProgressBar(1.0, initial=state.progress)
        self.bar.update(state.progress, "evaluating")
        self.profiler = None
        if config.train.profile and run.is_main:
            self.profiler = StepProfiler(runtime.device, run.summary["accumulation"], run.folder, self.bar.print)
        run_config = asdict(config) | {"attention": asdict(config.attention) | run.summary["attention"]}
        self.wandb = WandbRun(config.wandb, run.folder, run_config, state.wandb_id, name=run.name)
        state.wandb_id = self.wandb.id
        self.metrics = MetricsLogger(run.folder, state.step, self.wandb) if run.is_main else None

    def __enter__(self) -> Self:
        self.push(self._finish_wandb)
        self.enter_context(self.bar)
        if self.profiler:
            self.enter_context(self.profiler)
        self.run.update(self.results())  # no step may be left
        reset_peak_memory(self.runtime.device)
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
        if self.metrics is None:
            return
        state = self.state
        if "val/loss" in metrics:
            self._print_evaluation(metrics)
        counters = {"step": state.step, "tokens": state.step * self.tokens_per_step, "seconds": state.seconds}
        self.metrics.log(counters | metrics, self.read_timing)
        if state.progress >= 1:
            self.metrics.flush()
        label = f"step {state.step}" + (f"/{self.config.steps}" if self.config.steps is not None else "")
        loss, speed = (self.metrics.last.get(key) for key in ("train/loss", "tokens_per_second"))
        self.bar.update(state.progress, label, "" if loss is None else f"loss {loss:.3f}  {speed:,.0f} tokens/s")

    def _print_evaluation(self, metrics: dict[str, Any]) -> None:
        """Print the validation loss, the sample, and a warning if the validation loss no longer falls."""
        state, patience = self.state, self.config.patience
        line = f"step {state.step}: validation loss {metrics['val/loss']:.4f}, {metrics['val/bpb']:.3f} bits per byte"
        self.bar.print(line + (", the best so far" if state.is_best and state.step > 0 else ""), style="bold")
        if sample := metrics.get("sample", "").strip("\n"):
            self.bar.print(textwrap.indent(sample, "  | ", lambda line: True), style="dim")
        if state.evals_since_best == OVERFITTING_EVALS:
            best = state.best_step
            line = f"overfitting: the validation loss has not fallen since step {best} ({state.best_val_loss:.4f}); "
            steps = f"train.steps={best}, " if best else ""  # 0: the weights of train.init_from are the best
            advice = f"for the next run, set {steps}a lower optimizer.lr or more weight decay"
            self.bar.print(line + advice, style="bold yellow")
        if state.evals_since_best == patience:
            self.bar.print(f"stopping: train.patience={patience} evaluations without a lower loss")

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
        speed = self.speed.median() | {"compile_s": compile_seconds() if self.runtime.compile else None}
        return self.state.summary() | newest | speed
