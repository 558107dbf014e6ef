"""The runs of a sweep: each an ordinary run in a process of its own, under runs/sweeps/<sweep>/<job>.

A kill, a refusal, the peak memory and the compile cache of one job stay its own. What happened is in the jobs'
folders: the progress shown here and the comparison at the end read files alone, wherever the jobs run.
"""

import json
import math
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import yaml
from filelock import FileLock, Timeout
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Column

from common.console import format_duration
from common.errors import UserError
from common.run_dir import EXIT_CODES, flatten_dict, read_owner, read_summary, write_config, write_summary

SCRIPT = Path(__file__).parents[2] / "train.py"
# What the runs of a sweep may change in when it is started again; all else would make them other runs.
MAY_CHANGE = ("name", "resume", "train.steps", "train.minutes", "checkpoint.", "wandb.")


@dataclass(frozen=True)
class Job:
    """One run of a sweep. words: its command line. config: what they compose to, as nested dicts."""

    name: str  # its values, as in attention=flash,seed=1
    folder: Path
    words: list[str]
    config: dict

    def before(self) -> dict | None:
        """The config that the folder was trained with before; None where nothing was."""
        config = self.folder / "config.yaml"
        if not config.exists() or not any(self.folder.glob("checkpoints/*.pt")):
            return None
        return yaml.safe_load(config.read_text())

    def is_done(self) -> bool:
        """Whether this very config has been trained to its end."""
        return self.before() == self.config and read_summary(self.folder).get("status") == "finished"

    def check(self) -> None:
        """Raises UserError where the folder holds what another config trained."""
        was, now = flatten_dict(self.before() or {}), flatten_dict(self.config)
        differs = [key for key in now if key in was and was[key] != now[key] and not key.startswith(MAY_CHANGE)]
        if differs:
            listed = ", ".join(f"{key}={was[key]} (now {now[key]})" for key in differs)
            raise UserError(f"{self.folder} was trained with {listed}; set that back, or give the sweep another name")


@dataclass(frozen=True)
class Outcome:
    """How a job's process ended: a status of EXIT_CODES, and the sentence why."""

    status: str
    reason: str | None = None


def train(job: Job) -> Outcome:
    """Train one job in a child process. Where another process trains it (left by a killed sweep, say), waits first."""
    job.folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(job.folder / ".lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        print(f"{job.name}: waiting for {read_owner(job.folder)}, which trains it", flush=True)
        lock.acquire()
    lock.release()
    before, log = read_summary(job.folder), job.folder / "train.log"
    with open(log, "wb") as output:
        # In a session of its own: Ctrl-C then reaches it once, as the request to stop below, after which it saves.
        child = subprocess.Popen(
            [sys.executable, str(SCRIPT), *job.words],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        try:
            code = child.wait()
        except BaseException:
            print(f"{job.name}: stopping, and saving", flush=True)
            child.terminate()
            child.wait()
            raise
    status = next((status for status, known in EXIT_CODES.items() if known == code), "failed")
    if status == "finished":
        return Outcome(status)
    summary = read_summary(job.folder)
    if summary != before and summary.get("status") == status:  # the run itself could say why
        return Outcome(status, _reason_in(summary))
    return record(job, Outcome(status, _reason(code, log)))


def _reason_in(summary: dict) -> str:
    """Why a run ended, in its own words, without what to type for that run alone."""
    words = summary["error"] or ""
    return words.split(";")[0] if summary["status"] == "interrupted" else words


def _reason(code: int, log: Path) -> str:
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    lines = log.read_text(errors="replace").strip().splitlines() or [f"exit code {code}"]
    return lines[-1].removeprefix(f"{SCRIPT.name}: ")


def record(job: Job, outcome: Outcome) -> Outcome:
    """Put on record what the job's own process could not: that it was killed, or ended before its run began."""
    if outcome.status == "refused" and job.before() is not None:
        return Outcome("failed", outcome.reason)  # what was trained before stays as it is
    if job.before() is None:
        write_config(job.folder, job.config)
    ended = {"name": job.config["name"], "status": outcome.status, "error": outcome.reason}
    write_summary(job.folder, read_summary(job.folder) | ended)
    return outcome


def recover(job: Job, began: float, error: str) -> Outcome:
    """How a job ended whose launcher did not come back, from its files. began: of the sweep, in seconds since 1970."""
    path = job.folder / "summary.json"
    summary = read_summary(job.folder)
    fresh = path.exists() and path.stat().st_mtime >= began
    if summary.get("status") == "finished" or (fresh and summary.get("status") in EXIT_CODES):
        return Outcome(summary["status"], summary.get("error"))
    if not fresh:
        return Outcome("failed", f"not started: {error}")
    try:
        with FileLock(job.folder / ".lock", timeout=0):
            return record(job, Outcome("failed", "its process was lost"))
    except Timeout:
        return Outcome("failed", f"is still being trained by {read_owner(job.folder)}")


class SweepProgress:
    """Shows how far the jobs are: a bar on a terminal, and everywhere a line for each that ends."""

    def __init__(self, jobs: list[Job], todo: list[Job], every: float = 0.5):
        self.jobs, self.todo, self.every = jobs, {job.name: job for job in todo}, every
        self.width = max(len(job.name) for job in jobs)
        self.began, self.console = time.time(), Console(highlight=False, emoji=False)
        # Where there is little room the job's name is cut short, and not the times.
        name = Column(ratio=2, no_wrap=True, overflow="ellipsis")
        self.bar = Progress(
            TextColumn("{task.fields[label]}"), BarColumn(bar_width=None, table_column=Column(ratio=1)),
            TextColumn("{task.fields[numbers]}", table_column=name),
            TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
            console=self.console, disable=not self.console.is_terminal, transient=True, expand=True,
            speed_estimate_period=600,
        )  # fmt: skip
        self.task = self.bar.add_task("", total=len(todo), label="", numbers="")
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "SweepProgress":
        self.bar.start()
        self.thread.start()
        return self

    def __exit__(self, *_) -> None:
        self.stop.set()
        self.thread.join()
        self.bar.stop()

    def _watch(self) -> None:
        waiting = dict(self.todo)
        while not self.stop.wait(self.every):
            self._look(waiting)
        self._look(waiting)

    def _look(self, waiting: dict[str, Job]) -> None:
        """Say which of the `waiting` jobs have ended, take them out, and move the bar."""
        done, now = len(self.todo) - len(waiting), ""
        for job in list(waiting.values()):
            summary = read_summary(job.folder)
            row = last_row(job.folder)
            if summary.get("status") in EXIT_CODES and (job.folder / "summary.json").stat().st_mtime >= self.began:
                del waiting[job.name]
                self.console.print(f"{job.name:<{self.width}}  {_line(summary)}", markup=False, soft_wrap=True)
                done += 1
            elif summary.get("status") == "running" and row:
                steps = job.config["train"]["steps"]
                done += row["step"] / steps if steps else 0.0
                now = f"{job.name} step {row['step']}" + (f"/{steps}" if steps else "")
        label = f"{len(self.jobs) - len(waiting)} of {len(self.jobs)} runs"
        self.bar.update(self.task, completed=done, label=label, numbers=now)


def _line(summary: dict) -> str:
    if summary["status"] != "finished":
        return f"{summary['status']}: {_reason_in(summary)}"
    known = {key: summary.get(key) or math.nan for key in ("last_val_loss", "step_ms")}
    return (
        f"val loss {known['last_val_loss']:.4f}  {known['step_ms']:,.1f} ms/step  "
        f"{format_duration(summary.get('wall_seconds') or 0)}"
    )


def last_row(folder: Path) -> dict | None:
    """The newest whole row of a run's metrics.jsonl; None where there is none yet."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return None
    with open(path, "rb") as f:
        f.seek(max(0, path.stat().st_size - 20_000))
        lines = f.read().split(b"\n")[:-1]
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        return None
