"""Numbers on their way out: metrics.jsonl is the truth, wandb is told the same and may fail.

Rows may hold tensors. They stay on the device until a block of rows is flushed, about once a second, so that
nothing waits for the device within a step. A Path in a row is a picture: metrics.jsonl is told where, wandb shows it.
"""

import json
import math
import os
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from errors import TrainingFailed
from training.config import WandbConfig
from training.run import EXIT_CODES, Run, flat, status_of


class Metrics:
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


class Wandb:
    """The same numbers for wandb. Its start takes seconds, and waits for the first of them: the first step need not.

    start_seconds: what the start took, which is no time of training. Whatever goes wrong is said once, and training
    goes on without.
    """

    def __init__(self, config: WandbConfig, run: Run, run_config: dict, run_id: str | None):
        self.run, self.id, self.start_seconds = None, run_id, 0.0
        self.start: Callable[[], None] | None = None  # None: it was started, or nobody is told
        if config.mode != "disabled" and run.is_main:
            self.id = run_id or secrets.token_hex(4)
            resume = "allow" if run_id and config.mode == "online" else None
            self.start = partial(self._init, config, run, run_config, resume)

    def _init(self, config: WandbConfig, run: Run, run_config: dict, resume: str | None) -> None:
        import wandb

        # Flat keys, which wandb can group runs by.
        told = flat(run_config | {"attention": run_config["attention"] | run.summary["attention"]})
        self.run = wandb.init(
            mode=config.mode, project=config.project, entity=config.entity, group=config.group, tags=config.tags,
            name=run.name, id=self.id, resume=resume, dir=run.folder.resolve(), config=told,
            settings=wandb.Settings(silent=True, console="off", init_timeout=60),
        )  # fmt: skip
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")  # an axis of our own: wandb drops steps that go back

    def _ensure_started(self) -> None:
        start, self.start = self.start, None
        if start is not None:
            began = time.perf_counter()
            self._guard(start)
            self.start_seconds = time.perf_counter() - began

    def _guard(self, call, *arguments) -> None:
        try:
            call(*arguments)
        except Exception as error:  # a sink must not stop a run, whatever it raises
            print(f"wandb: {type(error).__name__}: {error}; the run goes on without it, metrics.jsonl has everything")
            self.run = None

    def log(self, rows: list[dict]) -> None:
        self._ensure_started()
        for row in rows:
            if self.run is not None:
                self._guard(self._log, row)

    def _log(self, row: dict) -> None:
        import wandb

        self.run.log({key: wandb.Image(str(v)) if isinstance(v, Path) else v for key, v in row.items()})

    def set_summary(self, summary: dict) -> None:
        if self.run is not None:  # how the run ends is wandb's own to say
            told = {key: value for key, value in summary.items() if key not in ("status", "error")}
            self._guard(self.run.summary.update, told)

    def finish(self, exit_code: int) -> None:
        if exit_code != EXIT_CODES["interrupted"]:
            self._ensure_started()  # what fails before its first row is on record as well
        if self.run is not None:
            self._guard(self.run.finish, exit_code)


def tell_wandb(
    config: WandbConfig, kind: str, name: str, group: str | None, rows: list[Any], picture: Path, facts: dict
) -> None:
    """A run of its own for what several processes found: the table `kind`, whose rows are dataclasses, and a picture.

    facts: what else it should say, as the run's config.
    """
    if config.mode == "disabled":
        return
    import wandb

    try:
        run = wandb.init(
            mode=config.mode, project=config.project, entity=config.entity, group=group, tags=config.tags,
            job_type=kind, name=name, dir=picture.parent.resolve(), config=flat(facts),
            settings=wandb.Settings(silent=True, console="off", init_timeout=60),
        )  # fmt: skip
        with run:
            table = wandb.Table(columns=list(asdict(rows[0])), data=[list(asdict(row).values()) for row in rows])
            run.log({kind: table, f"{kind}_picture": wandb.Image(str(picture))})
    except Exception as error:  # a sink must not spoil what was measured, whatever it raises
        print(f"wandb: {type(error).__name__}: {error}; the {kind} is in {picture.parent}")


class Tracker:
    """Collects a row a step and hands blocks of them to metrics.jsonl and wandb. Without `metrics`, of no rank but 0.

    The losses must be finite, and so must the gradients unless a scaler takes care of those that are not.
    """

    def __init__(self, metrics: Metrics | None, wandb: Wandb, scaler: torch.amp.GradScaler, flush_every: float = 1.0):
        self.metrics, self.wandb, self.flush_every = metrics, wandb, flush_every
        self.finite = ("train/loss", "val/loss") if scaler.is_enabled() else ("train/loss", "val/loss", "grad_norm")
        self.rows: list[tuple[dict, Callable[[], dict]]] = []
        self.flushed: float | None = None  # when; the first block is due as long after its first row
        self.last: dict = {}  # the newest value of everything that was logged

    def log(self, row: dict, late: Callable[[], dict] = dict) -> None:
        """Take a row of numbers, texts and 0-d tensors, and `late`, which gives the rest of it when it is flushed."""
        if self.metrics is None:
            return
        self.rows.append((row, late))
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

    def __enter__(self) -> "Tracker":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self.metrics is not None:
            self.metrics.close()
        self.wandb.finish(EXIT_CODES[status_of(error)])


def _plain(row: dict) -> dict:
    """A row that JSON can hold: tensors become numbers, and what is not finite None."""
    plain = {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in row.items()}
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in plain.items()}
