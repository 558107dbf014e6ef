"""Metrics of a run: metrics.jsonl is the source of truth, and wandb gets the same rows.

A row may contain tensors. They stay on the device until the rows are written, about once a second, so that no step
waits for the device. A Path in a row is a picture: metrics.jsonl contains its path, and wandb the picture.
"""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from common.errors import TrainingFailed
from training.wandb_logger import WandbRun

FLUSH_INTERVAL_S = 1.0


class MetricsLogger:
    """Collects rows, and writes several at a time to metrics.jsonl and wandb.

    folder: run folder.
    step: step at which the run resumes. Later rows of the file are removed.
    last: newest value of each metric, also from before a resume.
    """

    def __init__(self, folder: Path, step: int, wandb: WandbRun):
        self.path, self.wandb = folder / "metrics.jsonl", wandb
        self.rows: list[tuple[dict, Callable[[], dict]]] = []
        self.flushed = time.perf_counter()
        self.path.touch()
        self.last = remove_later_rows(self.path, step if step > 0 else -1)  # the row of step 0 is written again

    def log(self, row: dict, read: Callable[[], dict] = dict) -> None:
        """Collect a row. read: called when the row is written. Returns more columns, such as device times."""
        self.rows.append((row, read))
        if time.perf_counter() - self.flushed >= FLUSH_INTERVAL_S:
            self.flush()

    def flush(self, sync: bool = False) -> None:
        """Write the collected rows. sync: also to the disk. Raises TrainingFailed if a loss is not finite."""
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
            if bad := [key for key in ("val/loss", "train/loss") if row.get(key, 0.0) is None]:
                raise TrainingFailed(
                    f"{bad[0]} is not a finite number at step {row['step']}. Lower optimizer.lr, then run the command "
                    "again: it resumes from the last checkpoint. If that fails, copy an older checkpoint over last.pt"
                )


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


def _to_numbers(row: dict) -> dict:
    """Read tensors from the device. Numbers that are not finite become None."""
    numbers = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in row.items()}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in numbers.items()}
