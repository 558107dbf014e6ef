"""Sweeps: python train.py -m attention=naive,sdpa,flash seed=1,2,3 trains each combination.

All jobs are composed and checked before sweep/ starts the first one.
"""

import itertools
import os
import re
from argparse import Namespace
from dataclasses import asdict
from typing import Any

from hydra import compose
from hydra.core.override_parser.types import Override

from common.errors import UserError
from common.run_paths import JOB, RUNS, SWEEPS, make_new_folder
from common.settings import flatten_dict
from configs.compose import compose_config, hydra_initialized, parse_word
from sweep.jobs import Job, identify_config, read_started_jobs
from sweep.launch import run_sweep


def run_multirun(flags: Namespace) -> int:
    """Train every combination of the values in flags.words.

    Returns the exit code. Raises UserError before anything is written.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("-m does not work under torchrun, because it starts one process per run")
    if flags.cfg or "plan=true" in flags.words:
        raise UserError("--cfg and plan=true describe one run; remove -m, and set single values")
    fixed = []  # words that are the same for all jobs
    swept = {}
    with hydra_initialized("train", flags.config_dir):
        for word in flags.words:
            override = parse_word("train", word)
            if override.is_sweep_override():
                swept[override.key_or_group] = override
            else:
                fixed.append(word)
    launcher = compose_launcher(flags.launcher_words)
    jobs = make_jobs(list_combinations(swept), fixed, flags.config_dir)
    return run_sweep(jobs, launcher)


def compose_launcher(words: list[str]) -> Any:
    """Compose Hydra's own config for a launcher; None without words.

    Files of --config-dir are not read, because they could set the code that launches.
    """
    if not words:
        return None
    with hydra_initialized("train", None):
        overrides = [*words, "hydra.job.name=train"]
        return compose("train", overrides=overrides, return_hydra_config=True)


def list_combinations(swept: dict[str, Override]) -> list[dict[str, str]]:
    """List every combination of the values of the swept keys: [{key: "key=value"}, ...].

    The seed changes slowest, so that changes in the machine's speed affect all settings equally.
    Raises UserError if a key has a continuous range, or no key has several values.
    """
    words = {}
    for key in sorted(swept, key=lambda key: key != "seed"):
        if not swept[key].is_discrete_sweep():
            raise UserError(
                f"{key} has a range without steps; list its values, or "
                "search as in docs/training.md"
            )
        words[key] = [f"{key}={value}" for value in swept[key].sweep_string_iterator()]
    combinations = [
        dict(zip(words, job, strict=True)) for job in itertools.product(*words.values())
    ]
    if len(combinations) == 1:
        advice = "set seed=1,2,3, for example (and data.path=[A],[B] for paths and names)"
        raise UserError(f"-m needs several values for at least one key; {advice}, or remove -m")
    return combinations


def make_jobs(
    combinations: list[dict[str, str]], fixed: list[str], config_dir: str | None
) -> list[Job]:
    """Compose and check the jobs of a sweep. Raises UserError before anything is written.

    combinations: words of each job, {key: "key=value"}. fixed: words of all jobs.
    """
    names = [name_job(words) for words in combinations]
    if len(set(names)) < len(names):
        raise UserError(f"{max(names, key=names.count)} would be trained twice; list it once")
    all_words = [[*fixed, *words.values()] for words in combinations]
    configs = [compose_config("train", words, config_dir) for words in all_words]
    label = f"{configs[0].data.name}-{configs[0].model.name}"
    sweep = configs[0].name or make_new_folder(SWEEPS, label)
    if (RUNS / sweep / "config.yaml").exists():  # preset=auto would be the preset of this run
        raise UserError(f"{RUNS / sweep} is a run; set another name for the sweep")
    started = read_started_jobs(SWEEPS / sweep)
    jobs = []
    for name, words, config in zip(names, all_words, configs, strict=True):
        values = asdict(config)
        # A job that an earlier command has started keeps its name
        name = started.get(identify_config(flatten_dict(values)), name)
        values["name"] = f"sweeps/{sweep}/{name}"
        values["wandb"]["group"] = config.wandb.group or os.environ.get("WANDB_RUN_GROUP") or sweep
        arguments = [
            *words,
            f"name={values['name']}",
            f"wandb.group={values['wandb']['group']}",
            f"preset={config.preset or 'auto'}",  # with auto, a job would measure its speed again
        ]
        if config_dir:
            arguments = ["--config-dir", config_dir, *arguments]
        jobs.append(Job(name, SWEEPS / sweep / name, arguments, values))
    return jobs


def name_job(words: dict[str, str]) -> str:
    """Name a job by its words, sorted by key: attention=naive,seed=1. Raises UserError."""
    name = ",".join(words[key] for key in sorted(words)).replace("'", "")
    name = re.sub(r"[^A-Za-z0-9._=,+-]", "_", name)
    if not JOB.fullmatch(name):
        raise UserError(f"{name[:60]}... is too long for the name of a run; sweep fewer keys")
    return name
