"""Reads the folders of runs and sweeps, and groups runs of the same config into settings.

runs/<name>/config.yaml  metrics.jsonl  summary.json
runs/sweeps/<sweep>/sweep.json  <job>/config.yaml ...
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import yaml
from filelock import FileLock

from common.errors import UserError, format_value
from common.metrics_file import read_curves
from common.run_dir import flatten_dict

NOT_STARTED, KILLED = "not started", "killed"
IGNORED_SECTIONS = ("seed", "name", "resume", "wandb")  # runs of one setting may differ in these
CHOICES = (".name", ".backend")  # ends of the keys that choose a section's values, as in model.name
MAX_DIFFERENCES = 4  # in a label
METRICS = ("train/loss", "val/loss", "step_ms", "tokens_per_second", "peak_memory_bytes")  # that are compared


@dataclass
class Run:
    """The folder of a run. config is flat ("model.n_layer"); config and seed are None if a job has not started."""

    folder: Path
    config: dict[str, Any] | None
    seed: int | None
    summary: dict[str, Any]
    job: tuple[str, ...] | None = None  # in a sweep: key=value of its name, except the seed

    @property
    def status(self) -> str:
        return self.summary["status"]

    @cached_property
    def curves(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """{key: (steps, values)} of METRICS. Raises UserError if metrics.jsonl is missing or damaged."""
        return _read(self.folder / "metrics.jsonl", lambda file: read_curves(file, *METRICS))


@dataclass
class Setting:
    """Runs with equal configs, up to the seed and the name. Statistics use the finished runs."""

    runs: list[Run] = field(default_factory=list)
    label: str = ""  # name and differences: "mine: model=gpt2, optimizer.lr=0.003"; in a sweep its swept values

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.status == "finished"]

    @property
    def config(self) -> dict[str, Any] | None:
        return next((run.config for run in self.runs if run.config is not None), None)

    @property
    def status(self) -> str:
        """How the runs ended: "2 finished, 1 failed"; one word if all were refused or have not started."""
        statuses = [run.status for run in self.runs]
        counts = {status: statuses.count(status) for status in ("finished", *statuses) if status in statuses}
        if list(counts) in (["refused"], [NOT_STARTED]):
            return statuses[0]
        return ", ".join(f"{count} {status}" for status, count in counts.items())


def read_settings(folders: list[Path]) -> list[Setting]:
    """Read run folders and sweep folders -> their settings, in the order of their first runs.

    Raises UserError for a folder that is neither a run nor a sweep, and for a damaged file.
    """
    # Skip the folder of an earlier comparison, which `runs/*` also matches.
    folders = [folder for folder in map(Path, folders) if is_sweep(folder) or not (folder / "comparison.csv").exists()]
    runs = {run.folder.resolve(): run for folder in folders for run in _read_folder(folder)}
    # A job that has not started has no config. Its setting is that of the jobs that differ from it only in the seed.
    configs = {(run.folder.parent, run.job): _config_key(run) for run in runs.values() if run.config is not None}
    settings: dict[Any, Setting] = {}
    for run in runs.values():
        job = run.folder.parent, run.job
        key = configs.get(job, job) if run.config is None else _config_key(run)
        settings.setdefault(key, Setting()).runs.append(run)
    _set_labels(list(settings.values()))
    return list(settings.values())


def is_sweep(folder: Path) -> bool:
    return (folder / "sweep.json").exists()


def _read_folder(folder: Path) -> list[Run]:
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist; set folders of runs, as in runs/NAME or runs/sweeps/NAME")
    if not is_sweep(folder):
        return [_read_run(folder)]
    jobs = _read(folder / "sweep.json", lambda file: list(json.load(file)["jobs"]))
    return [_read_run(folder / job, job) for job in jobs]


def _read_run(folder: Path, job_name: str | None = None) -> Run:
    """Read a run, or a job of a sweep. A job without a summary has not started."""
    job = None
    if job_name is not None:
        job = tuple(word for word in re.split(r",(?=[\w.]+=)", job_name) if not word.startswith("seed="))
    if not (folder / "summary.json").exists():
        if job is None:
            raise UserError(f"{folder} is not a run: it has no summary.json; set folders such as runs/NAME")
        return Run(folder, None, None, {"status": NOT_STARTED, "error": None}, job)
    summary = _read(folder / "summary.json", json.load, "status")
    if summary["status"] == "running" and not _is_locked(folder):
        summary["status"] = KILLED
    config = _read(folder / "config.yaml", yaml.safe_load, "seed")
    flat = {key: value for key, value in flatten_dict(config).items() if key.split(".")[0] not in IGNORED_SECTIONS}
    flat["world_size"] = summary.get("world_size", 1)  # set by torchrun and not in the config, but affects the speed
    return Run(folder, flat, config["seed"], summary, job)


def _is_locked(folder: Path) -> bool:
    """Whether a process trains the run. The system releases the lock of a process that is killed."""
    if not (folder / ".lock").exists():  # a copy of a run folder
        return False
    try:
        with FileLock(folder / ".lock", timeout=0):
            return False
    except OSError:  # locked, or a folder of another user
        return True


def _read(path: Path, parse: Callable[[IO[bytes]], Any], *required_keys: str) -> Any:
    """Parse a file. Raises UserError if the file is missing or damaged, or lacks a required key."""
    try:
        with open(path, "rb") as file:
            content = parse(file)
        if all(key in content for key in required_keys):
            return content
    except FileNotFoundError:
        raise UserError(f"{path} is missing; train that run again, or leave it out") from None
    except (ValueError, KeyError, TypeError, yaml.YAMLError):  # ValueError: bad JSON or UTF-8
        pass
    raise UserError(f"{path} is damaged; train that run again, or leave it out")


def _config_key(run: Run) -> str:
    return json.dumps(run.config, sort_keys=True, default=str)


def _set_labels(settings: list[Setting]) -> None:
    """Label each setting with its name and its differences from the others; in a sweep, with the swept values."""
    configs = [setting.config for setting in settings if setting.config is not None]
    has_one_folder = len({setting.runs[0].folder.resolve().parent for setting in settings}) == 1
    for setting in settings:
        run, folder = setting.runs[0], setting.runs[0].folder.resolve()
        if run.job is not None:
            values = ", ".join(_restore_value(word, setting.config or {}) for word in run.job)
            setting.label = values if values and has_one_folder else f"{folder.parent.name}/{values}".rstrip("/")
        else:
            words = _list_differences(setting.config or {}, configs)
            if len(words) > MAX_DIFFERENCES:
                words[MAX_DIFFERENCES:] = [f"{len(words) - MAX_DIFFERENCES} more"]
            setting.label = folder.name + (f" and {len(setting.runs) - 1} more" if len(setting.runs) > 1 else "")
            setting.label += f": {', '.join(words)}" if words else ""


def _restore_value(word: str, config: dict) -> str:
    """key=value with the value in the config: a job's name has "_" for characters that folder names do not allow."""
    key = word.partition("=")[0]
    return f"{key}={format_value(config[key])}" if key in config else word


def _list_differences(config: dict, configs: list[dict]) -> list[str]:
    """key=value of the keys in which `config` differs from others, choices first.

    The other keys of a section, such as optimizer.lr, count only among configs with the same choice.
    """
    words = []
    for key in sorted(config, key=lambda key: not key.endswith(CHOICES)):
        choices = [] if key.endswith(CHOICES) else [key.split(".")[0] + end for end in CHOICES]
        others = [other for other in configs if all(other.get(choice) == config.get(choice) for choice in choices)]
        if any(other.get(key) != config[key] for other in others):
            words.append(f"{key.removesuffix('.name').removesuffix('.backend')}={format_value(config[key])}")
    return words
