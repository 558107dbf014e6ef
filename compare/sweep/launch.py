"""Runs the jobs of a sweep through a Hydra launcher: one after another here, or on a cluster.

A sweep that is started again under the same name runs only the jobs that are not finished.
"""

import os
import sys
import time
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.types import HydraContext

from common.files import read_json, write_json
from common.run_dir import EXIT_CODES, SWEEPS
from common.system import command_line
from compare.runs.comparison import compare, print_comparison
from compare.sweep.jobs import Job, Outcome, recover_outcome, train_job
from compare.sweep.progress import SweepProgress
from training.config import WandbConfig
from training.wandb_logger import log_table_to_wandb

PROJECT = Path(__file__).parents[2]


def run_sweep(name: str, jobs: list[Job], launcher_config: Any) -> int:
    """Train the jobs that are not finished, and compare all runs of the sweep.

    Returns the exit code: 1 if any job failed, 75 if one was interrupted, 2 if all were refused. Raises UserError.
    """
    folder = SWEEPS / name
    for job in jobs:
        job.check_folder()
    write_sweep_file(folder, jobs)
    todo = [job for job in jobs if not job.is_done()]
    finished = f", {len(jobs) - len(todo)} of them finished before" if len(todo) < len(jobs) else ""
    print(f"sweep    {folder}, {len(jobs)} runs{finished}", flush=True)
    outcomes = launch(todo, launcher_config, jobs) if todo else {}
    return finish_sweep(folder, jobs, outcomes)


def finish_sweep(folder: Path, jobs: list[Job], outcomes: dict[str, Outcome]) -> int:
    """Compare all runs of a sweep, and report the outcomes of the jobs that ran. Returns the exit code."""
    wandb = WandbConfig(**{field.name: jobs[0].config["wandb"][field.name] for field in fields(WandbConfig)})
    try:
        rows = compare([folder], folder)
        print_comparison(rows, folder)
        if outcomes:
            picture, report, title = folder / "comparison.png", folder / "report.html", f"{folder.name}-comparison"
            log_table_to_wandb(wandb, "comparison", title, wandb.group, rows, picture, {}, report)
    finally:  # report the outcomes even if the comparison fails
        code = _report_outcomes(folder, jobs, outcomes)
    return code


def write_sweep_file(folder: Path, jobs: list[Job], **content: Any) -> None:
    """Write sweep.json: the command, the names of all jobs that the sweep has ever had, and `content`."""
    folder.mkdir(parents=True, exist_ok=True)
    before = read_json(folder / "sweep.json")
    names = before.get("jobs", [])
    names += [job.name for job in jobs if job.name not in names]
    write_json(folder / "sweep.json", before | {"command": command_line(), "jobs": names} | content)


def launch(todo: list[Job], config: Any, jobs: list[Job]) -> dict[str, Outcome]:
    """Run jobs through Hydra's launcher -> the outcome of each. Raises KeyboardInterrupt if the sweep is stopped."""
    config.hydra.sweep.dir = str(todo[0].folder.parent)
    # The launcher composes each job's config again from these overrides. Without this override, it creates multirun/.
    config.hydra.overrides.hydra.append(f"hydra.sweep.dir={config.hydra.sweep.dir}")
    context = HydraContext(config_loader=GlobalHydra.instance().config_loader(), callbacks=Callbacks())
    run_job = partial(_run_job, {job.config["name"]: job for job in todo})
    launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=run_job, config=config)
    # A launcher's processes on other machines import this module by its name.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")]))
    started = time.time()
    try:
        with SweepProgress(jobs, todo):
            returned = launcher.launch([[f"name='{job.config['name']}'"] for job in todo], initial_job_idx=0)
        return {job.name: result.return_value for job, result in zip(todo, returned, strict=True)}
    except KeyboardInterrupt:
        is_local = config.hydra.runtime.choices["hydra/launcher"] == "basic"
        elsewhere = "" if is_local else " (jobs on other machines continue)"
        name = todo[0].folder.parent.name
        raise KeyboardInterrupt(f"stopped{elsewhere}; resume with the same command and name={name}") from None
    except Exception as error:  # a launcher is a plugin with its own exceptions; the jobs' files have their outcomes
        reason = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        return {job.name: recover_outcome(job, started, reason) for job in todo}


def _run_job(jobs: dict[str, Job], config: Any) -> Outcome:
    """Train one job. The launcher calls this function, here or on another machine. config: only its name is used."""
    try:
        return train_job(jobs[config.name])
    except Exception as error:
        return Outcome("failed", f"{type(error).__name__}: {error}")


def _report_outcomes(folder: Path, jobs: list[Job], outcomes: dict[str, Outcome]) -> int:
    """Print which jobs failed or were interrupted -> the exit code. The comparison shows refused jobs."""
    for name, outcome in outcomes.items():
        if outcome.status not in ("finished", "refused"):
            log = f" ({folder / name / 'train.log'})" if outcome.status == "failed" else ""
            print(f"{outcome.status:<9}{name}: {outcome.reason}{log}", file=sys.stderr)
    statuses = {outcome.status for outcome in outcomes.values()}
    if "failed" in statuses:
        print(f"try the failed jobs again with the same command and name={folder.name}", file=sys.stderr)
    is_refused = statuses == {"refused"} and len(outcomes) == len(jobs)
    exit_status = next((status for status in ("failed", "interrupted") if status in statuses), None)
    return EXIT_CODES[exit_status or ("refused" if is_refused else "finished")]
