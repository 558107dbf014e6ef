"""Trains the unfinished jobs of a sweep, here or on a cluster (submit.py), and compares all of its runs."""

import math
import time
from pathlib import Path
from typing import Any

from filelock import FileLock

from common.console import PlainConsole, format_duration, format_si
from common.errors import EXIT_CODES
from common.files import read_json, write_json
from common.system import command_line
from comparison.runs.comparison import compare, print_comparison
from comparison.sweep.jobs import Job, Outcome, train_job
from data.tokenizer import OPENAI_SIZES
from generation.run_paths import SWEEPS
from training.config import WandbConfig
from training.wandb_logger import WandbRun


def run_sweep(name: str, jobs: list[Job], launcher: Any = None) -> int:
    """Train the unfinished jobs of a sweep, and compare all of its runs.

    launcher: Hydra's own config for submit_jobs. By default, jobs run on this machine.
    Returns the exit code of finish_sweep. Raises UserError if a job was trained with other settings.
    """
    folder = SWEEPS / name
    todo = find_missing_jobs(folder, jobs)
    done, size = len(jobs) - len(todo), format_si(sum(map(estimate_checkpoint_bytes, todo)), "B")
    runs = f"{len(jobs)} runs, {done} of them finished before"
    PlainConsole().print_text(f"sweep    {folder}, {runs}, {size} of checkpoints")
    return finish_sweep(folder, jobs, train_jobs(todo, launcher))


def estimate_checkpoint_bytes(job: Job) -> int:
    """Size of a run's checkpoints: best.pt has the weights in float32, and the others also up to two averages."""
    import torch  # takes a second

    from model.gpt import GPT, GPTConfig

    tokenizer, keep = job.config["tokenizer"], job.config["checkpoint"]["keep"]
    vocab_size = tokenizer["vocab_size"] or OPENAI_SIZES.get(tokenizer["name"], 2048)
    with torch.device("meta"):
        model = GPT(GPTConfig(**job.config["model"]), vocab_size)
    return (4 + 12 * (1 + keep)) * sum(p.numel() for p in model.parameters())


def find_missing_jobs(folder: Path, jobs: list[Job]) -> list[Job]:
    """Return the unfinished jobs, and list all in sweep.json. Raises UserError if the settings of a job changed."""
    for job in jobs:
        job.check_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / ".lock"):  # another process can add jobs to the same sweep
        names = [*(read_json(folder / "sweep.json").get("jobs") or []), *(job.name for job in jobs)]
        write_json(
            folder / "sweep.json",
            {"command": command_line(), "jobs": [*dict.fromkeys(map(str, names))]},
        )
    return [job for job in jobs if not job.is_done()]


def train_jobs(todo: list[Job], launcher: Any = None) -> dict[str, Outcome]:
    """Train jobs, and print a line when a job ends. Returns the outcomes by job name."""
    outcomes: dict[str, Outcome] = {}
    console, started = PlainConsole(), time.monotonic()
    results = ((job, train_job(job)) for job in todo)
    if todo and launcher is not None:
        from comparison.sweep.submit import submit_jobs  # needs submitit

        results = submit_jobs(todo, launcher)
    try:
        for job, outcome in results:
            outcomes[job.name] = outcome
            missing = len(todo) - len(outcomes)
            seconds_left = (time.monotonic() - started) / len(outcomes) * missing
            progress = (
                f"  ({missing} to go, {format_duration(seconds_left)} left)" if missing else ""
            )
            console.print_text(f"{job.name}  {_describe(job, outcome)}{progress}")
    except KeyboardInterrupt:
        raise KeyboardInterrupt(
            f"stopped; resume with the same command and name={todo[0].folder.parts[-2]}"
        ) from None
    return outcomes


def _describe(job: Job, outcome: Outcome) -> str:
    if outcome.status == "finished":
        return f"val loss {read_json(job.folder / 'summary.json').get('last_val_loss') or math.nan:.4f}"
    log = f" ({job.folder / 'train.log'})" if outcome.status == "failed" else ""
    return f"{outcome.status}: {outcome.reason}{log}"


def finish_sweep(folder: Path, jobs: list[Job], outcomes: dict[str, Outcome]) -> int:
    """Compare all runs of a sweep, and log the comparison to wandb.

    outcomes: outcomes by name of the jobs that ran now.
    Returns the exit code: 1 if any job failed, 75 if one was interrupted, 2 if all were refused.
    """
    rows = compare([folder], folder)
    print_comparison(rows, folder)
    if outcomes:
        config = WandbConfig(**jobs[0].config["wandb"])
        wandb = WandbRun(
            config, folder, {}, name=f"{folder.name}-comparison", job_type="comparison"
        )
        files = {
            "comparison_picture": folder / "comparison.png",
            "comparison_report": folder / "report.html",
        }
        wandb.log([{"comparison": rows} | files])
        wandb.finish(0)
    statuses = {outcome.status for outcome in outcomes.values()}
    if statuses == {"refused"} and len(outcomes) == len(jobs):
        return EXIT_CODES["refused"]
    return EXIT_CODES[
        next((status for status in ("failed", "interrupted") if status in statuses), "finished")
    ]
