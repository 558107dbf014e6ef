"""Runs the jobs of a sweep, one after another here or on a cluster, and compares them.

A sweep that is started again under the same name runs only the jobs that are not finished.
"""

import math
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from common.console import format_duration, make_console
from common.files import read_json, write_json
from common.run_dir import EXIT_CODES, SWEEPS, read_summary
from common.system import command_line
from compare.runs.comparison import compare, print_comparison
from compare.sweep.jobs import Job, Outcome, train_job
from compare.sweep.submit import submit_jobs
from training.config import WandbConfig
from training.wandb_logger import log_table_to_wandb


def run_sweep(name: str, jobs: list[Job], launcher: Any = None) -> int:
    """Train the jobs that are not finished, and compare all runs of the sweep.

    launcher: config for submit_jobs; None: train the jobs here, one after another.
    Returns the exit code: 1 if any job failed, 75 if one was interrupted, 2 if all were refused. Raises UserError.
    """
    folder = SWEEPS / name
    for job in jobs:
        job.check_folder()
    write_sweep_file(folder, jobs)
    todo = [job for job in jobs if not job.is_done()]
    finished = f", {len(jobs) - len(todo)} of them finished before" if len(todo) < len(jobs) else ""
    print(f"sweep    {folder}, {len(jobs)} runs{finished}", flush=True)
    return finish_sweep(folder, jobs, train_jobs(todo, launcher))


def write_sweep_file(folder: Path, jobs: list[Job]) -> None:
    """Write sweep.json: the command, and the names of all jobs that the sweep has ever had."""
    folder.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys([*read_json(folder / "sweep.json").get("jobs", []), *(job.name for job in jobs)])
    write_json(folder / "sweep.json", {"command": command_line(), "jobs": list(names)})


def train_jobs(todo: list[Job], launcher: Any = None) -> dict[str, Outcome]:
    """Train jobs, and print a line for each that ends -> the outcomes by name. Raises KeyboardInterrupt."""
    outcomes: dict[str, Outcome] = {}
    console, started = make_console(), time.monotonic()
    width = max((len(job.name) for job in todo), default=0)
    # pairs of a job and its outcome, as jobs end
    pairs = submit_jobs(todo, launcher) if todo and launcher is not None else ((job, train_job(job)) for job in todo)
    try:
        for job, outcome in pairs:
            outcomes[job.name] = outcome
            missing = len(todo) - len(outcomes)
            left = format_duration((time.monotonic() - started) / len(outcomes) * missing)
            progress = f"  ({missing} to go, {left} left)" if missing else ""
            console.print(f"{job.name:<{width}}  {_describe(job, outcome)}{progress}", soft_wrap=True)
    except KeyboardInterrupt:
        elsewhere = "" if launcher is None else " (submitted jobs continue)"
        name = todo[0].folder.parent.name
        raise KeyboardInterrupt(f"stopped{elsewhere}; resume with the same command and name={name}") from None
    return outcomes


def _describe(job: Job, outcome: Outcome) -> str:
    if outcome.status != "finished":
        log = f" ({job.folder / 'train.log'})" if outcome.status == "failed" else ""
        return f"{outcome.status}: {outcome.reason}{log}"
    val_loss = read_summary(job.folder).get("last_val_loss")
    return f"val loss {math.nan if val_loss is None else val_loss:.4f}"


def finish_sweep(folder: Path, jobs: list[Job], outcomes: dict[str, Outcome]) -> int:
    """Compare all runs of a sweep. outcomes: of the jobs that ran now. Returns the exit code."""
    rows = compare([folder], folder)
    print_comparison(rows, folder)
    if outcomes:
        wandb = WandbConfig(**{field.name: jobs[0].config["wandb"][field.name] for field in fields(WandbConfig)})
        picture, report, title = folder / "comparison.png", folder / "report.html", f"{folder.name}-comparison"
        log_table_to_wandb(wandb, "comparison", title, wandb.group, rows, picture, {}, report)
    statuses = {outcome.status for outcome in outcomes.values()}
    if "failed" in statuses:
        print(f"try the failed jobs again with the same command and name={folder.name}", flush=True)
    if statuses == {"refused"} and len(outcomes) == len(jobs):
        return EXIT_CODES["refused"]
    return EXIT_CODES[next((status for status in ("failed", "interrupted") if status in statuses), "finished")]
