"""Logs metrics, tables and pictures of a run to wandb. A failure of wandb never stops the run."""

import secrets
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from common.run_dir import EXIT_CODES, RunDir, flatten_dict
from training.config import WandbConfig

INIT_TIMEOUT_S = 60


class WandbRun:
    """The wandb run of a training run. wandb takes seconds to start.

    It starts in a thread with the first rows, after the first steps. Until it is ready, rows wait in memory.
    """

    def __init__(self, config: WandbConfig, run: RunDir, run_config: dict, run_id: str | None):
        """run_id: the wandb id of a resumed run; None: a new run."""
        self.config, self.run_dir, self.run_config = config, run, run_config
        self.is_enabled = config.mode != "disabled" and run.is_main
        self.resume = "allow" if run_id and config.mode == "online" else None
        self.id = run_id or secrets.token_hex(4) if self.is_enabled else run_id
        self.run: Any = None
        self._starting: threading.Thread | None = None
        self._rows: list[dict] = []  # not yet sent
        self._summary: dict = {}

    def _start(self) -> None:
        if self.is_enabled and self._starting is None:
            self._starting = threading.Thread(target=self._call, args=(self._init,), daemon=True)
            self._starting.start()

    def _init(self) -> None:
        attention = self.run_config["attention"] | self.run_dir.summary["attention"]
        run_config, name = self.run_config | {"attention": attention}, self.run_dir.name
        self.run = _wandb_init(
            self.config, self.run_dir.folder, run_config, name=name, group=self.config.group, id=self.id,
            resume=self.resume,
        )  # fmt: skip
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")  # wandb drops rows if its own step decreases

    def _call(self, function: Callable, *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception as error:  # wandb can raise anything
            print(f"wandb: {type(error).__name__}: {error}; the run continues without wandb and writes metrics.jsonl")
            self.run = None

    def log(self, rows: list[dict]) -> None:
        self._start()
        if self.is_enabled:
            self._rows += rows
        self._send()

    def set_summary(self, summary: dict) -> None:
        # wandb itself records how the run ends
        self._summary = {key: value for key, value in summary.items() if key not in ("status", "error")}
        self._send()

    def finish(self, exit_code: int) -> None:
        if exit_code != EXIT_CODES["interrupted"]:
            self._start()  # a run that fails before its first row is recorded, too
            if self._starting is not None:
                self._starting.join()
        if self._is_starting():  # interrupted early: do not wait
            return
        self._send()
        if self.run is not None:
            self._call(self.run.finish, exit_code)

    def _is_starting(self) -> bool:
        return self._starting is not None and self._starting.is_alive()

    def _send(self) -> None:
        """Log the waiting rows and the summary if wandb has started; drop them if it has failed."""
        if self._is_starting():
            return
        rows, self._rows = self._rows, []
        for row in rows:
            if self.run is not None:
                self._call(self._log, row)
        summary, self._summary = self._summary, {}
        if self.run is not None and summary:
            self._call(self.run.summary.update, summary)

    def _log(self, row: dict) -> None:
        import wandb

        self.run.log({key: wandb.Image(str(v)) if isinstance(v, Path) else v for key, v in row.items()})


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
