"""Trains the unfinished jobs of a sweep, here or on a cluster, and compares all of its runs."""

import time
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from filelock import FileLock

from common.console import format_duration, pluralize, print_text
from common.errors import EXIT_CODES, UserError
from common.files import read_json, write_json
from common.process import command_line
from common.settings import flatten_dict
from results.compare import compare, compare_variants, describe_row, print_comparison
from results.read import read_variants
from results.wandb import WandbExport
from sweep.jobs import Job, Outcome, find_fixed_changes, train_job
from training.run_folder import read_trained_config


def run_sweep(jobs: list[Job], launcher: Any = None, stops_early: bool = False) -> int:
    """Train the unfinished jobs of a sweep, and compare all of its runs.

    launcher: Hydra's own config for submit_jobs. By default, jobs run on this machine.
    stops_early: train one seed after the other, as far as verdicts need them.
    Returns the exit code of finish_sweep.
    Raises UserError if a job was trained with other settings.
    """
    folder = jobs[0].folder.parent
    negligible = jobs[0].config["sweep"]["difference"]
    if stops_early:
        check_baseline(folder, jobs[0])
    for job in jobs:
        job.check_folder()
    num_done = sum(job.is_done() for job in jobs)
    limit = "at most " if stops_early else ""
    print_text(f"sweep    {folder}, {limit}{len(jobs)} runs, {num_done} of them finished")
    batches = iter_seeds(jobs, negligible) if stops_early else [jobs]
    started = []
    outcomes = {}
    for batch in batches:
        outcomes |= train_jobs(find_missing_jobs(folder, batch), launcher)
        started += batch
    return finish_sweep(folder, started, outcomes, negligible)


def check_baseline(folder: Path, job: Job) -> None:
    """Raise UserError if the sweep has begun with another setting than the one of this job."""
    started = read_json(folder / "sweep.json").get("jobs", [])
    trained = read_trained_config(folder / started[0]) if started else {}
    changes = find_fixed_changes(trained, flatten_dict(job.config))
    if changes.keys() - {"seed"}:
        raise UserError(
            f"{folder} compares all settings with {started[0]}; "
            "list this setting first, or set another name"
        )


def iter_seeds(jobs: list[Job], negligible: float) -> Iterator[list[Job]]:
    """Yield the jobs of one seed after the other, until all settings have a verdict.

    Settings that have one are left out, except the first one, with which the others are compared,
    and runs that exist, which can have another length.
    """
    folder = jobs[0].folder.parent
    settings = {job.setting for job in jobs}
    seeds = [list(group) for _, group in groupby(jobs, key=lambda job: job.config["seed"])]
    for number, batch in enumerate(seeds, 1):
        settings.add(jobs[0].setting)
        needed = [
            job
            for job in batch
            if job.setting in settings or (job.folder / "summary.json").exists()
        ]
        is_new = not all(job.is_done() for job in needed)
        started = time.monotonic()
        yield needed
        seconds = time.monotonic() - started
        sentences, folders = find_undecided(folder, negligible)
        settings = {job.setting for job in jobs if job.folder in folders}
        if not settings or number == len(seeds):
            return
        if not is_new:
            continue
        num_left = len(seeds) - number
        time_left = format_duration(num_left * seconds)
        print_text(f"at most {pluralize(num_left, 'more seed')} and {time_left} to decide")
        for sentence in sentences:
            print_text(f"  {sentence}")


def find_undecided(folder: Path, negligible: float) -> tuple[list[str], set[Path]]:
    """Find the settings of a sweep that need more seeds.

    Returns their sentences, and the folders of their runs. One pair of runs decides nothing, and a
    setting without any pair has failed.
    """
    variants = read_variants([folder])
    rows = compare_variants(variants, negligible)
    sentences = []
    folders = set()
    for variant, row in zip(variants, rows, strict=True):
        has_failed = "failed" in row["status"].value
        if row["verdict"].value == "undecided" or (row["pairs"].value == 1 and not has_failed):
            sentences.append(describe_row(row, rows[0]))
            folders |= {run.folder for run in variant.runs}
    return sentences, folders


def find_missing_jobs(folder: Path, jobs: list[Job]) -> list[Job]:
    """Return the unfinished jobs, and list all jobs of the sweep in sweep.json."""
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
            line = f"{job.name}  {outcome.status}: {outcome.details}"
            if num_missing > 0:
                seconds_left = (time.monotonic() - started) / len(outcomes) * num_missing
                line += f" ({num_missing} to go, {format_duration(seconds_left)} left)"
            print_text(line)
    except KeyboardInterrupt:
        name = todo[0].folder.parent.name
        raise KeyboardInterrupt(f"stopped; resume with the same command and name={name}") from None
    return outcomes


def finish_sweep(
    folder: Path, jobs: list[Job], outcomes: dict[str, Outcome], negligible: float
) -> int:
    """Compare all runs of a sweep, and log the comparison to wandb.

    jobs: all that were needed. outcomes: outcomes by name of the jobs that ran now.
    negligible: a relative difference of losses that counts as none.
    Returns the exit code: 1 if any job failed, 75 if one was interrupted, 2 if all were refused.
    """
    rows = compare([folder], folder, negligible)
    print_comparison(rows, folder)
    with WandbExport(jobs[0].config["wandb"]) as export:
        export.start(folder)
    statuses = [outcome.status for outcome in outcomes.values()]
    for status in ("failed", "interrupted"):
        if status in statuses:
            return EXIT_CODES[status]
    if statuses and statuses.count("refused") == len(jobs):
        return EXIT_CODES["refused"]
    return EXIT_CODES["finished"]
