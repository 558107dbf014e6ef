"""The folder of a training run: its lock, config.yaml and summary.json. docs/run-folder.md lists the files."""

import math
from contextlib import AbstractContextManager
from pathlib import Path

import yaml
from filelock import FileLock, Timeout

from common.errors import UserError, error_message, status_of
from common.files import atomic_write, read_json, write_json
from generation.run_paths import RUNS, make_new_folder


def write_config(folder: Path, config: dict) -> None:
    atomic_write(
        folder / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
    )


class RunFolder(AbstractContextManager):
    """Context manager: a locked folder in runs/. On exit, the status is written to summary.json.

    name: None to make one from the time and `label`. resume: whether the run may exist already.
    is_main: whether this process locks and writes the folder. broadcast: returns the main process's value.
    Raises UserError if the run is in use, if it exists and resume is False, or if its last.pt is missing.
    """

    def __init__(
        self,
        name: str | None,
        label: str,
        resume: bool,
        is_main: bool = True,
        broadcast=lambda value: value,
    ):
        self.is_main = is_main
        self.summary: dict | None = None  # None before start(): summary.json is not changed
        self.previous: dict = {}  # content of summary.json, from an earlier process
        self.name = broadcast(name or make_new_folder(RUNS, label) if is_main else None)
        self.folder = RUNS / self.name
        self.best, self.last = (
            self.folder / "checkpoints" / file for file in ("best.pt", "last.pt")
        )
        if not is_main:
            return
        if (self.folder / "config.yaml").exists() and not resume:
            raise UserError(
                f"{self.folder} exists; set another name, or resume=true to continue it"
            )
        step = read_json(self.folder / "summary.json").get(
            "step"
        )  # above 0 only after last.pt was written
        if step and not self.last.exists():
            raise UserError(
                f"{self.last} is missing, but step {step} was saved; restore it, or set another name"
            )
        self.last.parent.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(self.folder / ".lock")  # the kernel releases it, even after kill -9
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"{self.folder} is being trained by another process; wait, or set another name"
            ) from None
        self.previous = read_json(self.folder / "summary.json")
        for file in (
            *self.folder.glob("*.partial"),
            *self.last.parent.glob("*.partial"),
        ):  # of a killed process
            file.unlink()

    def start(self, config: dict, summary: dict) -> None:
        """Write config.yaml and the first summary.json. Results of an earlier process stay until they are updated."""
        self.summary = self.previous | {"name": self.name, "status": "running", "error": None}
        if self.is_main:
            write_config(self.folder, config)
        self.update(summary)

    def update(self, summary: dict) -> None:
        """Add values to summary.json, where they survive a kill. Infinite values become null: JSON has no infinity."""
        self.summary |= {
            k: None if isinstance(v, float) and not math.isfinite(v) else v
            for k, v in summary.items()
        }
        if self.is_main:
            write_json(self.folder / "summary.json", self.summary)

    def __exit__(self, error_type, error, traceback) -> None:
        if self.summary is not None:
            message = (
                None
                if error is None
                else error_message(error) or f"{type(error).__name__}: {error}"
            )
            self.update({"status": status_of(error), "error": message})
        if self.is_main:
            self.lock.release()
