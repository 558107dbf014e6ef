"""Reads the folders of runs and sweeps, and groups runs with equal configs into settings.

runs/<name>/config.yaml  metrics.jsonl  summary.json
runs/sweeps/<sweep>/sweep.json  <job>/config.yaml ...
"""

import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import UserError
from common.files import parse_yaml, read_file
from common.settings import flatten_dict, format_value
from training.plots import read_curves

IGNORED_SECTIONS = ("seed", "name", "resume", "wandb")  # runs of one setting may differ in these
CHOICES = (
    ".name",
    ".backend",
)  # suffixes of the keys that select a section's values, as in model.name
MAX_DIFFERENCES = 4  # in a label
METRICS = ("train/loss", "val/loss", "step_ms", "tokens_per_second")
# Types of the values that a comparison reads, in summary.json and in the flat config.
NUMBERS = (
    "step",
    "best_val_loss",
    "last_val_loss",
    "last_val_bpb",
    "peak_memory_bytes",
    "flops_per_token",
)
NUMBERS += (
    "score_variance",
    "attention_entropy",
    "attention_distance",
    "train.batch_size",
    "model.block_size",
)
TYPES = {
    "status": str,
    "seed": int,
    "data": str | None,
    "command": str | None,
    "attention": dict | None,
}
TYPES |= {"versions": dict | None} | dict.fromkeys(NUMBERS, int | float | None)
ADVICE = "restore it, or leave that run out"


@dataclass
class Run:
    """A run that train.py has written."""

    folder: Path
    config: dict[str, Any]  # flat: {"model.n_layer": 2}
    seed: int
    summary: dict[str, Any]
    swept: str | None = None  # key=value pairs of a sweep's job, without the seed

    @property
    def status(self) -> str:
        return self.summary["status"]

    @cached_property
    def curves(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """(steps, values) of each key of METRICS. Raises UserError if metrics.jsonl is missing or damaged."""
        return read_file(
            self.folder / "metrics.jsonl",
            lambda rows: read_curves(rows.splitlines(), *METRICS),
            ADVICE,
        )


@dataclass
class Setting:
    """Runs with equal configs and different seeds."""

    runs: list[Run]
    label: str = ""  # "mine: model=gpt2, optimizer.lr=0.003"; in a sweep "model=gpt2"

    @property
    def config(self) -> dict[str, Any]:
        return self.runs[0].config

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.status == "finished"]

    @property
    def status(self) -> str:
        """How the runs ended: "2 finished, 1 failed"; "refused" if all were refused."""
        statuses = [run.status for run in self.runs]
        counts = {
            status: statuses.count(status)
            for status in ("finished", *statuses)
            if status in statuses
        }
        return (
            "refused"
            if set(counts) == {"refused"}
            else ", ".join(f"{n} {status}" for status, n in counts.items())
        )


def read_settings(folders: list[Path]) -> list[Setting]:
    """Read the settings of run folders and sweep folders, in the order of their first runs.

    Skips jobs of a sweep that have not started. Raises UserError for a folder that is not a run and for a damaged file.
    """
    # Skip the folder of an earlier comparison, which `runs/*` also matches.
    folders = [
        folder for folder in folders if is_sweep(folder) or not (folder / "comparison.csv").exists()
    ]
    runs = {run.folder.resolve(): run for folder in folders for run in _read_folder(folder)}
    settings: dict[Any, Setting] = {}
    texts: dict[
        str, str | None
    ] = {}  # prepared data of the last run with a config: its text may have changed
    repeats: Counter = (
        Counter()
    )  # a run repeated with the same seed is compared, in a separate setting
    for run in runs.values():
        config = json.dumps(run.config, sort_keys=True, default=str)
        texts[config] = text = run.summary.get(
            "data", texts.get(config)
        )  # unknown if the run was refused
        settings.setdefault((config, text, repeats[config, run.seed]), Setting([])).runs.append(run)
        repeats[config, run.seed] += 1
    _set_labels(list(settings.values()))
    return list(settings.values())


def is_sweep(folder: Path) -> bool:
    return (folder / "sweep.json").exists()


def _read_folder(folder: Path) -> list[Run]:
    if is_sweep(folder):
        jobs = read_file(
            folder / "sweep.json",
            lambda content: list(map(str, json.loads(content)["jobs"])),
            ADVICE,
        )
        return [
            _read_run(folder / job, job) for job in jobs if (folder / job / "summary.json").exists()
        ]
    if not (folder / "summary.json").exists():
        reason = "is not a run: it has no summary.json" if folder.is_dir() else "does not exist"
        raise UserError(
            f"{folder} {reason}; set folders of runs, as in runs/NAME or runs/sweeps/NAME"
        )
    return [_read_run(folder)]


def _read_run(folder: Path, job: str | None = None) -> Run:
    summary = read_file(folder / "summary.json", lambda content: json.loads(content) | {}, ADVICE)
    config = read_file(
        folder / "config.yaml", lambda content: flatten_dict(parse_yaml(content)), ADVICE
    )
    for key, value_type in TYPES.items():
        if not isinstance(value := (config | summary).get(key), value_type):
            raise UserError(f"{folder} has {key}={format_value(value)}, of a wrong type; {ADVICE}")
    flat = {
        key: value for key, value in config.items() if key.split(".")[0] not in IGNORED_SECTIONS
    }
    flat["world_size"] = summary.get(
        "world_size", 1
    )  # set by torchrun and not in the config, but affects the speed
    pairs = re.split(
        r",(?=[\w.]+=)", job or ""
    )  # a value may be a list with commas: model.window=_16,null_,seed=1
    swept = (
        None if job is None else ", ".join(pair for pair in pairs if not pair.startswith("seed="))
    )
    return Run(folder, flat, config["seed"], summary, swept)


def _set_labels(settings: list[Setting]) -> None:
    """Label each setting with the values that its sweep sets, or with its name and its differences from the others."""
    configs = [setting.config for setting in settings]
    has_one_folder = len({setting.runs[0].folder.resolve().parent for setting in settings}) == 1
    for setting in settings:
        run, folder = setting.runs[0], setting.runs[0].folder.resolve()
        if run.swept is not None:
            sweep = folder.parent.name
            setting.label = (
                run.swept if run.swept and has_one_folder else f"{sweep}/{run.swept}".rstrip("/")
            )
        else:
            differences = _list_differences(run.config, configs)
            if len(differences) > MAX_DIFFERENCES:
                differences[MAX_DIFFERENCES:] = [f"{len(differences) - MAX_DIFFERENCES} more"]
            setting.label = folder.name + (
                f" and {len(setting.runs) - 1} more" if len(setting.runs) > 1 else ""
            )
            setting.label += f": {', '.join(differences)}" if differences else ""


def _list_differences(config: dict, configs: list[dict]) -> list[str]:
    """List key=value of the keys in which `config` differs from others, choices first.

    Keys of a section, such as optimizer.lr, are compared only with configs that have the same choice.
    """
    differences = []
    for key in sorted(config, key=lambda key: not key.endswith(CHOICES)):
        choices = (
            [] if key.endswith(CHOICES) else [key.split(".")[0] + suffix for suffix in CHOICES]
        )
        others = [
            other
            for other in configs
            if all(other.get(choice) == config.get(choice) for choice in choices)
        ]
        if any(other.get(key) != config[key] for other in others):
            differences.append(
                f"{key.removesuffix('.name').removesuffix('.backend')}={format_value(config[key])}"
            )
    return differences
