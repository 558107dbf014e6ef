"""Reads the folders of runs and sweeps, and groups runs of the same config into settings.

runs/<name>/config.yaml  metrics.jsonl  summary.json
runs/sweeps/<sweep>/sweep.json  <job>/config.yaml ...
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from common.errors import UserError, format_value
from common.run_dir import flatten_dict

NOT_STARTED = "not started"
STATUSES = ("finished", "failed", "refused", "interrupted", "running", NOT_STARTED)
IGNORED_SECTIONS = ("seed", "name", "resume", "wandb")  # runs of one setting may differ in these
# The key that names the choice of a section. Labels compare the keys of a section only between equal choices.
CHOICE_KEYS = {section: f"{section}.name" for section in ("model", "optimizer", "tokenizer", "data", "schedule")}
CHOICE_KEYS["attention"] = "attention.backend"
MAX_DIFFERENCES = 4  # in a label


@dataclass
class Run:
    """The folder of a run. config is flat ("model.n_layer"); config and seed are None if a job has not started."""

    folder: Path
    config: dict[str, Any] | None
    seed: int | None
    summary: dict[str, Any]
    job: tuple[str, ...] | None = None  # in a sweep: the values of the swept keys except the seed, as key=value

    @property
    def status(self) -> str:
        return self.summary["status"]

    @cached_property
    def _rows(self) -> list[dict]:
        """metrics.jsonl. Raises UserError if the file is missing or damaged."""
        path = self.folder / "metrics.jsonl"
        rows = _read(path, lambda text: [json.loads(line) for line in text.splitlines()])
        if not all(isinstance(row, dict) and isinstance(row.get("step"), int) for row in rows):
            raise UserError(f"{path} has rows without a step; train that run again, or leave it out")
        return rows

    def curve(self, key: str) -> dict[int, float]:
        """{step: value} of a metric, for the steps that logged a finite value."""
        return {row["step"]: row[key] for row in self._rows if row.get(key) is not None}


@dataclass
class Setting:
    """Runs with equal configs, up to the seed and the name. Statistics use the finished runs."""

    runs: list[Run] = field(default_factory=list)
    label: str = ""  # name and differences: "mine: model=gpt2, optimizer.lr=0.003"; in a sweep only the differences
    short_label: str = ""  # for plots: the name; in a sweep the differences

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
        known = [status for status in dict.fromkeys((*STATUSES, *statuses)) if status in statuses]
        if known in (["refused"], [NOT_STARTED]):
            return known[0]
        return ", ".join(f"{statuses.count(status)} {status}" for status in known)


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
    path = folder / "sweep.json"
    jobs = _read(path, lambda text: json.loads(text)["jobs"])
    if not isinstance(jobs, list) or not all(isinstance(job, str) for job in jobs):
        raise UserError(f'{path} has no list of "jobs"; start the sweep again, or set the folders of its runs')
    return [_read_run(folder / job, job) for job in jobs]


def _read_run(folder: Path, job_name: str | None = None) -> Run:
    """Read a run, or a job of a sweep. A job without a summary has not started."""
    job = None
    if job_name is not None:
        job = tuple(word for word in job_name.split(",") if not word.startswith("seed="))
    if not (folder / "summary.json").exists():
        if job is None:
            raise UserError(f"{folder} is not a run: it has no summary.json; set folders such as runs/NAME")
        return Run(folder, None, None, {"status": NOT_STARTED, "error": None}, job)
    summary = _read(folder / "summary.json", json.loads)
    if not isinstance(summary, dict) or not isinstance(summary.get("status"), str):
        raise UserError(f"{folder / 'summary.json'} has no status; train that run again, or leave it out")
    config = _read(folder / "config.yaml", yaml.safe_load)
    if not isinstance(config, dict) or "seed" not in config:
        raise UserError(f"{folder / 'config.yaml'} is not the config of a run; train it again, or leave it out")
    flat = {key: value for key, value in flatten_dict(config).items() if key.split(".")[0] not in IGNORED_SECTIONS}
    flat["world_size"] = summary.get("world_size", 1)  # set by torchrun and not in the config, but affects the speed
    return Run(folder, flat, config["seed"], summary, job)


def _read(path: Path, parse: Callable[[str], Any]) -> Any:
    """Parse the text of a file. Raises UserError if the file is missing or damaged."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing; train that run again, or leave it out") from None
    except (ValueError, KeyError, TypeError, yaml.YAMLError):  # ValueError: bad JSON or UTF-8
        raise UserError(f"{path} is damaged; train that run again, or leave it out") from None


def _config_key(run: Run) -> str:
    return json.dumps(run.config, sort_keys=True, default=str)


def _set_labels(settings: list[Setting]) -> None:
    """Label each setting with its name and the keys in which it differs from the others, choices of sections first."""
    configs = [setting.config for setting in settings if setting.config is not None]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    keys.sort(key=lambda key: key not in CHOICE_KEYS.values())
    for setting in settings:
        config, job, folder = setting.config, setting.runs[0].job, setting.runs[0].folder.resolve()
        differing = [] if config is None else [key for key in keys if _distinguishes(key, config, configs)]
        words = [
            f"{key.removesuffix('.name').removesuffix('.backend')}={_describe_value(config, key)}" for key in differing
        ]
        if job and (not words or len(words) > MAX_DIFFERENCES):
            words = list(job)
        if job is None and len(words) > MAX_DIFFERENCES:  # unrelated runs, which differ in many keys
            words = [*words[: MAX_DIFFERENCES - 1], f"{len(words) - MAX_DIFFERENCES + 1} more"]
        differences = ", ".join(words)
        if job is not None:
            setting.short_label = differences or (folder.name if len(setting.runs) == 1 else "all")
            setting.label = setting.short_label
        else:
            more = f" and {len(setting.runs) - 1} more" if len(setting.runs) > 1 else ""
            setting.short_label = folder.name + more
            setting.label = f"{setting.short_label}: {differences}" if differences else setting.short_label


def _distinguishes(key: str, config: dict, configs: list[dict]) -> bool:
    """Whether configs with the same choice in the key's section differ in `key`."""
    choice = CHOICE_KEYS.get(key.split(".")[0])
    if choice not in (None, key):
        configs = [other for other in configs if other.get(choice) == config.get(choice)]
    return len({_describe_value(other, key) for other in configs}) > 1


def _describe_value(config: dict, key: str) -> str:
    return format_value(config[key]) if key in config else "(none)"  # runs of an older version lack newer keys
