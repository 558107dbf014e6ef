"""The folder of a training run: its lock, its files, and the functions that read them.

docs/run-folder.md lists all files of a run. common/run_paths.py has the names of runs.
"""

import json
import math
import os
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from filelock import FileLock, Timeout

from common.errors import UserError, error_message, status_of
from common.files import atomic_write, read_file, read_json, write_json
from common.run_paths import RUNS, make_new_folder
from common.settings import flatten_dict

if TYPE_CHECKING:  # these import torch, which sweeps do not need
    from training.config import RunConfig
    from training.runtime import Dist
    from training.train_state import TrainState


def write_config(folder: Path, config: dict) -> None:
    """Write config.yaml into a folder."""
    atomic_write(
        folder / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    )


def summary_key(name: str) -> str:
    """The name in summary.json of a metric's newest value: val/loss -> last_val_loss, lr -> lr."""
    return f"last_{name.replace('/', '_')}" if "/" in name else name


def read_config(folder: Path) -> dict:
    """Read config.yaml. Raises UserError if it is damaged."""
    return read_file(folder / "config.yaml", lambda text: {**yaml.safe_load(text)})


def read_rows(folder: Path, add_row: Callable[[dict], None]) -> None:
    """Call add_row with each row of metrics.jsonl. Raises UserError if the file is damaged."""

    def parse(content: bytes) -> None:
        for line in content.splitlines():
            add_row(json.loads(line))

    read_file(folder / "metrics.jsonl", parse)


def read_trained_config(folder: Path) -> dict:
    """Read the flat config of a run; {} if it has no checkpoint."""
    has_checkpoint = any(folder.glob("checkpoints/*.pt"))
    return flatten_dict(read_config(folder)) if has_checkpoint else {}


class RunFolder(AbstractContextManager):
    """Context manager: a locked folder in runs/. On exit, summary.json says how the run ended.

    config: a run without a name is named after the time, the data, the model and the backend.
    dist: all processes open the folder, and rank 0 locks and writes it.
    Raises UserError if the run is in use, exists with resume=false, or has lost its last.pt.

    resumes: whether the run continues from last.pt.
    previous: the content of summary.json, from an earlier process.
    summary: the content of summary.json from `start` on; None before.
    """

    def __init__(self, config: "RunConfig", dist: "Dist"):
        self.is_main = dist.is_main
        name = config.name
        if self.is_main and name is None:
            label = f"{config.data.label}-{config.model.name}-{config.attention.backend}"
            name = make_new_folder(RUNS, label)
        self.name: str = dist.broadcast(name)
        self.folder = RUNS / self.name
        self.best = self.folder / "checkpoints" / "best.pt"
        self.last = self.folder / "checkpoints" / "last.pt"
        self.summary: dict[str, Any] | None = None
        previous = self._lock(config.resume) if self.is_main else {}
        self.previous: dict[str, Any] = dist.broadcast(previous)
        self.resumes = self.last.exists()

    def _lock(self, resume: bool) -> dict:
        """Check and lock the folder. Returns the content of summary.json."""
        if (self.folder / "config.yaml").exists() and not resume:
            raise UserError(f"{self.folder} exists; set another name, or resume=true")
        step = read_json(self.folder / "summary.json").get("step")
        if step and not self.last.exists():  # a step is recorded only after last.pt was written
            raise UserError(
                f"{self.last} is missing, but step {step} was saved; restore it, or set another "
                "name"
            )
        self.last.parent.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(self.folder / ".lock")  # the kernel releases it, even after kill -9
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"{self.folder} is being trained by another process; wait, or set another name"
            ) from None
        for file in self.folder.rglob("*.partial"):
            file.unlink()  # of a killed process
        return read_json(self.folder / "summary.json")

    def is_finished(self, state: "TrainState") -> bool:
        """Whether an earlier process has finished the run, and no limit was raised since."""
        return self.previous.get("status") == "finished" and state.is_finished

    def start(self, config: dict, summary: dict) -> None:
        """Write config.yaml and summary.json."""
        is_same_run = self.previous.get("name") == self.name  # else, the folder was copied
        wandb_id = is_same_run and self.previous.get("wandb_id")
        self.summary = {
            "name": self.name,
            "status": "running",
            "error": None,
            "wandb_id": wandb_id or secrets.token_hex(4),
        }
        if self.is_main:
            write_config(self.folder, config)
        self.update(summary)

    def update(self, summary: dict) -> None:
        """Add values to summary.json. Infinite values become null: JSON has no infinity."""
        for key, value in summary.items():
            is_finite = not isinstance(value, float) or math.isfinite(value)
            self.summary[key] = value if is_finite else None
        if self.is_main:
            write_json(self.folder / "summary.json", self.summary)

    def end(self, state: "TrainState") -> None:
        """Record how the training loop ended: no step is left, or a signal has stopped it."""
        if not state.stopped:
            self.update({"status": "finished"})
            return
        error = f"saved at step {state.step}; resume with the same command and name={self.name}"
        self.update({"status": "interrupted", "error": error})

    def __exit__(self, error_type: Any, error: BaseException | None, traceback: Any) -> None:
        if self.summary is not None and error is not None:
            message = error_message(error) or f"{type(error).__name__}: {error}"
            self.update({"status": status_of(error), "error": message})
        if not self.is_main:
            return
        if not (self.folder / "config.yaml").exists():  # the run was refused
            (self.folder / ".lock").unlink(missing_ok=True)
            with suppress(OSError):  # it has other files, such as the log of a sweep's job
                self.last.parent.rmdir()
                os.removedirs(self.folder)
        self.lock.release()
