"""Sweeps: python train.py -m attention=naive,sdpa,flash seed=1,2,3 trains each combination of the values.

All jobs are composed and checked before the first job starts. compare/sweep then launches them. With sweep.trials=N,
compare/sweep/search.py suggests the values instead.
"""

import itertools
import os
import re
from argparse import Namespace
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from hydra import compose
from hydra.errors import HydraException

from common.errors import UserError
from common.run_dir import JOB, SWEEPS, make_new_folder
from common.settings import check
from compare.sweep.jobs import Job
from compare.sweep.launch import run_sweep
from compare.sweep.search import make_distribution, run_search
from configs.compose import compose_config, hydra_initialized, list_groups, parse_word
from configs.error_messages import did_you_mean, explain_error
from configs.schema import key_types

LAUNCHERS = ("submitit_slurm", "submitit_local")


def run_multirun(flags: Namespace) -> int:
    """Train every combination of the values in flags.words. Returns the exit code of compare.sweep.launch.run_sweep."""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("-m starts one process per run and does not work under torchrun; use one of the two")
    if flags.cfg:
        raise UserError("--cfg shows the config of one run; remove -m, and set one value for each key")
    with hydra_initialized(flags.config_dir):
        if any(word.startswith("sweep.") for word in flags.words):
            return _run_search(flags)
        combinations = list_combinations(flags.words)
        job_names = name_jobs(combinations)
        words = [
            [word for word in flags.words if word.split("=", 1)[0] not in combination] + list(combination.values())
            for combination in combinations
        ]
        configs = [_compose_job(job_words, flags.config_dir) for job_words in words]
        launcher_config = _compose_launcher(flags.launcher_words)
        first = configs[0]
        sweep = first.name or make_new_folder(SWEEPS, f"{first.data.label}-{first.model.name}")
        jobs = [_make_job(sweep, *job, flags) for job in zip(job_names, configs, words, strict=True)]
        return run_sweep(sweep, jobs, launcher_config)


def _run_search(flags: Namespace) -> int:
    """Search over the keys that have several values; each trial is trained with all values of seed."""
    search_words = [word for word in flags.words if word.startswith("sweep.")]
    n_trials = re.fullmatch(r"sweep\.trials=([1-9]\d{0,5})", " ".join(search_words))
    if n_trials is None:
        raise UserError(f"{' '.join(search_words)}: set sweep.trials=N once, with N of 1 or more")
    if flags.launcher_words:
        raise UserError(f"{flags.launcher_words[0]}: a search trains one run after another; remove this setting")
    parsed = {word: parse_word("train", word) for word in flags.words if word not in search_words}
    swept = {word.split("=", 1)[0]: word for word, override in parsed.items() if override.is_sweep_override()}
    _check_given_once(flags.words, swept)
    fixed = [word for word in parsed if word not in swept.values()]
    seeds = parsed[swept.pop("seed")] if "seed" in swept else None
    if not swept or (seeds is not None and not seeds.is_discrete_sweep()):
        raise UserError("sweep.trials searches over ranges of keys other than seed; set optimizer.lr=log(1e-4,1e-2)")
    seed_words = [f"seed={seed}" for seed in seeds.sweep_string_iterator()] if seeds is not None else []
    types = key_types("train")
    space = {}
    for key, word in swept.items():
        if key not in (*types, *list_groups("train")) and not key.startswith("data.mix."):
            raise UserError(f"{key}: there is no such key{did_you_mean(key, types)}; see --help and --cfg job")
        space[key] = make_distribution(word, parsed[word], types.get(key) in (int, int | None))
    if all("." in key for key in swept):  # invalid fixed words are reported once; groups can change which keys exist
        compose_config("train", fixed, flags.config_dir)
    named = [word.removeprefix("name=") for word in fixed if word.startswith("name=")]
    sweep = named[-1] if named else make_new_folder(SWEEPS, "search")

    def make_jobs(values: dict[str, str]) -> list[Job]:
        words = {key: f"{key}={value}" for key, value in values.items()}
        combinations = [words | {"seed": word} for word in seed_words] or [words]
        names, jobs = name_jobs(combinations), []
        for name, combination in zip(names, combinations, strict=True):
            job_words = [*fixed, *combination.values()]
            jobs.append(_make_job(sweep, name, _compose_job(job_words, flags.config_dir), job_words, flags))
        return jobs

    common = ["--config-dir", flags.config_dir] if flags.config_dir else []
    common += [word for word in fixed if not word.startswith("name=")] + seed_words[:1]
    return run_search(sweep, space, make_jobs, int(n_trials[1]), common)


def _check_given_once(words: list[str], keys: Iterable[str]) -> None:
    for key in keys:
        if sum(word.startswith(f"{key}=") for word in words) > 1:
            raise UserError(f"{key} is given twice; list all of its values at once, as in {key}=A,B")


def list_combinations(words: list[str]) -> list[dict[str, str]]:
    """List every combination of the keys that have several values: [{key: "key=value"}, ...].

    The last key changes fastest and the seed slowest, so that changes in the machine's speed affect all settings
    equally. Raises UserError if no key has several values, or if one of these keys is given twice.
    """
    parsed = [parse_word("train", word) for word in words]
    for word, override in zip(words, parsed, strict=True):
        if override.is_interval_sweep():
            raise UserError(f"{word} is a range without steps; set sweep.trials=N to search it, or list its values")
    swept = {
        override.key_or_group: [f"{override.key_or_group}={value}" for value in override.sweep_string_iterator()]
        for override in parsed
        if override.is_discrete_sweep()
    }
    if not any(len(values) > 1 for values in swept.values()):
        raise UserError("-m needs several values for at least one key; set seed=1,2,3, for example, or remove -m")
    _check_given_once(words, swept)
    swept = dict(sorted(swept.items(), key=lambda item: item[0] != "seed"))
    return [dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]


def name_jobs(combinations: list[dict[str, str]]) -> list[str]:
    """Name the jobs after their values, sorted by key, so that the order of the words does not matter."""
    names = [",".join(values[key] for key in sorted(values)) for values in combinations]
    names = [re.sub(r"[^A-Za-z0-9._=,+-]", "_", name.replace("'", "")) for name in names]
    for name in names:
        if not JOB.fullmatch(name):
            raise UserError(f"{name[:60]}... is too long for the name of a folder; sweep over fewer keys at once")
        if names.count(name) > 1:
            raise UserError(f"{name} would be trained twice; list each value once")
    return names


def _compose_job(words: list[str], config_dir: str | None) -> Any:
    config = compose_config("train", words, config_dir)
    check(config)
    if config.plan:
        raise UserError("plan=true describes one run; remove -m, and set one value for each key")
    if config.name is not None and "/" in config.name:
        raise UserError(f"name={config.name} is one run of a sweep; remove -m, or set the name of the sweep")
    return config


def _make_job(sweep: str, name: str, config: Any, words: list[str], flags: Namespace) -> Job:
    """Make a job with its command line. The sweep sets two keys: the run's name and its wandb group."""
    values = asdict(config)
    values["name"], values["wandb"]["group"] = f"sweeps/{sweep}/{name}", config.wandb.group or sweep
    words = [word for word in words if not word.startswith(("name=", "wandb.group="))]
    words += [f"name={values['name']}", f"wandb.group={values['wandb']['group']}"]
    words = ["--config-dir", flags.config_dir, *words] if flags.config_dir else words
    return Job(name, SWEEPS / sweep / name, words, values)


def _compose_launcher(words: list[str]) -> Any:
    """Compose Hydra's own config, with the launcher that `words` set; None if they set none.

    Files of --config-dir are not part of it, because a launcher's config contains the code to run (_target_).
    """
    if not words:
        return None
    try:
        config = compose("train", overrides=[*words, "hydra.job.name=train"], return_hydra_config=True)
    except HydraException as error:
        sentence = f"{explain_error('train', error)}; hydra/launcher=NAME chooses a launcher that is installed"
        raise UserError(sentence) from None
    launcher = config.hydra.runtime.choices["hydra/launcher"]
    if launcher not in LAUNCHERS:
        raise UserError(f"hydra/launcher={launcher} is not supported; set {' or '.join(LAUNCHERS)}, or remove it")
    return config
