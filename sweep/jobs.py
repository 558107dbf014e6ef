"""Jobs of a sweep. A job trains one run in a child process, so that a crash ends only this run."""

import json
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL
from typing import NamedTuple

from common.console import print_text
from common.errors import EXIT_CODES, UserError
from common.files import read_json, write_json
from common.settings import describe_changes, flatten_dict
from training.run_folder import read_config, read_trained_config, write_config

SCRIPT = Path(__file__).parents[1] / "train.py"
SWEEP_KEYS = ("name", "sweep.", "wandb.group", "wandb.mode")  # no result of a run depends on them
LENGTH_KEYS = ("train.steps", "train.epochs", "train.minutes")
# Keys that may change when a sweep is started again. Any other change would make a different run.
CHANGEABLE_KEYS = (*LENGTH_KEYS, "name", "resume", "checkpoint.", "sweep.", "wandb.")


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    name: str  # the swept values, as in attention=flash,seed=1
    folder: Path  # runs/sweeps/<sweep>/<name>
    arguments: list[str]  # of train.py
    config: dict  # the composed config, as nested dicts

    @property
    def setting(self) -> str:
        """A text that is equal for jobs that differ only in the seed."""
        return identify_config(flatten_dict(self.config) | {"seed": None})

    def is_done(self) -> bool:
        """Whether the run has finished, with the length and all fixed settings of this job."""
        if read_json(self.folder / "summary.json").get("status") != "finished":
            return False
        trained = flatten_dict(read_config(self.folder))
        settings = flatten_dict(self.config)
        same_length = all(trained.get(key) == settings.get(key) for key in LENGTH_KEYS)
        return same_length and not find_fixed_changes(trained, settings)

    def check_folder(self) -> None:
        """Raise UserError if the folder contains a run with a different config."""
        fixed = find_fixed_changes(read_trained_config(self.folder), flatten_dict(self.config))
        if fixed:
            raise UserError(
                f"{self.folder} was trained with {', '.join(fixed.values())}; "
                "restore the old values, or set another name"
            )


def find_fixed_changes(old: dict, new: dict) -> dict[str, str]:
    """Describe the changes of flat configs by key, without CHANGEABLE_KEYS."""
    changes = describe_changes(old, new)
    return {key: changes[key] for key in changes if not key.startswith(CHANGEABLE_KEYS)}


def identify_config(config: dict) -> str:
    """A text that is equal for two flat configs with equal settings, except SWEEP_KEYS.

    Configs of earlier versions lack new keys, which are None.
    """
    settings = {
        key: value
        for key, value in config.items()
        if value is not None and not key.startswith(SWEEP_KEYS)
    }
    return json.dumps(settings, sort_keys=True, default=str)


def read_started_jobs(sweep: Path) -> dict[str, str]:
    """Names of the jobs that earlier commands have started, by identify_config.

    The job of seed=1 has no seed in its name. If the sweep is extended to seed=1,2, it keeps
    this name.
    """
    return {
        identify_config(flatten_dict(read_config(path.parent))): path.parent.name
        for path in sorted(sweep.glob("*/config.yaml"))
    }


class Outcome(NamedTuple):
    """How a job ended."""

    status: str  # a key of EXIT_CODES
    details: str  # the validation loss, or why the job did not finish


def train_job(job: Job) -> Outcome:
    """Train one job in a child process, and append its output to train.log.

    KeyboardInterrupt stops the child, which saves a checkpoint. A second one kills it.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    log = job.folder / "train.log"
    print_text(f"{job.name}  started, with its output in {log}")
    command = [sys.executable, str(SCRIPT), *job.arguments]
    with open(log, "ab") as output:
        # In a new session, the child does not get the terminal's Ctrl-C. terminate() stops it once.
        child = subprocess.Popen(
            command, stdin=DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        exit_code = child.wait()
    except BaseException:
        child.terminate()
        with suppress(OSError):  # Ctrl-C has also stopped `tee`
            print(f"{job.name}: stopping after this step, and saving", flush=True)
        try:
            child.wait()
        finally:
            child.kill()  # does nothing if the process has ended
        raise
    return record_outcome(job, exit_code)


def record_outcome(job: Job, exit_code: int) -> Outcome:
    """How a job ended. Also write summary.json if the run has not started or was killed."""
    summary_file = job.folder / "summary.json"
    summary = read_json(summary_file)
    statuses = {code: status for status, code in EXIT_CODES.items()}
    status = statuses.get(exit_code, "failed")
    if status == "finished":
        loss = float(summary["last_val_loss"] or "nan")  # an infinite loss is stored as null
        return Outcome(status, f"val loss {loss:.4f}")
    if exit_code < 0:
        reason = f"killed by {signal.Signals(-exit_code).name}"
    else:
        log = (job.folder / "train.log").read_text(encoding="utf-8", errors="replace")
        last_line = log.strip().rpartition("\n")[2]
        reason = last_line.removeprefix(f"{SCRIPT.name}: ") or f"exit code {exit_code}"
    if summary.get("status") in (None, "refused"):  # the run has not started
        write_config(job.folder, job.config)
        write_json(summary_file, {"name": job.config["name"], "status": status, "error": reason})
    elif status == "refused":  # the run exists, but another process trains it, for example
        status = "failed"
    elif summary["status"] == "running":
        write_json(summary_file, summary | {"status": status, "error": reason})
    return Outcome(status, reason)
