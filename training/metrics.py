"""Metrics of a run: metrics.jsonl is the source of truth, and wandb gets the same rows.

A row may contain tensors. They stay on the device until the rows are written, about once a second, so that no step
waits for the device. A Path in a row is a picture: metrics.jsonl contains its path, and wandb the picture.
"""

import json
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from common.errors import TrainingFailed
from common.files import atomic_write, name_file_in_errors
from training.speed import WARMUP_STEPS
from training.wandb_logger import WandbRun

FLUSH_INTERVAL_S = 1.0
SUMMARY_NAMES = {
    "last_val_loss": "val/loss",
    "last_val_bpb": "val/bpb",
    "last_train_loss": "train/loss",
    "peak_memory_bytes": "peak_memory_bytes",
}
SPEED_METRICS = ("step_ms", "data_wait_ms", "tokens_per_second", "mfu")  # summary.json has their medians


def read_metrics(folder: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl."""
    with open(folder / "metrics.jsonl") as file:
        return [json.loads(line) for line in file]


def truncate_metrics(folder: Path, step: int) -> list[dict]:
    """Remove the rows of metrics.jsonl after `step`, and all of a run at step 0. Returns the remaining rows."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() and step > 0 else []
    lines = [line for line in lines if _step_of(line) <= step]
    atomic_write(path, "".join(line + "\n" for line in lines))
    return [json.loads(line) for line in lines]


def recover_results(folder: Path, step: int) -> dict:
    """Losses, memory and median speed of a run at `step` from its metrics.jsonl, under their names in summary.json."""
    rows = truncate_metrics(folder, step)
    last = {key: value for row in rows for key, value in row.items()}
    timed = rows[1 + WARMUP_STEPS :] or rows[1:]  # the first row is step 0
    speeds = {key: [row[key] for row in timed if row.get(key) is not None] for key in SPEED_METRICS}
    medians = {key: statistics.median(values) for key, values in speeds.items() if values}
    return medians | {name: last.get(metric) for name, metric in SUMMARY_NAMES.items()}


def _step_of(line: str) -> float:
    """The step of a row; infinite if the line is incomplete because the process was killed."""
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return math.inf


class MetricsLogger:
    """Collects rows, and writes several at a time to metrics.jsonl and wandb.

    folder: the run folder; None on all ranks except 0, which log nothing. step: the run resumes after this step, so
    later rows are removed. must_be_finite: these metrics end the run if they are not finite.
    """

    def __init__(self, folder: Path | None, step: int, wandb: WandbRun, must_be_finite: Sequence[str]):
        self.file, self.wandb, self.must_be_finite = None, wandb, must_be_finite
        self.last: dict = {}  # the newest value of each metric, also from before a resume
        if folder is not None:
            for row in truncate_metrics(folder, step):
                self.last |= row
            self.file = open(folder / "metrics.jsonl", "a")  # noqa: SIM115 (open as long as the run)
        self.rows: list[tuple[dict, Callable[[], dict]]] = []
        self.last_flush: float | None = None  # None: no row yet

    def log(self, row: dict, deferred: Callable[[], dict] = dict) -> None:
        """Collect a row. deferred: called when the row is written; returns more columns, such as device times."""
        if self.file is None:
            return
        self.rows.append((row, deferred))
        self.last_flush = self.last_flush or time.perf_counter()
        if time.perf_counter() - self.last_flush >= FLUSH_INTERVAL_S:
            self.flush()

    def flush(self, sync: bool = False) -> None:
        """Write the collected rows. sync: make sure that they are on the disk.

        Raises TrainingFailed if a metric is not a finite number.
        """
        if self.file is None:
            return
        rows, self.rows = [_to_json(row | deferred()) for row, deferred in self.rows], []
        self.last_flush = time.perf_counter()
        with name_file_in_errors(Path(self.file.name)):
            self.file.writelines(json.dumps(row, default=str) + "\n" for row in rows)  # str: a picture's path
            self.file.flush()
        self.wandb.log(rows)
        for row in rows:
            self.last |= row
            for key in self.must_be_finite:
                if key in row and row[key] is None:
                    raise TrainingFailed(
                        f"{key} is not a finite number at step {row['step']}; set a lower optimizer.lr or a larger "
                        "schedule.warmup_steps, and start the same run again: it resumes from its last checkpoint; "
                        "if that fails at once, copy an older checkpoint over last.pt"
                    )
        if sync:
            os.fsync(self.file.fileno())

    def summary(self) -> dict:
        """The newest losses and peak memory, under their names in summary.json."""
        return {name: self.last.get(metric) for name, metric in SUMMARY_NAMES.items()}

    def close(self) -> None:
        if self.file is not None:
            with name_file_in_errors(Path(self.file.name)):
                self.file.close()


def _to_json(row: dict) -> dict:
    """Tensors become numbers, and numbers that are not finite become None."""
    numbers = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in row.items()}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in numbers.items()}
