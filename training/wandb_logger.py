"""Logs metrics, tables and pictures of a run to wandb. A failure of wandb never stops the run."""

import secrets
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from common.run_dir import EXIT_CODES, RunDir, flatten_dict
from training.config import WandbConfig

INIT_TIMEOUT_S = 60


class WandbRun:
    """The wandb run of a training run. A thread starts wandb and makes all calls to it, so that training does not wait.

    wandb takes seconds to start. The thread starts when the first rows are logged.
    """

    def __init__(self, config: WandbConfig, run: RunDir, run_config: dict, run_id: str | None):
        """run_id: the wandb id of a resumed run; None: a new run."""
        self.config, self.run_dir, self.run_config = config, run, run_config
        self.is_enabled = config.mode != "disabled" and run.is_main
        self.resume = "allow" if run_id and config.mode == "online" else None
        self.id = run_id or secrets.token_hex(4) if self.is_enabled else run_id
        self._calls: SimpleQueue[Callable[[Any], object] | None] = SimpleQueue()  # None ends the thread
        self._thread = threading.Thread(target=self._make_calls, daemon=True)
        self._has_started = False  # wandb, not the thread

    def _make_calls(self) -> None:
        try:
            attention = self.run_config["attention"] | self.run_dir.summary["attention"]
            run_config, name = self.run_config | {"attention": attention}, self.run_dir.name
            run = _wandb_init(
                self.config, self.run_dir.folder, run_config, name=name, group=self.config.group, id=self.id,
                resume=self.resume,
            )  # fmt: skip
            run.define_metric("step")
            run.define_metric("*", step_metric="step")  # wandb drops rows if its own step decreases
            self._has_started = True
            while call := self._calls.get():
                call(run)
        except Exception as error:  # wandb can raise anything
            print(f"wandb: {type(error).__name__}: {error}; the run continues without wandb and writes metrics.jsonl")

    def _call(self, call: Callable[[Any], object]) -> None:
        if self.is_enabled and self._thread.ident is None:
            self._thread.start()
        if self._thread.is_alive():  # else wandb has failed
            self._calls.put(call)

    def log(self, rows: list[dict]) -> None:
        self._call(lambda run: [run.log(_with_pictures(row)) for row in rows])

    def set_summary(self, summary: dict) -> None:
        # wandb itself records how the run ends
        values = {key: value for key, value in summary.items() if key not in ("status", "error")}
        self._call(lambda run: run.summary.update(values))

    def finish(self, exit_code: int) -> None:
        if not self.is_enabled or (exit_code == EXIT_CODES["interrupted"] and not self._has_started):
            return  # an interrupted run does not wait until wandb has started
        self._call(lambda run: run.finish(exit_code))  # also for a run that fails before its first row
        self._calls.put(None)
        self._thread.join()


def _with_pictures(row: dict) -> dict:
    import wandb

    return {key: wandb.Image(str(value)) if isinstance(value, Path) else value for key, value in row.items()}


def log_table_to_wandb(
    config: WandbConfig, kind: str, name: str, group: str | None, rows: list[Any], picture: Path, run_config: dict
) -> None:
    """Log a table and a picture as a separate wandb run. kind: key of the table, and job type. rows: dataclasses."""
    if config.mode == "disabled":
        return
    import wandb

    try:
        with _wandb_init(config, picture.parent, run_config, name=name, group=group, job_type=kind) as run:
            table = wandb.Table(columns=list(asdict(rows[0])), data=[list(asdict(row).values()) for row in rows])
            run.log({kind: table, f"{kind}_picture": wandb.Image(str(picture))})
    except Exception as error:  # wandb can raise anything
        print(f"wandb: {type(error).__name__}: {error}; the {kind} is in {picture.parent}")


def _wandb_init(config: WandbConfig, folder: Path, run_config: dict, **arguments: Any):
    """Start a wandb run. The config's keys are flattened, so that wandb can group runs by them."""
    import wandb

    return wandb.init(
        mode=config.mode,
        project=config.project,
        entity=config.entity,
        tags=config.tags,
        dir=folder.resolve(),
        config=flatten_dict(run_config),
        settings=wandb.Settings(silent=True, console="off", init_timeout=INIT_TIMEOUT_S),
        **arguments,
    )
