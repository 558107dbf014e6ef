"""Logs metrics, tables and pictures to wandb. If wandb fails or hangs, training continues.

One thread makes all calls, in order. The loop never waits for them, and the end of a run waits for
a limited time.
"""

import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from common.console import print_text
from common.errors import UserError
from common.settings import flatten_dict
from training.config import WandbConfig

# for uploading the last rows; schedulers kill a process about 30 s after SIGTERM
FINISH_TIMEOUT_S = 15


def check_login(config: WandbConfig) -> None:
    """Raise UserError if wandb.mode=online lacks an API key. Does not use the network."""
    if config.mode != "online":
        return
    os.environ["WANDB_SILENT"] = "true"  # wandb raises an error instead of asking
    try:
        import wandb

        wandb.login(verify=False)
    except Exception as error:  # any other error of wandb does not stop a run
        if type(error).__name__ == "UsageError":
            raise UserError(
                "wandb.mode=online needs an API key; run `wandb login`, or set WANDB_API_KEY or "
                "wandb.mode=offline"
            ) from None


class WandbRun:
    """A wandb run, which starts with the first call.

    folder: wandb writes its files to <folder>/wandb.
    run_config: shown by wandb with flat keys, so that it can group runs by them.
    run_id: the run that is resumed, or None for a new run.
    arguments: other arguments of wandb.init, such as name.
    """

    def __init__(
        self,
        config: WandbConfig,
        folder: Path,
        run_config: dict,
        run_id: str | None = None,
        **arguments: Any,
    ):
        self.is_enabled = config.mode != "disabled"
        self.folder = folder
        self.id = run_id
        if self.id is None and self.is_enabled:
            self.id = secrets.token_hex(4)
        resumes_online = run_id is not None and config.mode == "online"
        self._arguments = asdict(config) | arguments
        self._arguments["id"] = self.id
        self._arguments["resume"] = "allow" if resumes_online else None
        self._arguments["dir"] = folder.resolve()
        self._arguments["config"] = flatten_dict(run_config)
        self._calls: SimpleQueue[Callable[[Any], object] | None] = SimpleQueue()
        self._thread = Thread(target=self._make_calls, daemon=True)

    @property
    def has_started(self) -> bool:
        """Whether a call was made."""
        return self._thread.ident is not None

    def call(self, function: Callable[[Any], object]) -> None:
        """Call function(run) in the thread."""
        if self.is_enabled:
            self._calls.put(function)
            if not self.has_started:
                self._thread.start()

    def _make_calls(self) -> None:
        """Start wandb and make the calls, until a call is None."""
        try:
            import wandb

            settings = wandb.Settings(silent=True, console="off", init_timeout=60)
            run = wandb.init(**self._arguments, settings=settings)
            run.define_metric("step")
            run.define_metric("*", step_metric="step")  # wandb drops rows if its own step decreases
            for function in iter(self._calls.get, None):
                function(run)
        except Exception as error:  # wandb can raise anything
            reason = f"{type(error).__name__}: {error}".partition("\n")[0].removesuffix(": ")
            if self.is_enabled:
                print_text(
                    f"wandb: {reason}; continuing without wandb, {self.folder} has all results"
                )
            self.is_enabled = False
        # if its service was killed, wandb would print a traceback at exit
        with suppress(Exception):
            wandb.teardown()

    def log(self, rows: list[dict]) -> None:
        """Log rows. A Path is a picture or an HTML page, a list of dataclasses a table."""
        for row in rows:
            self.call(lambda run, row=row: run.log(_to_media(row)))

    def set_summary(self, summary: dict) -> None:
        """Set all values except the status, because wandb itself records how the run ends."""
        values = {key: value for key, value in summary.items() if key not in ("status", "error")}
        self.call(lambda run: run.summary.update(values))

    def finish(self, exit_code: int) -> None:
        """Finish the run, if it has started. Prints a line if that takes more than a second."""
        if not self.has_started:
            return
        self.call(lambda run: run.finish(exit_code))
        self._calls.put(None)
        self._thread.join(1)
        if self._thread.is_alive():  # wandb's service hangs, or the network is slow
            print_text(
                f"waiting up to {FINISH_TIMEOUT_S} s for wandb to finish; after that, the run ends "
                "without it"
            )
        self._thread.join(FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            self.is_enabled = False  # prints no errors from now on
            print_text(
                f"wandb did not finish within {FINISH_TIMEOUT_S} s; {self.folder} has all results"
            )


def _to_media(row: dict[str, Any]) -> dict[str, Any]:
    """Convert pictures, HTML pages and tables in a row to wandb's classes."""
    import wandb

    media = dict(row)
    for key, value in row.items():
        if isinstance(value, Path) and value.suffix == ".html":
            media[key] = wandb.Html(str(value), inject=False)
        elif isinstance(value, Path):
            media[key] = wandb.Image(str(value))
        elif isinstance(value, list):
            columns = list(asdict(value[0]))
            data = [list(asdict(item).values()) for item in value]
            media[key] = wandb.Table(columns=columns, data=data)
    return media
