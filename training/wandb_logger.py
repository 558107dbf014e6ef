"""Sends metrics, tables and pictures to wandb, which may fail without stopping a run."""

import secrets
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from common.run_dir import EXIT_CODES, RunDir, flatten_dict
from training.config import WandbConfig


class WandbRun:
    """The same numbers for wandb. Its start takes seconds, and waits for the first of them: the first step need not.

    start_seconds: what the start took, which is no time of training. Whatever goes wrong is said once, and training
    goes on without.
    """

    def __init__(self, config: WandbConfig, run: RunDir, run_config: dict, run_id: str | None):
        self.run, self.id, self.start_seconds = None, run_id, 0.0
        self.start: Callable[[], None] | None = None  # None: it was started, or nobody is told
        if config.mode != "disabled" and run.is_main:
            self.id = run_id or secrets.token_hex(4)
            resume = "allow" if run_id and config.mode == "online" else None
            self.start = partial(self._init, config, run, run_config, resume)

    def _init(self, config: WandbConfig, run: RunDir, run_config: dict, resume: str | None) -> None:
        import wandb

        # Flat keys, which wandb can group runs by.
        told = flatten_dict(run_config | {"attention": run_config["attention"] | run.summary["attention"]})
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


def log_table_to_wandb(
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
            job_type=kind, name=name, dir=picture.parent.resolve(), config=flatten_dict(facts),
            settings=wandb.Settings(silent=True, console="off", init_timeout=60),
        )  # fmt: skip
        with run:
            table = wandb.Table(columns=list(asdict(rows[0])), data=[list(asdict(row).values()) for row in rows])
            run.log({kind: table, f"{kind}_picture": wandb.Image(str(picture))})
    except Exception as error:  # a sink must not spoil what was measured, whatever it raises
        print(f"wandb: {type(error).__name__}: {error}; the {kind} is in {picture.parent}")
