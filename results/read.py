"""Reads the folders of runs and sweeps, and joins runs with equal configs to variants.

runs/<name>/config.yaml  metrics.jsonl  summary.json
runs/sweeps/<sweep>/sweep.json  <job>/config.yaml ...
"""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from common.errors import UserError
from common.files import read_json
from common.settings import flatten_dict, format_value
from training.config import UNTIMED_STEPS, SweepConfig
from training.run_folder import read_config, read_rows, summary_key

# runs of one variant may differ in these, unless a sweep sets them
IGNORED_SECTIONS = ("seed", "name", "resume", "checkpoint", "sweep", "wandb")
# Suffixes of the keys that select the values of a section, as model.name and attention.backend do.
CHOICES = (".name", ".backend")
WHAT_TO_SET = "set folders of runs, as in runs/NAME or runs/sweeps/NAME"


@dataclass
class Run:
    """A run that train.py has written."""

    folder: Path
    config: dict[str, Any]  # flat: {"model.n_layer": 2}, without IGNORED_SECTIONS
    seed: int
    summary: dict[str, Any]
    swept: str | None  # key=value pairs of a sweep's job, without the seed
    negligible: float  # sweep.difference

    @property
    def status(self) -> str:
        return self.summary["status"]

    @property
    def data(self) -> str | None:
        """Folder of the prepared data. None if the run ended before it read any."""
        return self.summary.get("data")

    def has_text_of(self, other: "Run") -> bool:
        """Whether both read the same text, possibly with different tokenizers.

        Runs of earlier versions have no hash of the text. They need the same prepared data.
        """
        text_hash = self.summary.get("text_hash", self.data)
        return text_hash == other.summary.get("text_hash", other.data)

    @property
    def kernel(self) -> str | None:
        """The attention kernel that ran: "math", "flash (FA3)"."""
        attention = self.summary.get("attention") or {}
        kernel = attention.get("resolved")
        package = attention.get("flash_package")
        return f"{kernel} ({package})" if package else kernel

    @cached_property
    def curves(self) -> dict[str, dict[int, float]]:
        return read_curves(self.folder)

    def newest(self, name: str) -> float | None:
        """The newest value of a metric."""
        return self.summary.get(summary_key(name))


@dataclass
class Variant:
    """Runs with equal configs and data, and different seeds."""

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
        counts = Counter(run.status for run in self.runs)
        if list(counts) == ["refused"]:
            return "refused"
        return ", ".join(f"{count} {status}" for status, count in counts.items())

    @property
    def by_seed(self) -> dict[int, Run]:
        """The finished runs by seed."""
        return {run.seed: run for run in self.finished}

    def newest(self, name: str) -> list[float]:
        """The newest value of a metric in each finished run that has it."""
        values = [run.newest(name) for run in self.finished]
        return [value for value in values if value is not None]

    def timed(self, name: str) -> list[float]:
        """The values of a metric in all finished runs, without the first steps of each."""
        points = [point for run in self.finished for point in run.curves[name].items()]
        return [value for step, value in points if step > UNTIMED_STEPS]

    def accepts(self, run: Run) -> bool:
        """Whether the run has the config of the others, no other data, and another seed."""
        data = {other.data for other in [*self.runs, run]} - {None}
        seeds = [other.seed for other in self.runs]
        is_same = not find_changes(run.config, self.config)
        return is_same and len(data) <= 1 and run.seed not in seeds


def find_changes(config: dict, other: dict) -> set[str]:
    """Keys in which flat configs differ. Earlier versions lack new keys, which are None."""
    return {key for key in config.keys() | other.keys() if config.get(key) != other.get(key)}


def read_curves(folder: Path) -> dict[str, dict[int, float]]:
    """Read the numbers in metrics.jsonl by name and step: {"train/loss": {1: 4.2, 2: 4.1}}.

    A metric without values has an empty curve. Raises UserError for a damaged file.
    """
    curves: dict[str, dict[int, float]] = defaultdict(dict)

    def add_row(row: dict[str, Any]) -> None:
        for name, value in row.items():
            if isinstance(value, int | float):
                curves[name][row["step"]] = value

    read_rows(folder, add_row)
    return curves


def read_variants(folders: list[Path]) -> list[Variant]:
    """Read the variants of run folders and sweep folders, in the order of their first runs.

    A run that repeats an earlier one, with the same config, data and seed, is another variant.
    Raises UserError if there is no run, for a folder that is not a run, and for a damaged file.
    """
    variants: list[Variant] = []
    for run in [run for folder in folders for run in _read_folder(folder)]:
        variant = next((variant for variant in variants if variant.accepts(run)), None)
        if variant is None:
            variants.append(Variant([run]))
        else:
            variant.runs.append(run)
    if not variants:
        raise UserError(f"there is no run to compare; {WHAT_TO_SET}")
    _set_labels(variants)
    return variants


def is_sweep(folder: Path) -> bool:
    return (folder / "sweep.json").exists()


def _read_folder(folder: Path) -> list[Run]:
    """Read a run, or the runs of a sweep that have started."""
    if is_sweep(folder):
        jobs = read_json(folder / "sweep.json")["jobs"]
        started = [job for job in jobs if (folder / job / "summary.json").exists()]
        return [_read_run(folder / job, _list_swept(job)) for job in started]
    if not (folder / "summary.json").exists():
        raise UserError(f"{folder} is not a run: it has no summary.json; {WHAT_TO_SET}")
    return [_read_run(folder)]


def _list_swept(job: str) -> str:
    """List the values that a sweep sets, from the name of a job: "attention=flash, n_layer=2"."""
    job = re.sub(r"(^|,)seed=\d+", "", job)  # a hash may follow: data.path=_.txt,seed=1-ab12cd
    # A value may be a list with commas: model.window=_16,null_.
    return re.sub(r",(?=[\w.]+=)", ", ", job).removeprefix(", ")


def _read_run(folder: Path, swept: str | None = None) -> Run:
    summary = read_json(folder / "summary.json")
    settings = flatten_dict(read_config(folder))
    swept_keys = re.findall(r"([\w.]+)=", swept or "")
    config = {
        key: value
        for key, value in settings.items()
        if key.split(".")[0] not in IGNORED_SECTIONS or key in swept_keys
    }
    # torchrun sets the number of processes. It is not in the config, but it affects the speed.
    config["world_size"] = summary.get("world_size", 1)
    negligible = settings.get("sweep.difference", SweepConfig.difference)
    return Run(folder, config, settings["seed"], summary, swept, negligible)


def _set_labels(variants: list[Variant]) -> None:
    """Label each variant with the values that its sweep sets, or with the name of its first run.

    Runs have their differences from the other variants, too. So have variants of a sweep with equal
    values, as after a change of train.steps.
    """
    parents = {variant.runs[0].folder.resolve().parent for variant in variants}
    for variant in variants:
        run = variant.runs[0]
        folder = run.folder.resolve()
        if run.swept is None:
            variant.label = folder.name
        elif run.swept and len(parents) == 1:
            variant.label = run.swept
        else:
            variant.label = f"{folder.parent.name}/{run.swept}".removesuffix("/")
    labels = [variant.label for variant in variants]
    for variant in variants:
        is_swept = variant.runs[0].swept is not None
        others = [
            other.config
            for other, label in zip(variants, labels, strict=True)
            if label == variant.label or not is_swept
        ]
        differences = _list_differences(variant.config, others)
        variant.label = f"{variant.label}: {differences}".removesuffix(": ")


def _list_differences(config: dict, others: list[dict]) -> str:
    """List the values in which a config differs from others, choices first.

    Keys of a section, such as optimizer.lr, are compared only with configs that have the same
    choice, such as optimizer.name.
    """
    words = []
    for key in sorted(config, key=lambda key: not key.endswith(CHOICES)):
        choices = [] if key.endswith(CHOICES) else [key.split(".")[0] + end for end in CHOICES]
        values = [
            other.get(key)
            for other in others
            if all(other.get(choice) == config.get(choice) for choice in choices)
        ]
        if any(value != config[key] for value in values):
            name = key.removesuffix(".name").removesuffix(".backend")
            words.append(f"{name}={format_value(config[key])}")
    return ", ".join(words)


def read_table(path: Path) -> list[dict[str, Any]]:
    """Read a CSV file. Columns of numbers have numbers, and an empty cell is None."""
    from pyarrow import csv

    options = csv.ConvertOptions(strings_can_be_null=True)
    return csv.read_csv(path, convert_options=options).to_pylist()
