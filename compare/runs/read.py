"""Run folders and sweep folders as they lie on the disk, put together into settings.

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

NOT_STARTED = "not started"
NOT_A_SETTING = ("seed", "name", "resume", "wandb")  # keys and sections in which runs of one setting may differ
# Where a section's own name stands: it says all that differs within the section by its being that choice.
NAMES = {section: f"{section}.name" for section in ("model", "optimizer", "tokenizer", "data", "schedule")}
NAMES["attention"] = "attention.backend"


@dataclass
class Run:
    """A run's folder, read. config is flat ("model.n_layer"); it and seed are None where a job was never started."""

    folder: Path
    config: dict[str, Any] | None
    seed: int | None
    summary: dict[str, Any]
    job: tuple[str, ...] = ()  # what the sweep varied, without the seed: ("attention=x", "optimizer.lr=0.01")

    @property
    def status(self) -> str:
        return self.summary["status"]

    @cached_property
    def _rows(self) -> list[dict]:
        """metrics.jsonl. Raises UserError where it is missing or damaged."""
        path = self.folder / "metrics.jsonl"
        rows = _read(path, lambda text: [json.loads(line) for line in text.splitlines()])
        if not all(isinstance(row, dict) and isinstance(row.get("step"), int) for row in rows):
            raise UserError(f"{path} has rows without a step; train that run again, or leave it out")
        return rows

    def curve(self, key: str) -> dict[int, float]:
        """{step: value} of a metric, where it was logged and finite."""
        return {row["step"]: row[key] for row in self._rows if row.get(key) is not None}


@dataclass
class Setting:
    """Runs whose configs are equal up to seed and name. Only the finished ones count in a figure."""

    label: str
    runs: list[Run] = field(default_factory=list)

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.status == "finished"]

    @property
    def status(self) -> str:
        """How its runs ended: "2 finished, 1 failed"; only "refused" where that befell all of them."""
        kinds = [run.status for run in self.runs]
        known = ("finished", "failed", "refused", "interrupted", "running", NOT_STARTED)
        counts = {kind: kinds.count(kind) for kind in dict.fromkeys((*known, *kinds)) if kind in kinds}
        if set(counts) <= {"refused"} or set(counts) <= {NOT_STARTED}:
            return next(iter(counts))
        return ", ".join(f"{count} {kind}" for kind, count in counts.items())


def read_settings(folders: list[Path]) -> list[Setting]:
    """The runs of run folders and sweep folders, by setting, in the order in which these first appear.

    Raises UserError for a folder that is neither, and for a damaged file.
    """
    folders = [folder for folder in map(Path, folders) if is_sweep(folder) or not (folder / "comparison.csv").exists()]
    runs = {run.folder.resolve(): run for folder in folders for run in _read_folder(folder)}  # each one once
    settings: dict[Any, Setting] = {}
    begun = {(run.folder.parent, run.job): _identity(run) for run in runs.values() if run.config is not None}
    for run in runs.values():
        job = run.folder.parent, run.job  # a job that was never started belongs to its sisters of other seeds
        key = begun.get(job, job) if run.config is None else _identity(run)
        settings.setdefault(key, Setting("")).runs.append(run)
    _label(list(settings.values()))
    return list(settings.values())


def is_sweep(folder: Path) -> bool:
    return (folder / "sweep.json").exists()


def _read_folder(folder: Path) -> list[Run]:
    if not folder.is_dir():
        raise UserError(f"{folder} does not exist; name folders of runs, as in runs/NAME or runs/sweeps/NAME")
    if not is_sweep(folder):
        return [_read_run(folder)]
    path = folder / "sweep.json"
    jobs = _read(path, lambda text: json.loads(text)["jobs"])
    if not isinstance(jobs, list) or not all(isinstance(job, str) for job in jobs):
        raise UserError(f'{path} has no list of "jobs"; start the sweep again, or name the folders of its runs')
    return [_read_run(folder / job, job) for job in jobs]


def _read_run(folder: Path, job: str | None = None) -> Run:
    """A run; with `job`, one of a sweep, where a folder without a summary is a run that was never started."""
    words = tuple(word for word in (job or "").split(",") if word and not word.startswith("seed="))
    if not (folder / "summary.json").exists():
        if job is not None:
            return Run(folder, None, None, {"status": NOT_STARTED, "error": None}, words)
        raise UserError(f"{folder} is not a run: it has no summary.json; name folders such as runs/NAME")
    summary = _read(folder / "summary.json", json.loads)
    if not isinstance(summary, dict) or not isinstance(summary.get("status"), str):
        raise UserError(f"{folder / 'summary.json'} says no status; train that run again, or leave it out")
    config = _read(folder / "config.yaml", yaml.safe_load)
    if not isinstance(config, dict) or "seed" not in config:
        raise UserError(f"{folder / 'config.yaml'} is not the config of a run; train it again, or leave it out")
    flat = {key: value for key, value in _flatten(config).items() if key.split(".")[0] not in NOT_A_SETTING}
    flat["world_size"] = summary.get("world_size", 1)  # torchrun's, and no part of the config; it decides the times
    return Run(folder, flat, config["seed"], summary, words)


def _read(path: Path, parse: Callable[[str], Any]) -> Any:
    """What `parse` makes of a file's text. Raises UserError where it is not there or makes no sense."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is missing; train that run again, or leave it out") from None
    except (ValueError, KeyError, TypeError, yaml.YAMLError):  # ValueError: bad JSON, and what is not UTF-8
        raise UserError(f"{path} is damaged; train that run again, or leave it out") from None


def _flatten(config: dict, prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in config.items():
        flat |= _flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _identity(run: Run) -> str:
    return json.dumps(run.config, sort_keys=True, default=str)


def _label(settings: list[Setting]) -> None:
    """Label settings by the keys in which they differ: "attention=flash, optimizer.lr=0.003"."""
    configs = [config for setting in settings if (config := _config(setting)) is not None]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    for setting in settings:
        config = _config(setting)
        words = [] if config is None else [_word(key, config) for key in keys if _tells(key, config, configs)]
        one_run = setting.runs[0].folder.resolve().name if len(setting.runs) == 1 else "all"
        setting.label = ", ".join(words or setting.runs[0].job) or one_run


def _config(setting: Setting) -> dict | None:
    return next((run.config for run in setting.runs if run.config is not None), None)


def _tells(key: str, config: dict, configs: list[dict]) -> bool:
    """Whether a config differs in `key` from those that have chosen the same name for its section."""
    name = NAMES.get(key.split(".")[0])
    alike = configs if name in (None, key) else [each for each in configs if each.get(name) == config.get(name)]
    return len({_said(each, key) for each in alike}) > 1


def _word(key: str, config: dict) -> str:
    section = key.split(".")[0]
    return f"{section if NAMES.get(section) == key else key}={_said(config, key)}"


def _said(config: dict, key: str) -> str:
    """A value as one would type it; a key that an older run did not know yet has none."""
    if key not in config:
        return "(none)"
    return format_value(config[key])
