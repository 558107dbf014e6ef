"""metrics.jsonl: one row per step. It is the source of truth: wandb_process.py logs its rows.

A row may contain tensors. They stay on the device until the rows are written, about once a second,
so that no step waits for the device. A value that ends in .png is a picture in the run folder.
"""

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from common.errors import TrainingFailed, UserError

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
