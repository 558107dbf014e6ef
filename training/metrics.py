"""Metrics of a run: metrics.jsonl is the source of truth, and wandb gets the same rows.

A row may contain tensors. They stay on the device until the rows are written, about once a second, so that no step
waits for the device. A Path in a row is a picture: metrics.jsonl contains its path, and wandb the picture.
"""

import json
import math
import mmap
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from common.errors import TrainingFailed
from common.files import atomic_write, name_file_in_errors
from common.metrics_file import read_curves
from training.speed import WARMUP_STEPS
from training.wandb_logger import WandbRun

FLUSH_INTERVAL_S = 1.0
SUMMARY_NAMES = {
    "last_val_loss": "val/loss",
    "last_val_bpb": "val/bpb",
    "last_train_loss": "train/loss",
    "peak_memory_bytes": "peak_memory_bytes",
    "score_variance": "attention/score_variance",
    "attention_entropy": "attention/entropy",
    "attention_distance": "attention/mean_distance",
}
SPEED_METRICS = ("step_ms", "data_wait_ms", "tokens_per_second", "mfu")  # summary.json has their medians


def recover_results(folder: Path, step: int) -> dict:
    """Losses, memory and median speed of a run at `step` from its metrics.jsonl, under their names in summary.json."""
    path = folder / "metrics.jsonl"
    _remove_later_rows(path, step)
    curves = read_curves(path, *SUMMARY_NAMES.values(), *SPEED_METRICS)
    last = _last_values(curves)
    speeds = {key: curves[key][1] for key in SPEED_METRICS if key in last}
    medians = {
        key: float(np.median(values[WARMUP_STEPS:] if len(values) > WARMUP_STEPS else values))
        for key, values in speeds.items()
    }
    return medians | {name: last.get(metric) for name, metric in SUMMARY_NAMES.items()}


def _last_values(curves: dict[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    last = {key: float(values[-1]) for key, (_, values) in curves.items() if len(values)}
    return {key: int(value) if value.is_integer() else value for key, value in last.items()}


def _step_of(line: bytes) -> float:
    """The step of a row; infinite if the row is damaged because the process or the machine was stopped."""
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return math.inf


def _remove_later_rows(path: Path, step: int) -> None:
    """Truncate the file after the last row up to `step`. The search begins at the end, as steps increase."""
    if path.stat().st_size == 0:
        return
    with open(path, "r+b") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
            while end > 0:
                start = content.rfind(b"\n", 0, end - 1) + 1
                if _step_of(content[start:end]) <= step:
                    break
                end = start
        file.truncate(end)
        os.fsync(file.fileno())


class MetricsLogger:
    """Collects rows, and writes several at a time to metrics.jsonl and wandb.

    folder: the run folder; None on all ranks except 0, which log nothing. step: the run resumes after this step, so
    later rows are removed. must_be_finite: these metrics end the run if they are not finite.
    """

    def __init__(self, folder: Path | None, step: int, wandb: WandbRun, must_be_finite: Sequence[str]):
        self.file, self.wandb, self.must_be_finite = None, wandb, must_be_finite
        self.last: dict = {}  # the newest value of each metric, also from before a resume
        if folder is not None:
            path = folder / "metrics.jsonl"
            if step > 0 and path.exists():
                _remove_later_rows(path, step)
                wandb.log_again(path)
                self.last = _last_values(read_curves(path, *SUMMARY_NAMES.values(), *SPEED_METRICS))
            else:
                atomic_write(path, "")
            self.file = open(path, "a")  # noqa: SIM115 (open as long as the run)
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
