"""Logs metrics, tables and pictures to wandb. If wandb fails, one line is printed, and training continues.

wandb's service is a separate process: logging a row takes about 0.4 ms of the training loop.
"""

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Thread
from typing import Any

from common.run_dir import EXIT_CODES, flatten_dict
from training.config import WandbConfig

FINISH_TIMEOUT_S = 60  # uploads of the last rows and pictures
INTERRUPTED_FINISH_TIMEOUT_S = 10  # schedulers kill a process about 30 s after SIGTERM


class WandbRun:
    """A wandb run. It starts in a thread with the first call, because that takes seconds. Until then, calls wait.

    folder: wandb's files are in <folder>/wandb. run_config: its keys are flattened, so that wandb can group runs by
    them. run_id: the id of a resumed run; None: a new run. arguments: of wandb.init, such as name and group.
    """

    def __init__(self, config: WandbConfig, folder: Path, run_config: dict, run_id: str | None = None, **arguments):
        self.config, self.folder, self.run_config, self.arguments = config, folder, run_config, arguments
        self.is_enabled = config.mode != "disabled"
        self.arguments["resume"] = "allow" if run_id and config.mode == "online" else None
        self.id = run_id or (secrets.token_hex(4) if self.is_enabled else None)
        self._run: Any = None
        self._calls: list[Callable[[Any], object]] = []
        self._starter = Thread(target=self._make_calls, daemon=True)

    def call(self, function: Callable[[Any], object]) -> None:
        """Call function(run) with the wandb run."""
        if self.is_enabled:
            self._calls.append(function)
            if self._starter.ident is None:
                self._starter.start()
            elif not self._starter.is_alive():
                self._make_calls()

    def _make_calls(self) -> None:
        try:
            self._run = self._run or self._init()
            while self._calls:
                self._calls.pop(0)(self._run)
        except Exception as error:  # wandb can raise anything
            self.is_enabled, message = False, str(error).partition("\n")[0]
            print(f"wandb: {type(error).__name__}: {message}; continuing without wandb, {self.folder} has all results")

    def _init(self) -> Any:
        import wandb

        config = self.config
        run = wandb.init(
            mode=config.mode, project=config.project, entity=config.entity, tags=config.tags, dir=self.folder.resolve(),
            config=flatten_dict(self.run_config), id=self.id, **self.arguments,
            settings=wandb.Settings(silent=True, console="off", init_timeout=60),
        )  # fmt: skip
        run.define_metric("step")
        run.define_metric("*", step_metric="step")  # wandb drops rows if its own step decreases
        return run

    def log(self, rows: list[dict]) -> None:
        for row in rows:
            self.call(lambda run, row=row: run.log(_with_pictures(row)))

    def set_summary(self, summary: dict) -> None:
        """Set all values except the status, because wandb itself records how the run ends."""
        values = {key: value for key, value in summary.items() if key not in ("status", "error")}
        self.call(lambda run: run.summary.update(values))

    def finish(self, exit_code: int) -> None:
        """Finish the run, if it has started. Wait at most for the timeout, and print a line then."""
        if self._starter.ident is None:
            return
        timeout_s = INTERRUPTED_FINISH_TIMEOUT_S if exit_code == EXIT_CODES["interrupted"] else FINISH_TIMEOUT_S
        finisher = Thread(target=self._finish, args=(exit_code,), daemon=True)
        finisher.start()
        finisher.join(timeout_s)
        if finisher.is_alive():
            print(f"wandb did not finish within {timeout_s} s; {self.folder} has all results")

    def _finish(self, exit_code: int) -> None:
        self._starter.join()
        self.call(lambda run: run.finish(exit_code))
        with suppress(Exception):  # if its service was killed, wandb would print a traceback at exit
            import wandb

            wandb.teardown()


def log_table_to_wandb(
    config: WandbConfig, kind: str, name: str, group: str | None, rows: list[Any], picture: Path, run_config: dict,
    report: Path | None = None,
) -> None:  # fmt: skip
    """Log a table, a picture and an HTML page as a separate wandb run.

    kind: key of the table, and job type. rows: dataclasses.
    """

    def log(run: Any) -> None:
        import wandb

        table = wandb.Table(columns=list(asdict(rows[0])), data=[list(asdict(row).values()) for row in rows])
        page = {} if report is None else {f"{kind}_report": wandb.Html(str(report), inject=False)}
        run.log({kind: table} | _with_pictures({f"{kind}_picture": picture}) | page)

    run = WandbRun(config, picture.parent, run_config, name=name, group=group, job_type=kind)
    run.call(log)
    run.finish(0)


def _with_pictures(row: dict) -> dict:
    import wandb

    return {key: wandb.Image(str(value)) if isinstance(value, Path) else value for key, value in row.items()}
