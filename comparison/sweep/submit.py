"""Trains jobs through submitit: on a cluster (hydra/launcher=submitit_slurm) or as local processes (submitit_local)."""

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

from comparison.sweep.jobs import Job, Outcome, train_job


class RequeuedJob(Checkpointable):
    """The function that submitit calls on the machine of a job.

    SLURM sends SIGUSR2 before a time limit. The run then saves a checkpoint, and submitit requeues the SLURM job.
    """

    def __call__(self, job: Job) -> Outcome:
        requeue = signal.signal(signal.SIGUSR2, signal.default_int_handler)  # submitit's handler
        try:
            return train_job(job)
        except KeyboardInterrupt:
            requeue(signal.SIGUSR2, None)  # raises SystemExit
            raise


def submit_jobs(jobs: list[Job], config: Any) -> Iterator[tuple[Job, Outcome]]:
    """Submit all jobs with the settings in Hydra's own config, and yield (job, outcome) when a job ends."""
    cluster = config.hydra.runtime.choices["hydra/launcher"].removeprefix("submitit_")
    config.hydra.sweep.dir = str(jobs[0].folder.parent)  # contains .submitit/
    params = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    del params["_target_"]
    common_keys = {field.name for field in fields(BaseQueueConf)}
    params = {
        key if key in common_keys else f"{cluster}_{key}": value for key, value in params.items()
    }
    init = {key: params.pop(key) for key in ("slurm_max_num_timeout",) if key in params}
    executor = AutoExecutor(params.pop("submitit_folder"), cluster=cluster, **init)
    executor.update_parameters(**params)
    # The processes of submitit import this module by its name.
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    submitted = dict(zip(executor.map_array(RequeuedJob(), jobs), jobs, strict=True))
    for cluster_job in as_completed(list(submitted), poll_frequency=1):  # seconds
        try:
            outcome = cluster_job.result()
        except Exception as error:  # submitit lost the job
            outcome = Outcome(
                "failed", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            )
        yield submitted[cluster_job], outcome
