"""Reads the folders of runs and sweeps, and groups runs with equal configs into settings.

runs/<name>/config.yaml  metrics.jsonl  summary.json
runs/sweeps/<sweep>/sweep.json  <job>/config.yaml ...
"""

import re
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import parse_yaml, read_file, read_json
from common.settings import flatten_dict, format_value
from training.run_folder import read_curves

IGNORED_SECTIONS = ("seed", "name", "resume", "wandb")  # runs of one setting may differ in these
# Suffixes of the keys that select the values of a section, as model.name and attention.backend do.
CHOICES = (".name", ".backend")
METRICS = ("train/loss", "val/loss", "step_ms", "tokens_per_second", "sample_tokens_per_second")
WARMUP_STEPS = 5  # step times exclude the first steps of a run
NUMBERS = (
    "step",
    "best_val_loss",
    "last_val_loss",
    "last_val_bpb",
    "peak_memory_bytes",
    "flops_per_token",
    "kv_cache_bytes_per_token",
    "score_variance",
    "attention_entropy",
    "attention_distance",
    "train.batch_size",
    "model.block_size",
)
# Types of the values that a comparison reads, in summary.json and in the flat config.
TYPES = dict.fromkeys(NUMBERS, int | float | None) | {
    "status": str,
    "seed": int,
    "data": str | None,
    "command": str | None,
    "attention": dict | None,
    "versions": dict | None,
}
WHAT_TO_SET = "set folders of runs, as in runs/NAME or runs/sweeps/NAME"
ADVICE = "restore it, or leave that run out"


@dataclass
class Run:
    """A run that train.py has written."""

    folder: Path
    config: dict[str, Any]  # flat: {"model.n_layer": 2}, without IGNORED_SECTIONS
    seed: int
    summary: dict[str, Any]
    swept: str | None  # key=value pairs of a sweep's job, without the seed

    @property
    def status(self) -> str:
        return self.summary["status"]

    @property
    def data(self) -> str | None:
        """Folder of the prepared data. None if the run ended before it read any."""
        return self.summary.get("data")

    @cached_property
    def curves(self) -> dict[str, dict[int, float]]:
        """The values of each key of METRICS by step. Raises UserError for a damaged file."""
        path = self.folder / "metrics.jsonl"
        return read_file(path, lambda content: read_curves(content, *METRICS), ADVICE)

    def after_warmup(self, key: str) -> list[float]:
        """The values of a key of METRICS, without those of the first steps."""
        return [value for step, value in self.curves[key].items() if step > WARMUP_STEPS]


@dataclass
class Setting:
    """Runs with equal configs and data, and different seeds."""

    runs: list[Run]
    label: str = ""  # "mine: model=gpt2, optimizer.lr=0.003"; in a sweep "model=gpt2"

    @property
    def config(self) -> dict[str, Any]:
        return self.runs[0].config

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.status == "finished"]

    def after_warmup(self, key: str) -> list[float]:
        """The values of a key of METRICS in all finished runs, without the first steps of each."""
        return [value for run in self.finished for value in run.after_warmup(key)]

    @property
    def status(self) -> str:
        """How the runs ended: "2 finished, 1 failed"; "refused" if all were refused."""
        counts = Counter(run.status for run in self.runs)
        if list(counts) == ["refused"]:
            return "refused"
        return ", ".join(f"{count} {status}" for status, count in counts.items())

    def accepts(self, run: Run) -> bool:
        """Whether the run has the config of the others, no other data, and another seed."""
        data = {other.data for other in [*self.runs, run]} - {None}
        seeds = [other.seed for other in self.runs]
        return run.config == self.config and len(data) <= 1 and run.seed not in seeds


def read_settings(folders: list[Path]) -> list[Setting]:
    """Read the settings of run folders and sweep folders, in the order of their first runs.

    A run that repeats an earlier one, with the same config, data and seed, is another setting.
    Raises UserError if there is no run, for a folder that is not a run, and for a damaged file.
    """
    settings: list[Setting] = []
    for run in [run for folder in folders for run in _read_folder(folder)]:
        for setting in settings:
            if setting.accepts(run):
                setting.runs.append(run)
                break
        else:
            settings.append(Setting([run]))
    if not settings:
        raise UserError(f"there is no run to compare; {WHAT_TO_SET}")
    _set_labels(settings)
    return settings


def is_sweep(folder: Path) -> bool:
    return (folder / "sweep.json").exists()


def _read_folder(folder: Path) -> list[Run]:
    """Read a run, or the runs of a sweep that have started."""
    if is_sweep(folder):
        jobs = map(str, read_json(folder / "sweep.json").get("jobs") or [])
        started = [job for job in jobs if (folder / job / "summary.json").exists()]
        return [_read_run(folder / job, job) for job in started]
    if not (folder / "summary.json").exists():
        reason = f"{folder / 'summary.json'} does not exist"
        raise UserError(f"{folder} is not a run: {reason}; {WHAT_TO_SET}")
    return [_read_run(folder)]


def _read_run(folder: Path, job: str | None = None) -> Run:
    """Read a run. job: its name, if it belongs to a sweep."""
    summary = read_json(folder / "summary.json")
    config = read_file(folder / "config.yaml", _parse_config, ADVICE)
    for key, value_type in TYPES.items():
        value = (config | summary).get(key)
        if not isinstance(value, value_type):
            raise UserError(f"{folder} has {key}={format_value(value)}, of a wrong type; {ADVICE}")
    seed = config["seed"]
    for key in list(config):
        if key.split(".")[0] in IGNORED_SECTIONS:
            del config[key]
    # torchrun sets the number of processes. It is not in the config, but it affects the speed.
    config["world_size"] = summary.get("world_size", 1)
    return Run(folder, config, seed, summary, None if job is None else _list_swept(job))


def _list_swept(job: str) -> str:
    """List the values that a sweep sets, from the name of a job: "attention=flash, n_layer=2"."""
    # A value may be a list with commas: model.window=_16,null_,seed=1.
    words = re.split(r",(?=[\w.]+=)", job)
    return ", ".join(word for word in words if not word.startswith("seed="))


def _parse_config(content: bytes) -> dict:
    return flatten_dict(parse_yaml(content))


def _set_labels(settings: list[Setting]) -> None:
    """Label each setting with the values that its sweep sets, or with the name of its first run and
    its differences from the other settings."""
    configs = [setting.config for setting in settings]
    parents = {setting.runs[0].folder.resolve().parent for setting in settings}
    for setting in settings:
        run = setting.runs[0]
        folder = run.folder.resolve()
        if run.swept is None:
            differences = ", ".join(_list_differences(run.config, configs))
            setting.label = f"{folder.name}: {differences}".removesuffix(": ")
        elif run.swept and len(parents) == 1:
            setting.label = run.swept
        else:
            setting.label = f"{folder.parent.name}/{run.swept}".removesuffix("/")


def _list_differences(config: dict, configs: list[dict]) -> list[str]:
    """List key=value of the keys in which `config` differs from others, choices first.

    Keys of a section, such as optimizer.lr, are compared only with configs that have the same
    choice, such as optimizer.name.
    """
    differences = []
    for key in sorted(config, key=lambda key: not key.endswith(CHOICES)):
        choices = []
        if not key.endswith(CHOICES):
            choices = [key.split(".")[0] + suffix for suffix in CHOICES]
        for other in configs:
            has_same_choice = all(other.get(choice) == config.get(choice) for choice in choices)
            if has_same_choice and other.get(key) != config[key]:
                name = key.removesuffix(".name").removesuffix(".backend")
                differences.append(f"{name}={format_value(config[key])}")
                break
    return differences
