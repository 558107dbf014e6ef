"""Sweeps: python train.py -m attention=naive,sdpa,flash seed=1,2,3 trains each combination.

All jobs are composed and checked before sweep/ starts the first one. With seed=auto, these are the
jobs of all seeds up to sweep.max_seeds, and sweep/ starts as many as verdicts need.
"""

import hashlib
import itertools
import os
import re
from argparse import Namespace
from dataclasses import asdict, replace
from typing import Any

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, Override, QuotedString, Transformer
from hydra.errors import OverrideParseException

from common.errors import UserError
from common.run_paths import JOB, RUNS, SWEEPS, make_new_folder
from common.settings import flatten_dict, format_value
from configs.compose import compose_config, hydra_loader
from sweep.jobs import Job, identify_config, read_started_jobs
from sweep.launch import run_sweep
from training.presets import choose_preset

# An item of a list without spaces around it. Its commas are in brackets or in quotes.
LIST_ITEM = re.compile(r"""(?:\[[^\]]*\]|'[^']*'|"[^"]*"|[^\s,\['"])+""")


def run_multirun(flags: Namespace) -> int:
    """Train every combination of the values in flags.words.

    Returns the exit code. Raises UserError before anything is written.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError("-m does not work under torchrun, because it starts one process per run")
    if flags.cfg:
        raise UserError("--cfg describes one run; remove -m, and set single values")
    launcher = compose_launcher(flags.launcher_words)
    jobs = make_jobs(flags.words, flags.config_dir)
    return run_sweep(jobs, launcher, stops_early=has_automatic_seeds(flags.words))


def has_automatic_seeds(words: list[str]) -> bool:
    """Whether the last word for the seed is seed=auto."""
    return [word for word in words if word.startswith("seed=")][-1:] == ["seed=auto"]


def compose_launcher(words: list[str]) -> Any:
    """Compose Hydra's own config for a launcher; None without words.

    Files of --config-dir are not read, because they could set the code that launches.
    """
    if not words:
        return None
    with hydra_loader():
        return compose(overrides=[*words, "hydra.job.name=train"], return_hydra_config=True)


def list_values(words: list[str]) -> dict[str, list[str]]:
    """List the values of each key, in Hydra's syntax for sweeps.

    A comma separates values, except in brackets and quotes. A single value is used as typed.
    """
    values = {}
    with hydra_loader() as loader:
        parser = OverridesParser.create(loader)
        for word in words:
            key, _, value = word.partition("=")
            values[key] = [value]
            try:
                (override,) = parser.parse_overrides([word])
            except OverrideParseException:  # such as text with parentheses or in Chinese
                if key in ("data.path", "data.val_path") and not value.startswith("["):
                    values[key] = [path.strip() for path in value.split(",")]
                continue
            if override.is_discrete_sweep():
                values[key] = split_values(value, override)
    return values


def split_values(text: str, override: Override) -> list[str]:
    """The values of a sweep. Those of a list as typed: 1e-3,true stays 1e-3 and true.

    override: the text, as parsed by Hydra. It may have functions, as in range(1,4).
    """
    sweep = override.value()
    if isinstance(sweep, ChoiceSweep) and sweep.simple_form:
        words = LIST_ITEM.findall(text)
        if len(words) == len(sweep.list):
            return [
                value.text if isinstance(value, QuotedString) else word
                for value, word in zip(sweep.list, words, strict=True)
            ]
    return list(override.sweep_iterator(format_swept_value))


def format_swept_value(value: Any) -> str:
    """A value of a sweep as text, without quotes around it."""
    return value.text if isinstance(value, QuotedString) else str(Transformer.encode(value))


def make_jobs(words: list[str], config_dir: str | None) -> list[Job]:
    """Compose and check the jobs of a sweep. Raises UserError before anything is written.

    words: of the command line. At least one key has several values. The seed changes slowest, and
    every second seed has the reverse order, so that a machine that becomes slower affects all
    settings equally.
    """
    values = list_values(words)
    swept = sorted(key for key in values if len(values[key]) > 1)
    if not swept:
        advice = "list some, as in model.n_layer=2,4 or seed=1,2,3, or remove -m"
        raise UserError(f"-m needs several values for at least one key; {advice}")
    if has_automatic_seeds(words):
        values["seed"] = ["1"]
        swept = sorted([*swept, "seed"])
    keys = sorted(values, key=lambda key: key != "seed")
    products = itertools.product(*(values[key] for key in keys))
    combinations = [dict(zip(keys, product, strict=True)) for product in products]
    all_words = [list_words(texts) for texts in combinations]
    composed = [compose_config("train", job, config_dir) for job in all_words]
    if any(config.plan for config in composed):
        raise UserError("plan=true describes one run; remove -m, and set single values")
    configs = [choose_preset(config) for config in composed]  # measures the speed once
    if has_automatic_seeds(words):
        seeds = range(1, configs[0].sweep.max_seeds + 1)
        configs = [replace(config, seed=seed) for seed in seeds for config in configs]
        combinations = [texts | {"seed": str(seed)} for seed in seeds for texts in combinations]
    names = name_jobs([{key: texts[key] for key in swept} for texts in combinations])
    if len(set(names)) < len(names):
        raise UserError(f"{max(names, key=names.count)} would be trained twice; list it once")
    label = f"{configs[0].data.label}-{configs[0].model.name}"
    sweep = configs[0].name or make_new_folder(SWEEPS, label)
    if (RUNS / sweep / "config.yaml").exists():  # preset=auto would be the preset of this run
        raise UserError(f"{RUNS / sweep} is a run; set another name for the sweep")
    started = read_started_jobs(SWEEPS / sweep)
    jobs = []
    for name, texts, config in zip(names, combinations, configs, strict=True):
        settings = asdict(config)
        # A job that an earlier command has started keeps its name
        name = started.get(identify_config(flatten_dict(settings)), name)
        settings["name"] = f"sweeps/{sweep}/{name}"
        arguments = [
            *list_words(texts),
            f"name={settings['name']}",
            f"preset={format_value(config.preset)}",  # auto would measure the speed again
        ]
        if config_dir:
            arguments = ["--config-dir", config_dir, *arguments]
        jobs.append(Job(name, SWEEPS / sweep / name, arguments, settings))
    num_settings = len(jobs) // len({job.config["seed"] for job in jobs})
    for start in range(num_settings, len(jobs), 2 * num_settings):
        jobs_of_seed = slice(start, start + num_settings)
        jobs[jobs_of_seed] = reversed(jobs[jobs_of_seed])
    return jobs


def list_words(texts: dict[str, str]) -> list[str]:
    return [f"{key}={text}" for key, text in texts.items()]


def name_jobs(combinations: list[dict[str, str]]) -> list[str]:
    """Name jobs by their swept values. Equal names of different values get a hash."""
    jobs = [(name_job(values), repr(values)) for values in combinations]
    last = dict(jobs)
    ambiguous = {name for name, text in jobs if text != last[name]}
    names = []
    for name, text in jobs:
        if name in ambiguous:
            name += f"-{hashlib.sha256(text.encode()).hexdigest()[:6]}"
        names.append(name)
    return names


def name_job(values: dict[str, str]) -> str:
    """Name a job by its swept values: attention=naive,seed=1. Raises UserError."""
    name = ",".join(f"{key}={value}" for key, value in values.items()).replace('"', "")
    name = re.sub(r"[^A-Za-z0-9._=,+-]", "_", name)
    if not JOB.fullmatch(name):
        raise UserError(f"{name[:60]}... is too long for the name of a run; sweep fewer keys")
    return name
