"""Observers of a training run, combined in one object that the loop notifies."""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from common.run_dir import EXIT_CODES, status_of
from training.metrics import MetricsLogger
from training.profiler import NullProfiler
from training.progress import TrainingProgress
from training.speed import Speed, compile_seconds
from training.wandb_logger import WandbRun


@dataclass
class Observers:
    """Step timing, profiler, progress bar, metrics.jsonl and wandb. A context manager around the loop.

    For each step, the loop calls start_step, end_step and log_step. The row of a step includes its evaluation, if any.
    """

    speed: Speed
    profiler: NullProfiler
    progress: TrainingProgress
    metrics: MetricsLogger
    wandb: WandbRun
    is_compiled: bool

    def wrap_loader(self, batches: Iterator) -> Iterator:
        """Pass `batches` through, and record how long steps wait for them."""
        return self.speed.wrap_loader(self.profiler.wrap_loader(batches))

    def start_step(self) -> None:
        self.profiler.start()
        self.speed.start()

    def end_step(self) -> None:
        self._timing = self.speed.stop()
        self.profiler.stop()

    def log_step(self, row: dict, progress: float, is_best: bool = False) -> None:
        """Report a step's metrics, and those of an evaluation if there was one. progress: part of the run, 0 to 1.

        is_best: the evaluation found the lowest validation loss so far. Raises TrainingFailed if a loss is not finite.
        """
        if "val/loss" in row:
            self.progress.print_evaluation(row, is_best)
        self.metrics.log(row, self._timing if row["step"] > 0 else dict)
        if progress >= 1:
            self.metrics.flush()
        self.progress.show(row["step"], progress, self.metrics.last)

    def flush(self) -> None:
        """Write all metrics to the disk. Raises TrainingFailed if a loss is not finite."""
        self.metrics.flush(sync=True)

    def summary(self) -> dict:
        """Speed, losses and memory, under their names in summary.json."""
        compile_s = compile_seconds() if self.is_compiled else None
        return self.speed.median() | {"compile_s": compile_s} | self.metrics.summary()

    def __enter__(self) -> "Observers":
        with ExitStack() as stack:  # an error of one observer's end does not skip the ends of the others
            stack.push(lambda kind, error, traceback: self.wandb.finish(EXIT_CODES[status_of(error)]))
            stack.callback(self.metrics.close)
            stack.enter_context(self.progress)
            stack.enter_context(self.profiler)
            self._ends = stack.pop_all()
        return self

    def __exit__(self, kind, error, traceback) -> None:
        self._ends.__exit__(kind, error, traceback)
