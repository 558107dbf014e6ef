"""Logs metrics, tables and pictures to wandb.

Threads make all calls to wandb, so that no run waits for it. If wandb fails or stalls, one sentence is printed.
"""

import json
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from common.errors import UserError
from common.run_dir import EXIT_CODES, RunDir, flatten_dict
from training.config import WandbConfig

INIT_TIMEOUT_S = 60
FINISH_TIMEOUT_S = 60  # uploads of the last rows and pictures
INTERRUPTED_FINISH_TIMEOUT_S = 10  # schedulers kill a process about 30 s after SIGTERM
LOG_AGAIN_PAUSE_S = 0.5  # after 100 earlier rows of a resumed run
MAX_QUEUED_CALLS = 20_000  # one per row: about 20 MB


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
        self._has_dropped_calls = False
        self._earlier_rows = b""
        self._finishing = threading.Event()

    def log_again(self, metrics: Path) -> None:
        """Log the rows of a resumed offline run again, so that one wandb folder has all of them.

        metrics: metrics.jsonl, before its first new row. The earlier folders of the run are removed when wandb has
        finished. If one of them was uploaded, nothing is logged again: wandb adds the new rows to the uploaded run.
        """
        if self.is_enabled and self.config.mode == "offline":
            self._earlier_rows = metrics.read_bytes()

    def _list_earlier_folders(self) -> list[Path]:
        """The folders with parts of this run, all of which are in metrics.jsonl; empty if a part was uploaded."""
        wandb = self.run_dir.folder / "wandb"
        uploaded = [*wandb.glob(f"run-*-{self.id}"), *wandb.glob(f"offline-run-*-{self.id}/*.synced")]
        if uploaded and self._earlier_rows:
            print(f"wandb: {uploaded[0]} was uploaded; `wandb sync {wandb}` adds the new rows to the same run")
        return [] if uploaded or not self._earlier_rows else list(wandb.glob(f"offline-run-*-{self.id}"))

    def _make_calls(self) -> None:
        with _report_failure(self.run_dir.folder):
            attention = self.run_config["attention"] | self.run_dir.summary["attention"]
            run_config, name = self.run_config | {"attention": attention}, self.run_dir.name
            earlier_folders = self._list_earlier_folders()
            run = _wandb_init(
                self.config, self.run_dir.folder, run_config, name=name, group=self.config.group, id=self.id,
                resume=self.resume,
            )  # fmt: skip
            run.define_metric("step")
            run.define_metric("*", step_metric="step")  # wandb drops rows if its own step decreases
            for number, line in enumerate(self._earlier_rows.splitlines() if earlier_folders else (), start=1):
                row = json.loads(line)
                picture = Path(row.get("attention", ""))
                run.log(_with_pictures(row | ({"attention": picture} if picture.is_file() else {})))
                if number % 100 == 0 and self._calls.qsize() < MAX_QUEUED_CALLS / 2:  # leave time to the training loop
                    self._finishing.wait(LOG_AGAIN_PAUSE_S)
            self._earlier_rows, self._has_started = b"", True
            while call := self._calls.get():
                call(run)
            for folder in () if self._has_dropped_calls else earlier_folders:  # the new folder is complete
                shutil.rmtree(folder)

    def _call(self, call: Callable[[Any], object]) -> None:
        if self.is_enabled and self._thread.ident is None:
            self._thread.start()
        if self._calls.qsize() >= MAX_QUEUED_CALLS:
            if not self._has_dropped_calls:
                print("wandb does not keep up and will miss some rows; metrics.jsonl contains all of them")
            self._has_dropped_calls = True
        elif self._thread.is_alive():  # else wandb has failed
            self._calls.put(call)

    def log(self, rows: list[dict]) -> None:
        for row in rows:
            self._call(lambda run, row=row: run.log(_with_pictures(row)))

    def set_summary(self, summary: dict) -> None:
        # wandb itself records how the run ends
        values = {key: value for key, value in summary.items() if key not in ("status", "error")}
        self._call(lambda run: run.summary.update(values))

    def finish(self, exit_code: int) -> None:
        is_interrupted = exit_code == EXIT_CODES["interrupted"]
        if not self.is_enabled or (is_interrupted and not self._has_started):
            return  # an interrupted run does not wait until wandb has started
        if self._thread.ident is None:  # the run failed before its first row
            self._thread.start()
        self._finishing.set()
        self._calls.put(lambda run: run.finish(exit_code))
        self._calls.put(None)
        _join(self._thread, self.run_dir.folder, INTERRUPTED_FINISH_TIMEOUT_S if is_interrupted else FINISH_TIMEOUT_S)


@contextmanager
def _report_failure(folder: Path) -> Iterator[None]:
    """Context manager: an error of wandb is printed as one sentence. On exit, wandb's service process ends."""
    try:
        yield
    except Exception as error:  # wandb can raise anything
        message = str(error).partition("\n")[0]
        print(f"wandb: {type(error).__name__}: {message}; continuing without wandb, {folder} has all results")
    finally:
        with suppress(Exception):  # if the service was killed; at exit, wandb would print a traceback
            import wandb

            wandb.teardown()


def _join(thread: threading.Thread, folder: Path, timeout_s: float) -> None:
    """Wait until wandb has finished, at most timeout_s seconds."""
    thread.join(timeout_s)
    if thread.is_alive():
        print(
            f"wandb did not finish within {timeout_s} s; {folder} has all results, and `wandb sync "
            f"{folder}/wandb/*run-*` uploads what wandb has stored"
        )


def _with_pictures(row: dict) -> dict:
    import wandb

    return {key: wandb.Image(str(value)) if isinstance(value, Path) else value for key, value in row.items()}


def find_entity(entity: str | None, project: str) -> str | None:
    """The user or team that owns a project; entity: null in the config for the default. None without a login."""
    try:
        WandbConfig(mode="online", project=project, entity=entity, group=None, tags=[]).check()
    except UserError:
        return None
    import wandb

    return entity or wandb.Api().default_entity


def log_table_to_wandb(
    config: WandbConfig, kind: str, name: str, group: str | None, rows: list[Any], picture: Path, run_config: dict,
    report: Path | None = None,
) -> None:  # fmt: skip
    """Log a table, a picture and an HTML page as a separate wandb run.

    kind: key of the table, and job type. rows: dataclasses.
    """
    if config.mode == "disabled":
        return

    def log_table() -> None:
        with _report_failure(picture.parent):
            import wandb

            table = wandb.Table(columns=list(asdict(rows[0])), data=[list(asdict(row).values()) for row in rows])
            with _wandb_init(config, picture.parent, run_config, name=name, group=group, job_type=kind) as run:
                page = {} if report is None else {f"{kind}_report": wandb.Html(str(report), inject=False)}
                run.log({kind: table} | _with_pictures({f"{kind}_picture": picture}) | page)

    thread = threading.Thread(target=log_table, daemon=True)
    thread.start()
    _join(thread, picture.parent, FINISH_TIMEOUT_S)


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
