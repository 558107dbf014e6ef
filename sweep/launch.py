"""Trains the unfinished jobs of a sweep, here or on a cluster, and compares all of its runs."""

import time
from pathlib import Path
from typing import Any

from filelock import FileLock

from common.console import format_duration, print_text
from common.errors import EXIT_CODES
from common.files import read_json, write_json
from common.process import command_line
from results.compare import compare, print_comparison
from results.wandb import WandbExport
from sweep.jobs import Job, Outcome, train_job


def run_sweep(jobs: list[Job], launcher: Any = None) -> int:
    """Train the unfinished jobs of a sweep, and compare all of its runs.

    launcher: Hydra's own config for submit_jobs. By default, jobs run on this machine.
    Returns the exit code of finish_sweep.
    Raises UserError if a job was trained with other settings.
    """
    folder = jobs[0].folder.parent
    todo = find_missing_jobs(folder, jobs)
    num_done = len(jobs) - len(todo)
    print_text(f"sweep    {folder}, {len(jobs)} runs, {num_done} of them finished before")
    return finish_sweep(folder, jobs, train_jobs(todo, launcher))


def find_missing_jobs(folder: Path, jobs: list[Job]) -> list[Job]:
    """Return the unfinished jobs, and list all jobs of the sweep in sweep.json.

    Raises UserError if the settings of a job have changed.
    """
    for job in jobs:
        job.check_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):  # another process can add jobs to the same sweep
        names = read_json(folder / "sweep.json").get("jobs", [])
        names += [job.name for job in jobs if job.name not in names]
        write_json(folder / "sweep.json", {"command": command_line(), "jobs": names})
    return [job for job in jobs if not job.is_done()]


def train_jobs(todo: list[Job], launcher: Any = None) -> dict[str, Outcome]:
    """Train jobs, and print a line when a job ends. Returns the outcomes by job name."""
    results = ((job, train_job(job)) for job in todo)
    if todo and launcher is not None:
        from sweep.submit import submit_jobs  # needs submitit

        results = submit_jobs(todo, launcher)
    outcomes: dict[str, Outcome] = {}
    started = time.monotonic()
    try:
        for job, outcome in results:
            outcomes[job.name] = outcome
            num_missing = len(todo) - len(outcomes)
            seconds_left = (time.monotonic() - started) / len(outcomes) * num_missing
            progress = f"{num_missing} to go, {format_duration(seconds_left)} left"
            print_text(f"{job.name}  {outcome.status}: {outcome.details} ({progress})")
    except KeyboardInterrupt:
        name = todo[0].folder.parent.name
        message = f"stopped; resume with the same command and name={name}"
        raise KeyboardInterrupt(message) from None
    return outcomes


def finish_sweep(folder: Path, jobs: list[Job], outcomes: dict[str, Outcome]) -> int:
    """Compare all runs of a sweep, and log the comparison to wandb.

    outcomes: outcomes by name of the jobs that ran now.
    Returns the exit code: 1 if any job failed, 75 if one was interrupted, 2 if all were refused.
    """
    rows = compare([folder], folder)
    print_comparison(rows, folder)
    if outcomes:
        with WandbExport(jobs[0].config["wandb"]) as export:
            export.start(folder)
    statuses = [outcome.status for outcome in outcomes.values()]
    for status in ("failed", "interrupted"):
        if status in statuses:
            return EXIT_CODES[status]
    if statuses and statuses.count("refused") == len(jobs):
        return EXIT_CODES["refused"]
    return EXIT_CODES["finished"]
