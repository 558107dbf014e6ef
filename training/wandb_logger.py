"""Logs runs to wandb. If wandb is slow, hangs or fails, training continues.

wandb is derived from the files of a run. A separate process, training/wandb_process.py, follows
metrics.jsonl and calls wandb. The loop never waits for it, and the end of a run waits for a limited
time.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from subprocess import DEVNULL, PIPE
from threading import Thread
from typing import Any

from common.console import print_text
from training.config import WandbConfig

PROJECT = Path(__file__).parents[1]
# for uploading the last rows of a run; schedulers kill a process about 30 s after SIGTERM
FINISH_TIMEOUT_S = 15
NOTICE_S = 3  # a longer wait is explained
# Keys of summary.json that wandb shows in the config, because they are known from the start.
FACTS = (
    "device",
    "device_name",
    "dtype",
    "compile",
    "threads",
    "tf32",
    "world_size",
    "micro_batch_size",
    "accumulation",
    "vocab_size",
    "n_params",
    "flops_per_token",
    "kv_cache_bytes_per_token",
    "versions",
    "commit",
    "command",
)
# Keys of summary.json that wandb shows as results, besides the columns of metrics.jsonl.
RESULTS = (
    "best_val_loss",
    "best_val_bpb",
    "best_step",
    "last_val_loss",
    "step_ms",
    "tokens_per_second",
    "mfu",
    "peak_memory_bytes",
)
# Options of run.define_metric for columns of metrics.jsonl. Hidden columns have no plots.
COLUMNS: dict[str, dict] = {
    "*": {},
    "step": {"hidden": True},
    "tokens": {"hidden": True},
    "seconds": {"hidden": True},
    "flops": {"hidden": True},
    "train/loss": {"summary": "min"},
    "val/loss": {"summary": "min"},
    "val/bpb": {"summary": "min"},
}


@dataclass(kw_only=True)
class WandbRun:
    """A run for wandb, as plain data."""

    folder: str  # files in rows are relative to it
    wandb_dir: str  # wandb writes below <wandb_dir>/wandb
    id: str | None = None  # None: new
    earlier_folders: str | None = None  # pattern of folders below wandb_dir with the same rows
    name: str
    job_type: str
    group: str | None
    notes: str | None = None  # wandb shows them first
    config: dict[str, Any]
    command: list[str] = field(default_factory=lambda: sys.argv)
    x_axis: str | None = None  # the column of rows that wandb plots the others over
    columns: dict[str, dict] = field(default_factory=dict)  # options of run.define_metric
    metrics: str | None = None  # metrics.jsonl; None: the rows below
    # Columns are numbers, names of pictures and pages, and tables, which are lists of rows.
    rows: list[dict[str, Any]] = field(default_factory=list)
    # exit_code, summary, alert, model; None: of WandbLogger.finish
    end: dict[str, Any] | None = None


def resolve_mode(config: WandbConfig) -> str:
    """wandb.mode, or what wandb's environment variables say. offline if nothing is set."""
    if config.mode is not None:
        return config.mode
    if os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1"):
        return "disabled"
    return (os.environ.get("WANDB_MODE") or "offline").lower()


def to_metric_name(text: str) -> str:
    """A text as a part of a metric's name: "forward+backward" -> forward_backward."""
    return re.sub(r"\W+", "_", text).strip("_")


class WandbLogger:
    """The process that logs runs to wandb. If logging is disabled, there is none.

    print_line: prints a line of the process.
    """

    def __init__(
        self,
        config: WandbConfig,
        runs: list[WandbRun],
        print_line: Callable[[str], None] = print_text,
    ):
        self.runs = runs
        # uploading a model has no time limit, and logging a run again has none
        logs_again = any(run.metrics and run.end for run in runs)
        has_limit = not config.log_model and not logs_again
        self.timeout_s = FINISH_TIMEOUT_S * len(runs) if has_limit else None
        self.print_line = print_line
        self.process = None
        mode = resolve_mode(config)
        if mode == "disabled":
            return
        self.process = subprocess.Popen(
            [sys.executable, "-m", "training.wandb_process"],
            cwd=PROJECT,
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the process that trains
        )
        self.printer = Thread(target=self._print_lines, daemon=True)
        self.printer.start()
        request = {
            "mode": mode,
            "folder": os.getcwd(),
            "project": config.project or os.environ.get("WANDB_PROJECT") or "trilgpt",
            "runs": [asdict(run) for run in runs],
        }
        self._write(asdict(config) | request)

    def _print_lines(self) -> None:
        for line in self.process.stdout:
            self.print_line(line.rstrip("\n"))

    def _write(self, message: dict[str, Any]) -> None:
        """Send a line to the process, unless it has ended."""
        with suppress(OSError):
            print(json.dumps(message, default=str), file=self.process.stdin, flush=True)

    def finish(self, exit_code: int = 0, **end: Any) -> None:
        """Wait until everything is logged. If that takes long, end the process.

        end: values of WandbRun.end for the last run, if it has none.
        """
        if self.process is None:
            return
        self._write({"exit_code": exit_code, **end})
        with suppress(OSError):
            self.process.stdin.close()
        has_ended = False
        with suppress(KeyboardInterrupt):  # the run has ended, and only the logging stops
            # the thread ends when the process closes its output
            self.printer.join(NOTICE_S)
            if self.printer.is_alive():
                self.print_line("waiting for wandb")
            self.printer.join(self.timeout_s)
            has_ended = not self.printer.is_alive()
        problem = None
        if not has_ended:
            os.killpg(self.process.pid, signal.SIGKILL)
            problem = "did not finish"
        elif self.process.wait() != 0:
            problem = f"has failed with exit code {self.process.returncode}"
        if problem is not None:
            self.print_line(f"wandb {problem}; {self.runs[-1].folder} has all results")


def make_training_run(
    folder: Path, config: dict[str, Any], summary: dict[str, Any], end: dict[str, Any] | None
) -> WandbRun:
    """The wandb run of a run folder.

    config, summary: contents of config.yaml and summary.json.
    end: see WandbRun.
    """
    settings = {key: value for key, value in config.items() if key != "wandb"}
    facts = {key: summary[key] for key in FACTS if key in summary}
    attention = config["attention"] | (summary.get("attention") or {})
    is_job = (folder.parent / "sweep.json").exists()
    run_id = summary["wandb_id"]
    return WandbRun(
        folder=str(folder),
        wandb_dir=str(folder.parent if is_job else folder),  # of all runs of a sweep
        id=run_id,
        earlier_folders=f"wandb/*run-*-{run_id}" if is_job else "wandb/*run-*",
        name=folder.name if is_job else summary["name"],
        job_type="train",
        group=config["wandb"]["group"],
        config=settings | facts | {"attention": attention},
        x_axis="step",
        command=shlex.split(summary["command"])[1:],  # without "python"
        columns=COLUMNS,
        metrics=str(folder / "metrics.jsonl"),
        end=end,
    )


def make_training_summary(summary: dict[str, Any]) -> dict[str, Any]:
    """What wandb shows as the results of a run. summary: content of summary.json."""
    results = {key: summary[key] for key in RESULTS if summary.get(key) is not None}
    return results | {"kernel": (summary.get("attention") or {}).get("resolved")}
