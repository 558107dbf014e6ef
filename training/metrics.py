"""Numbers on their way out: metrics.jsonl is the truth, wandb is told the same and may fail.

Rows may hold tensors. They stay on the device until a block of rows is flushed, about once a second, so that
nothing waits for the device within a step. A Path in a row is a picture: metrics.jsonl is told where, wandb shows it.
"""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from common.errors import TrainingFailed
from common.run_dir import EXIT_CODES, status_of
from training.wandb_logger import WandbRun


class MetricsFile:
    """metrics.jsonl of a run: one row a step. Resuming cuts the rows beyond the checkpoint's step."""

    def __init__(self, path: Path, step: int):
        kept = []
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _step_of(line) <= step]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(line + "\n" for line in kept if step > 0))
        os.replace(partial, path)
        self.file = open(path, "a")  # noqa: SIM115 (open as long as the run)

    def write(self, rows: list[dict]) -> None:
        self.file.writelines(json.dumps(row, default=str) + "\n" for row in rows)  # str: a picture's path
        self.file.flush()

    def sync(self) -> None:
        """Make sure the rows are on the disk: before a checkpoint that counts on them."""
        os.fsync(self.file.fileno())

    def close(self) -> None:
        self.file.close()


def _step_of(line: str) -> float:
    """The step of a row; infinite for a line that a kill cut short."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return math.inf


class MetricsLogger:
    """Collects a row a step and hands blocks of them to metrics.jsonl and wandb. Without `metrics`, of no rank but 0.

    The losses must be finite, and so must the gradients unless a scaler takes care of those that are not.
    """

    def __init__(
        self, metrics: MetricsFile | None, wandb: WandbRun, scaler: torch.amp.GradScaler, flush_every: float = 1.0
    ):
        self.metrics, self.wandb, self.flush_every = metrics, wandb, flush_every
        self.finite = ("train/loss", "val/loss") if scaler.is_enabled() else ("train/loss", "val/loss", "grad_norm")
        self.rows: list[tuple[dict, Callable[[], dict]]] = []
        self.flushed: float | None = None  # when; the first block is due as long after its first row
        self.last: dict = {}  # the newest value of everything that was logged

    def log(self, row: dict, deferred: Callable[[], dict] = dict) -> None:
        """Take a row of numbers, texts and 0-d tensors, and `late`, which gives the rest of it when it is flushed."""
        if self.metrics is None:
            return
        self.rows.append((row, deferred))
        self.flushed = self.flushed or time.perf_counter()
        if time.perf_counter() - self.flushed >= self.flush_every:
            self.flush()

    def flush(self, sync: bool = False) -> None:
        """Write what was taken; sync: make sure it is on the disk, ahead of a checkpoint that counts on it.

        Raises TrainingFailed at a loss that is not a number.
        """
        rows, self.rows = [_plain(row | late()) for row, late in self.rows], []
        self.flushed = time.perf_counter()
        self.metrics.write(rows)
        self.wandb.log(rows)
        for row in rows:
            self.last |= row
            broken = [key for key in self.finite if row.get(key, 0.0) is None]
            if broken:
                raise TrainingFailed(
                    f"{broken[0]} is not a finite number at step {row['step']}; set a lower optimizer.lr or more "
                    "schedule.warmup_steps and run the same name again: it continues from its last checkpoint"
                )
        if sync:
            self.metrics.sync()

    def summary(self) -> dict:
        """The newest losses and memory, as summary.json names them."""
        names = {"last_val_loss": "val/loss", "last_val_bpb": "val/bpb", "last_train_loss": "train/loss"}
        names["peak_memory_bytes"] = "peak_memory_bytes"
        return {name: self.last.get(metric) for name, metric in names.items()}

    def __enter__(self) -> "MetricsLogger":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self.metrics is not None:
            self.metrics.close()
        self.wandb.finish(EXIT_CODES[status_of(error)])


def _plain(row: dict) -> dict:
    """A row that JSON can hold: tensors become numbers, and what is not finite None."""
    plain = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in row.items()}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in plain.items()}
