"""Logs metrics, tables and pictures to wandb. If wandb fails or hangs, training continues.

One thread makes all calls, in order. The loop never waits for them, and the end of a run waits for a limited time.
"""

import secrets
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from common.console import print_text
from common.settings import flatten_dict
from training.config import WandbConfig

FINISH_TIMEOUT_S = (
    15  # for uploading the last rows; schedulers kill a process about 30 s after SIGTERM
)


class WandbRun:
    """A wandb run, which starts with the first call.

    folder: wandb writes its files to <folder>/wandb. run_id: the run that is resumed, or None for a new run.
    run_config: shown by wandb with flat keys, so that it can group runs by them.
    arguments: other arguments of wandb.init, such as name.
    """

    def __init__(
        self,
        config: WandbConfig,
        folder: Path,
        run_config: dict,
        run_id: str | None = None,
        **arguments,
    ):
        self.is_enabled, self.folder = config.mode != "disabled", folder
        self.id = run_id or (secrets.token_hex(4) if self.is_enabled else None)
        resume = "allow" if run_id and config.mode == "online" else None
        arguments |= dict(
            id=self.id, resume=resume, dir=folder.resolve(), config=flatten_dict(run_config)
        )
        self._arguments = asdict(config) | arguments
        self._calls: SimpleQueue[Callable[[Any], object] | None] = SimpleQueue()
        self._thread = Thread(target=self._make_calls, daemon=True)

    def call(self, function: Callable[[Any], object]) -> None:
        """Call function(run) in the thread."""
        if self.is_enabled:
            self._calls.put(function)
            if self._thread.ident is None:
                self._thread.start()

    def _make_calls(self) -> None:
        """Start wandb and make the calls, until a call is None."""
        try:
            import wandb

            run = wandb.init(
                **self._arguments,
                settings=wandb.Settings(silent=True, console="off", init_timeout=60),
            )
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
        with suppress(
            Exception
        ):  # if its service was killed, wandb would print a traceback at exit
            wandb.teardown()

    def log(self, rows: list[dict]) -> None:
        """Log rows of metrics. A Path is a picture or an HTML page, and a list of dataclasses is a table."""
        for row in rows:
            self.call(
                lambda run, row=row: run.log({key: _to_media(value) for key, value in row.items()})
            )

    def set_summary(self, summary: dict) -> None:
        """Set all values except the status, because wandb itself records how the run ends."""
        values = {key: value for key, value in summary.items() if key not in ("status", "error")}
        self.call(lambda run: run.summary.update(values))

    def finish(self, exit_code: int) -> None:
        """Finish the run, if it has started. Prints a line before it waits, and if the time limit has passed."""
        if self._thread.ident is None:
            return
        self.call(lambda run: run.finish(exit_code))
        self._calls.put(None)
        self._thread.join(1)
        if self._thread.is_alive():  # wandb's service hangs, or the network is slow
            print_text(
                f"waiting up to {FINISH_TIMEOUT_S} s for wandb to finish; after that, the run ends without it"
            )
        self._thread.join(FINISH_TIMEOUT_S)
        if self._thread.is_alive():
            self.is_enabled = False  # prints no errors from now on
            print_text(
                f"wandb did not finish within {FINISH_TIMEOUT_S} s; {self.folder} has all results"
            )


def _to_media(value: Any) -> Any:
    """Pictures, HTML pages and tables of wandb. Other values are returned unchanged."""
    import wandb

    if isinstance(value, Path):
        return (
            wandb.Html(str(value), inject=False)
            if value.suffix == ".html"
            else wandb.Image(str(value))
        )
    if isinstance(value, list):
        return wandb.Table(
            columns=list(asdict(value[0])), data=[list(asdict(row).values()) for row in value]
        )
    return value
