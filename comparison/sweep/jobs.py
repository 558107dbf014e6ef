"""Jobs of a sweep. Each job trains one run in a child process, so that a crash ends only this run."""

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
from common.files import parse_yaml, read_file, read_json, write_json
from common.settings import flatten_dict, format_value
from training.run_folder import write_config

SCRIPT = Path(__file__).parents[2] / "train.py"
SWEEP_KEYS = ("name", "wandb.group")  # are set by the sweep
# Keys that may change when a sweep is started again. Any other change would make a different run.
CHANGEABLE_KEYS = ("name", "resume", "train.steps", "train.minutes", "checkpoint.", "wandb.")


@dataclass(frozen=True)
class Job:
    """One run of a sweep."""

    name: str  # the swept values, as in attention=flash,seed=1
    folder: Path  # runs/sweeps/<sweep>/<name>
    arguments: list[str]  # of train.py
    config: dict  # the composed config, as nested dicts

    def previous_config(self) -> dict | None:
        """Read the flat config of an earlier run in this folder. Returns None if nothing was trained there."""
        exists = any(self.folder.glob("checkpoints/*.pt"))
        return read_job_config(self.folder) if exists else None

    def is_done(self) -> bool:
        """Whether a run with exactly this config has finished."""
        status = read_json(self.folder / "summary.json").get("status")
        return status == "finished" and self.previous_config() == flatten_dict(self.config)

    def check_folder(self) -> None:
        """Raise UserError if the folder contains a run with a different config."""
        old, new = self.previous_config() or {}, flatten_dict(self.config)
        changed = [
            key
            for key in new
            if key in old and old[key] != new[key] and not key.startswith(CHANGEABLE_KEYS)
        ]
        if changed:
            listed = ", ".join(
                f"{key}={format_value(old[key])} (now {format_value(new[key])})" for key in changed
            )
            raise UserError(
                f"{self.folder} was trained with {listed}; restore the old values, or set another name"
            )


def read_job_config(folder: Path) -> dict:
    """Read the flat config of a job. Raises UserError if it is damaged."""
    return read_file(folder / "config.yaml", lambda text: flatten_dict(parse_yaml(text)))


def hash_config(config: dict) -> str:
    """A text that is equal for two flat configs with equal settings, except those that the sweep sets."""
    settings = {key: value for key, value in config.items() if key not in SWEEP_KEYS}
    return json.dumps(settings, sort_keys=True, default=str)


def read_started_jobs(sweep: Path) -> dict[str, str]:
    """Names of the jobs that earlier commands have started, by hash_config.

    The job of seed=1 has no seed in its name. If the sweep is extended to seed=1,2, it keeps this name.
    """
    return {
        hash_config(read_job_config(path.parent)): path.parent.name
        for path in sorted(sweep.glob("*/config.yaml"))
    }


class Outcome(NamedTuple):
    """How a job ended."""

    status: str  # a key of EXIT_CODES
    reason: str | None = None  # why it did not finish


def train_job(job: Job) -> Outcome:
    """Train one job in a child process, and append its output to train.log.

    KeyboardInterrupt stops the child, which saves a checkpoint. A second KeyboardInterrupt kills it.
    """
    job.folder.mkdir(parents=True, exist_ok=True)
    print_text(f"{job.name}  started, with its output in {job.folder / 'train.log'}")
    with open(log := job.folder / "train.log", "ab") as output:
        command = [sys.executable, str(SCRIPT), *job.arguments]
        # In its own session, the child does not get the terminal's Ctrl-C. terminate() below stops it once.
        child = subprocess.Popen(
            command, stdin=DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        code = child.wait()
    except BaseException:
        child.terminate()
        with suppress(OSError):  # Ctrl-C has also stopped `tee`
            print(f"{job.name}: stopping after this step, and saving", flush=True)
        try:
            child.wait()
        finally:
            child.kill()  # does nothing if the process has ended
        raise
    if code == EXIT_CODES["finished"]:
        return Outcome("finished")
    status = next(
        (status for status, exit_code in EXIT_CODES.items() if exit_code == code), "failed"
    )
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [
        f"exit code {code}"
    ]
    reason = (
        f"killed by {signal.Signals(-code).name}"
        if code < 0
        else lines[-1].removeprefix(f"{SCRIPT.name}: ")
    )
    if read_json(job.folder / "summary.json").get("status") in (
        None,
        "refused",
    ):  # the run has not started
        write_config(job.folder, job.config)
        write_json(
            job.folder / "summary.json",
            {"name": job.config["name"], "status": status, "error": reason},
        )
    elif (
        status == "refused"
    ):  # the run exists, but could not continue: another process trains it, for example
        status = "failed"
    return Outcome(status, reason)
