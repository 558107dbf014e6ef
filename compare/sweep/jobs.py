"""The jobs of a sweep. Each job is an ordinary run in a child process, in runs/sweeps/<sweep>/<job>.

In separate processes, a job that crashes does not affect the others, and each peak memory is that of one job.
"""

import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import NamedTuple

import yaml
from filelock import FileLock, Timeout

from common.errors import UserError, format_value
from common.files import write_json
from common.run_dir import EXIT_CODES, flatten_dict, read_summary, write_config

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


class Outcome(NamedTuple):
    """How a job ended: a status of EXIT_CODES, and the reason if it did not finish."""

    status: str
    reason: str | None = None


def train_job(job: Job) -> Outcome:
    """Train one job in a child process, whose output is appended to train.log. Returns how it ended.

    An exception such as KeyboardInterrupt stops the child, which saves a checkpoint.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    log, is_too_long = job.folder / "train.log", False
    with open(log, "ab") as output:
        command = [sys.executable, str(SCRIPT), *job.words]
        # In a new session, the terminal's Ctrl-C does not reach the child; _stop below stops it once.
        child = subprocess.Popen(command, stdin=DEVNULL, stdout=output, stderr=output, start_new_session=True)
    try:
        code = child.wait(None if job.timeout_minutes is None else 60 * job.timeout_minutes)
    except subprocess.TimeoutExpired:
        code, is_too_long = _stop(child), True
    except BaseException:
        print(f"{job.name}: stopping after this step, and saving", flush=True)
        _stop(child)
        raise
    if code == EXIT_CODES["finished"]:
        return Outcome("finished")
    if is_too_long:
        outcome = Outcome("failed", f"its time limit of {format_value(job.timeout_minutes)} minutes has passed")
    elif code < 0:
        outcome = Outcome("failed", f"its process was killed by {signal.Signals(-code).name}")
    else:
        status = next((status for status, known in EXIT_CODES.items() if known == code), "failed")
        lines = log.read_text(errors="replace").strip().splitlines() or [f"exit code {code}"]
        outcome = Outcome(status, lines[-1].removeprefix(f"{SCRIPT.name}: "))
    return _record(job, outcome)


def _stop(child: subprocess.Popen) -> int:
    """Ask a job to save and end; kill it if it hangs, or after a second Ctrl-C. Returns its exit code."""
    child.terminate()
    try:
        with suppress(subprocess.TimeoutExpired):
            child.wait(TERMINATE_GRACE_S)
    finally:
        child.kill()  # does nothing if the process has ended
    return child.wait()


def _record(job: Job, outcome: Outcome) -> Outcome:
    """Write an outcome to the run's files: a process that was killed or refused has not written it."""
    try:
        with FileLock(job.folder / ".lock", timeout=0):
            if job.previous_config() is None:
                write_config(job.folder, job.config)
            ended = {"name": job.config["name"], "status": outcome.status, "error": outcome.reason}
            write_json(job.folder / "summary.json", read_summary(job.folder) | ended)
            return outcome
    except Timeout:  # the process of an earlier sweep, or one on another machine, trains this run
        return Outcome("failed", outcome.reason)
