"""Sweeps: python train.py -m attention=naive,sdpa,flash seed=1,2,3 trains each combination of the values.

All jobs are composed and checked before comparison/sweep starts the first one. sweep.trials=N suggests the values instead.
"""

import itertools
import os
import re
from argparse import Namespace
from dataclasses import asdict

from hydra import compose
from hydra.core.override_parser.types import Override

from common.errors import UserError
from common.settings import check, flatten_dict
from comparison.sweep.jobs import Job, hash_config, read_started_jobs
from comparison.sweep.launch import run_sweep
from configs.compose import compose_config, hydra_initialized, parse_word
from configs.schema import key_types
from generation.run_paths import JOB, SWEEPS, make_new_folder


def run_multirun(flags: Namespace) -> int:
    """Train every combination of the values in flags.words. Returns the exit code of comparison.sweep.launch.run_sweep."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            "-m starts one process per run and does not work under torchrun; use one of the two"
        )
    if flags.cfg or "plan=true" in flags.words:
        raise UserError(
            "--cfg and plan=true describe one run; remove -m, and set one value for each key"
        )
    trials = [word for word in flags.words if word.startswith("sweep.")]
    with hydra_initialized("train", flags.config_dir):
        overrides = {word: parse_word("train", word) for word in flags.words if word not in trials}
        words = [
            *flags.launcher_words,
            "hydra.job.name=train",
        ]  # no file of --config-dir may set the launcher's code
        launcher = (
            compose("train", overrides=words, return_hydra_config=True)
            if flags.launcher_words
            else None
        )
    swept = {word: override for word, override in overrides.items() if override.is_sweep_override()}
    fixed = [word for word in overrides if word not in swept]
    if trials:
        return _run_search(" ".join(trials), swept, fixed, flags)
    return run_sweep(*make_jobs(None, list_combinations(swept), fixed, flags.config_dir), launcher)


def _run_search(trials: str, swept: dict[str, Override], fixed: list[str], flags: Namespace) -> int:
    """Search over the keys that have several values; each trial is trained with all values of seed."""
    n_trials = re.fullmatch(r"sweep\.trials=([1-9]\d{0,5})", trials)
    if n_trials is None or flags.launcher_words:
        raise UserError(f"{trials}: set sweep.trials=N once, with N of 1 or more, and no launcher")
    seed = next((word for word, override in swept.items() if override.key_or_group == "seed"), None)
    seeds = [] if seed is None else list_combinations({seed: swept.pop(seed)})
    if not swept:
        raise UserError(
            "sweep.trials searches over ranges of keys other than seed; set optimizer.lr=log(1e-4,1e-2)"
        )
    try:
        from comparison.sweep.search import make_distribution, run_search
    except ImportError:
        raise UserError(
            "sweep.trials needs Optuna; install it: pip install 'optuna>=5,<6'"
        ) from None
    space = {}
    for word, override in swept.items():
        is_int = key_types("train").get(override.key_or_group) in (int, int | None)
        space[override.key_or_group] = make_distribution(word, override, is_int)

    def make_trial(sweep: str | None, values: dict[str, str]) -> tuple[str, list[Job]]:
        words = {key: f"{key}={value}" for key, value in values.items()}
        return make_jobs(sweep, [words | seed for seed in seeds or [{}]], fixed, flags.config_dir)

    common = ["--config-dir", flags.config_dir] if flags.config_dir else []
    common += [word for word in fixed if not word.startswith("name=")] + [
        seed["seed"] for seed in seeds[:1]
    ]
    return run_search(space, make_trial, int(n_trials[1]), common)


def list_combinations(swept: dict[str, Override]) -> list[dict[str, str]]:
    """List every combination of the values of the swept words: [{key: "key=value"}, ...]. Raises UserError.

    The seed changes slowest, so that changes in the machine's speed affect all settings equally.
    """
    values: dict[str, list[str]] = {}
    for word, override in sorted(swept.items(), key=lambda item: item[1].key_or_group != "seed"):
        if not override.is_discrete_sweep():
            raise UserError(
                f"{word} is a range without steps; set sweep.trials=N to search it, or list its values"
            )
        key = override.key_or_group
        values[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
    if not any(len(words) > 1 for words in values.values()):
        advice = (
            "set seed=1,2,3, for example (and data.path=[A],[B] for paths and names), or remove -m"
        )
        raise UserError(f"-m needs several values for at least one key; {advice}")
    return [dict(zip(values, words, strict=True)) for words in itertools.product(*values.values())]


def make_jobs(
    sweep: str | None, combinations: list[dict[str, str]], fixed: list[str], config_dir: str | None
) -> tuple[str, list[Job]]:
    """Compose and check the jobs of a sweep. Returns its name and the jobs. Raises UserError.

    sweep: its name. None: from the config, or a new one. fixed: words of all jobs.
    combinations: words of each job, {key: "key=value"}; the job's name lists them, sorted by key.
    """
    names = [",".join(words[key] for key in sorted(words)) for words in combinations]
    names = [re.sub(r"[^A-Za-z0-9._=,+-]", "_", name.replace("'", "")) for name in names]
    for name in names:
        if not JOB.fullmatch(name) or names.count(name) > 1:
            raise UserError(
                f"{name[:60]} would be trained twice or is too long; list each value once, and fewer keys"
            )
    all_words = [[*fixed, *words.values()] for words in combinations]
    configs = [compose_config("train", words, config_dir) for words in all_words]
    for config in configs:
        check(config)
    started: dict[str, str] = {}
    if sweep is None:
        sweep = configs[0].name or make_new_folder(
            SWEEPS, f"{configs[0].data.name}-{configs[0].model.name}"
        )
        started = read_started_jobs(SWEEPS / sweep)
    jobs = []
    for name, words, config in zip(names, all_words, configs, strict=True):
        values = asdict(config)  # the sweep sets two keys: the run's name and its wandb group
        if name not in started.values():
            name = started.get(hash_config(flatten_dict(values)), name)
        values["name"], values["wandb"]["group"] = (
            f"sweeps/{sweep}/{name}",
            config.wandb.group or sweep,
        )
        arguments = ["--config-dir", config_dir] if config_dir else []
        arguments += [word for word in words if not word.startswith(("name=", "wandb.group="))]
        arguments += [f"name={values['name']}", f"wandb.group={values['wandb']['group']}"]
        jobs.append(Job(name, SWEEPS / sweep / name, arguments, values))
    return sweep, jobs
