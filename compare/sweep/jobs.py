"""The jobs of a sweep. Each job is an ordinary run in a separate process, in runs/sweeps/<sweep>/<job>.

In separate processes, a job that crashes does not affect the others, and each peak memory is that of one job.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import yaml
from filelock import FileLock, Timeout

from common.errors import UserError, format_value
from common.interrupt import Terminated, raise_interrupt
from common.run_dir import EXIT_CODES, flatten_dict, read_summary, write_config, write_summary

SCRIPT = Path(__file__).parents[2] / "train.py"
TERMINATE_GRACE_S = 120.0  # for a job to finish its step and to save a checkpoint
# Keys that may change when a sweep is started again. Any other change would make it a different run.
CHANGEABLE_KEYS = ("name", "resume", "train.steps", "train.minutes", "checkpoint.", "wandb.")


@dataclass(frozen=True)
class Job:
    """One run of a sweep. words: the arguments of train.py. config: the composed config, as nested dicts.

    timeout_minutes: the job fails after this time; None: no limit.
    """

    name: str  # the swept values, as in attention=flash,seed=1
    folder: Path
    words: list[str]
    config: dict
    timeout_minutes: float | None = None

    def previous_config(self) -> dict | None:
        """The config of an earlier run in this folder; None if nothing was trained there."""
        config = self.folder / "config.yaml"
        if not config.exists() or not any(self.folder.glob("checkpoints/*.pt")):
            return None
        return yaml.safe_load(config.read_text())

    def is_done(self) -> bool:
        """Whether a run with exactly this config has finished."""
        return self.previous_config() == self.config and read_summary(self.folder).get("status") == "finished"

    def check_folder(self) -> None:
        """Raises UserError if the folder contains a run with a different config."""
        old, new = flatten_dict(self.previous_config() or {}), flatten_dict(self.config)
        changed = [key for key in new if key in old and old[key] != new[key] and not key.startswith(CHANGEABLE_KEYS)]
        if changed:
            listed = ", ".join(f"{key}={format_value(old[key])} (now {format_value(new[key])})" for key in changed)
            raise UserError(f"{self.folder} was trained with {listed}; restore the old values, or set another name")


@dataclass(frozen=True)
class Outcome:
    """How a job ended: a status of EXIT_CODES, and the reason if it did not finish."""

    status: str
    reason: str | None = None

    @classmethod
    def from_summary(cls, summary: dict) -> "Outcome":
        """The outcome that a run wrote itself, without the advice, which is for resuming this run alone."""
        status, error = summary["status"], summary.get("error")
        return cls(status, error.split(";")[0] if error and status == "interrupted" else error)


def train_job(job: Job) -> Outcome:
    """Train one job in a child process."""
    job.folder.mkdir(parents=True, exist_ok=True)
    summary_before, log = read_summary(job.folder), job.folder / "train.log"
    try:
        with FileLock(job.folder / ".lock", timeout=0):  # released again: the child locks the folder itself
            output = open(log, "wb")  # noqa: SIM115 (closed below)
    except Timeout:  # do not overwrite the log of the process that trains the job
        return _still_trained(job)
    requeue = None
    if "SUBMITIT_EXECUTOR" in os.environ:  # submitit's handler requeues the SLURM job; the child must end before
        requeue = signal.signal(signal.SIGUSR2, raise_interrupt)
    with output:
        child = subprocess.Popen(
            [sys.executable, str(SCRIPT), *job.words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # the terminal's Ctrl-C does not reach the child; terminate() below stops it once
        )
        try:
            code = child.wait(None if job.timeout_minutes is None else 60 * job.timeout_minutes)
        except subprocess.TimeoutExpired:
            code = _stop(child)
            if code != 0:  # 0: it finished in the meantime
                reason = f"its time limit of {format_value(job.timeout_minutes)} minutes has passed"
                return _record(job, Outcome("failed", reason))
        except BaseException as error:
            print(f"{job.name}: stopping after this step, and saving", flush=True)
            _stop(child)
            if requeue is not None and isinstance(error, Terminated):
                requeue(signal.SIGUSR2, None)  # raises SystemExit
            raise
    status = next((status for status, known in EXIT_CODES.items() if known == code), "failed")
    summary = read_summary(job.folder)
    if status == "finished" or (summary != summary_before and summary.get("status") == status):
        return Outcome.from_summary(summary)
    if code < 0:
        return _record(job, Outcome(status, f"its process was killed by {signal.Signals(-code).name}"))
    lines = log.read_text(errors="replace").strip().splitlines() or [f"exit code {code}"]
    return _record(job, Outcome(status, lines[-1].removeprefix(f"{SCRIPT.name}: ")))


def _stop(child: subprocess.Popen) -> int:
    """End a job: SIGTERM asks it to save a checkpoint; SIGKILL follows if it hangs, or after a second Ctrl-C.

    Returns its exit code.
    """
    child.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            child.wait(TERMINATE_GRACE_S)
    finally:
        child.kill()  # does nothing if the process has ended
        child.wait()
    return child.returncode


def _record(job: Job, outcome: Outcome) -> Outcome:
    """Write an outcome that the job's process could not write, because it was killed or its run had not begun."""
    try:
        with FileLock(job.folder / ".lock", timeout=0):
            if job.previous_config() is None:
                write_config(job.folder, job.config)
            elif outcome.status == "refused":
                return Outcome("failed", outcome.reason)  # the earlier run's files stay as they are
            ended = {"name": job.config["name"], "status": outcome.status, "error": outcome.reason}
            write_summary(job.folder, read_summary(job.folder) | ended)
            return outcome
    except Timeout:  # the process of an earlier sweep, or one on another machine
        return _still_trained(job)


def _still_trained(job: Job) -> Outcome:
    return Outcome("failed", "still being trained by another process")


def read_new_outcome(job: Job, since: float) -> Outcome | None:
    """The outcome of a job that has ended since the time `since`; None for other jobs."""
    path = job.folder / "summary.json"
    if not path.exists() or path.stat().st_mtime < since:
        return None
    summary = read_summary(job.folder)
    return Outcome.from_summary(summary) if summary.get("status") in EXIT_CODES else None


def recover_outcome(job: Job, started: float, error: str) -> Outcome:
    """Read the outcome of a job from its files, after its launcher raised `error`. started: when the sweep started."""
    path = job.folder / "summary.json"
    if not path.exists() or path.stat().st_mtime < started:
        return Outcome("failed", f"not started: {error}")
    return read_new_outcome(job, started) or _record(job, Outcome("failed", "its process was lost"))
