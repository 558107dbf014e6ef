"""Trains jobs through submitit: on a cluster (hydra/launcher=submitit_slurm), or as local processes
(submitit_local)."""

import os
import signal
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf
from omegaconf import OmegaConf
from submitit import AutoExecutor
from submitit.helpers import Checkpointable, as_completed

from sweep.jobs import Job, Outcome, train_job

ROOT = Path(__file__).parents[1]


class RequeuedJob(Checkpointable):
    """The function that submitit calls on the machine of a job.

    SLURM sends SIGUSR2 before a time limit. The run then saves a checkpoint, and submitit requeues
    the SLURM job.
    """

    def __call__(self, job: Job) -> Outcome:
        requeue = signal.signal(signal.SIGUSR2, signal.default_int_handler)  # submitit's handler
        try:
            return train_job(job)
        except KeyboardInterrupt:
            requeue(signal.SIGUSR2, None)  # raises SystemExit
            raise


def submit_jobs(jobs: list[Job], config: Any) -> Iterator[tuple[Job, Outcome]]:
    """Submit all jobs, and yield (job, outcome) when a job ends.

    config: Hydra's own config, with the settings of its launcher.
    """
    # The processes of submitit import this module by its name.
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    config.hydra.sweep.dir = str(jobs[0].folder.parent)  # contains .submitit/
    tasks = make_executor(config).map_array(RequeuedJob(), jobs)
    jobs_of_tasks = dict(zip(tasks, jobs, strict=True))
    for task in as_completed(tasks, poll_frequency=1):  # seconds
        try:
            outcome = task.result()
        except Exception as error:  # submitit lost the job
            outcome = Outcome("failed", f"{type(error).__name__}: {error}".partition("\n")[0])
        yield jobs_of_tasks[task], outcome


def make_executor(config: Any) -> AutoExecutor:
    """Make submitit's executor from the settings of Hydra's launcher."""
    cluster = config.hydra.runtime.choices["hydra/launcher"].removeprefix("submitit_")
    common_keys = {field.name for field in fields(BaseQueueConf)}
    settings = {}
    for key, value in OmegaConf.to_container(config.hydra.launcher, resolve=True).items():
        settings[key if key in common_keys else f"{cluster}_{key}"] = value
    del settings[f"{cluster}__target_"]
    arguments = {"folder": settings.pop("submitit_folder")}
    if cluster == "slurm":
        arguments["slurm_max_num_timeout"] = settings.pop("slurm_max_num_timeout")
    executor = AutoExecutor(cluster=cluster, **arguments)
    executor.update_parameters(**settings)
    return executor
