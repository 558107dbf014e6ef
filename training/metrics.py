"""Metrics of a run: metrics.jsonl is the source of truth, and wandb gets the same rows.

A row may contain tensors. They stay on the device until the rows are written, about once a second, so that no step
waits for the device. A Path in a row is a picture: metrics.jsonl contains its path, and wandb the picture.
"""

import json
import math
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from common.errors import TrainingFailed
from training.wandb_logger import WandbRun

FLUSH_INTERVAL_S = 1.0
SUMMARY_NAMES = {
    "last_val_loss": "val/loss", "last_val_bpb": "val/bpb", "last_train_loss": "train/loss",
    "peak_memory_bytes": "peak_memory_bytes", "score_variance": "attention/score_variance",
    "attention_entropy": "attention/entropy", "attention_distance": "attention/mean_distance",
    "step_ms": "step_ms", "tokens_per_second": "tokens_per_second", "mfu": "mfu",
}  # fmt: skip


def summarize(last: dict) -> dict:
    """The newest losses, memory and speed, under their names in summary.json. last: newest value of each metric."""
    return {name: last.get(metric) for name, metric in SUMMARY_NAMES.items()}


def remove_later_rows(path: Path, step: int) -> dict:
    """Remove the rows after `step`, and a damaged end of the file. Returns the newest value of each metric."""
    size, last = 0, {}
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            row = json.loads(line)
        except ValueError:  # the process or the machine was stopped while it wrote the row
            break
        if row["step"] > step:
            break
        last |= row
        size += len(line)
    os.truncate(path, size)
    return last


class MetricsLogger:
    """Collects rows, and writes several at a time to metrics.jsonl and wandb. A run resumes after `step`.

    folder: run folder. None on all ranks except 0, which log nothing.
    must_be_finite: metrics that end the run if they are not finite.
    """

    def __init__(self, folder: Path | None, step: int, wandb: WandbRun, must_be_finite: Sequence[str]):
        self.path = None if folder is None else folder / "metrics.jsonl"
        self.wandb, self.must_be_finite = wandb, must_be_finite
        self.rows: list[tuple[dict, Callable[[], dict]]] = []
        self.flushed = time.perf_counter()
        self.last: dict = {}  # the newest value of each metric, also from before a resume
        if self.path is not None:
            self.path.touch()
            self.last = remove_later_rows(self.path, step if step > 0 else -1)  # the row of step 0 is written again

    def log(self, row: dict, read: Callable[[], dict] = dict) -> None:
        """Collect a row. read: called when the row is written. Returns more columns, such as device times."""
        if self.path is not None:
            self.rows.append((row, read))
            if time.perf_counter() - self.flushed >= FLUSH_INTERVAL_S:
                self.flush()

    def flush(self, sync: bool = False) -> None:
        """Write the collected rows. sync: also to the disk. Raises TrainingFailed if a metric is not finite."""
        if self.path is None:
            return
        rows, self.rows = [_to_numbers(row | read()) for row, read in self.rows], []
        self.flushed = time.perf_counter()
        with open(self.path, "a") as file:
            file.writelines(json.dumps(row, default=str) + "\n" for row in rows)  # str: a picture's path
            file.flush()
            if sync:
                os.fsync(file.fileno())
        self.wandb.log(rows)
        for row in rows:
            self.last |= row
            if bad := [key for key in self.must_be_finite if key in row and row[key] is None]:
                raise TrainingFailed(
                    f"{bad[0]} is not a finite number at step {row['step']}. Lower optimizer.lr, then run the command "
                    "again: it resumes from the last checkpoint. If that fails, copy an older checkpoint over last.pt"
                )


def _to_numbers(row: dict) -> dict:
    """Read tensors from the device. Numbers that are not finite become None."""
    numbers = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in row.items()}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in numbers.items()}
