"""A run's folder: its name, its lock, its status.

runs/<name>/config.yaml  metrics.jsonl  summary.json  loss.png  checkpoints/{last,best}.pt  wandb/
"""

import math
import os
import platform
import re
import time
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from common.errors import TrainingFailed, UserError
from common.files import read_json, write_json

ROOT = Path("runs")  # below the folder where the command is typed
SWEEPS = ROOT / "sweeps"  # runs/sweeps/<sweep>/<job>: the runs of a sweep
BENCHES = ROOT / "bench"  # runs/bench/<name>: what bench.py measured
RESERVED = ("sweeps", "bench", "comparison", "last")
JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]{0,200}")  # a sweep's job, named for its values: attention=flash,seed=1
EXIT_CODES = {"finished": 0, "failed": 1, "refused": 2, "interrupted": 75}


def check_path_component(key: str, word: str) -> None:
    """Raises UserError for a word that could not be a part of a folder's name."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", word) or ".." in word or word.startswith((".", "-")):
        raise UserError(
            f"{key}={word!r} cannot name a folder; use at most 100 letters, digits, '.', '_' and '-', as in {key}=my-1"
        )


def check_name(name: str) -> None:
    """Raises UserError for a run name that could not be a folder of runs/, or of a sweep in it."""
    sweep, slash, job = name.removeprefix("sweeps/").partition("/")
    if name.startswith("sweeps/") and slash and JOB.fullmatch(job):
        return check_path_component("name", sweep)
    check_path_component("name", name)
    if name in RESERVED:
        raise UserError(f"name={name} is taken by trilGPT itself; set another name")


def find_run(name: str) -> Path:
    """The folder of the run called `name` below runs/, or of the newest one with a checkpoint for "last".

    A path will do as well, as in runs/NAME. Raises UserError where there is none, naming those there are.
    """
    if "/" in name and any(Path(name).glob("checkpoints/*.pt")):
        return Path(name)
    name = name.removeprefix("./").removeprefix(f"{ROOT}/").rstrip("/")
    if not re.fullmatch(r"[A-Za-z0-9._/=,+-]+", name) or ".." in name or name.startswith("/"):
        raise UserError(f"run={name!r} is no run's folder; set one, its name below {Path.cwd() / ROOT}, or last")
    newest = {path.parent.parent: path.stat().st_mtime for path in ROOT.glob("**/checkpoints/*.pt")}
    with_checkpoint = sorted(newest, key=newest.get, reverse=True)
    if name == "last":
        if not with_checkpoint:
            raise UserError(f"there is no run with a checkpoint below {Path.cwd() / ROOT}; train one: python train.py")
        return with_checkpoint[0]
    if ROOT / name not in with_checkpoint:
        have = ", ".join(str(folder.relative_to(ROOT)) for folder in with_checkpoint[:5]) or "none yet"
        there = Path.cwd() / ROOT
        raise UserError(f"run={name} has no checkpoint below {there}; the newest runs that have one: {have}")
    return ROOT / name


def find_checkpoint(run: str, which: str) -> Path:
    path = find_run(run) / "checkpoints" / f"{which}.pt"
    if not path.exists():  # a run that was stopped before its first evaluation has no best one yet
        (path,) = path.parent.glob("*.pt")
    return path


def has_checkpoint(name: str | None) -> bool:
    """Whether the run called `name` has one to go on from."""
    return name is not None and (ROOT / name / "checkpoints" / "last.pt").exists()


def make_new_folder(parent: Path, label: str) -> str:
    """Make <parent>/<time>-<label>, with -2, -3, ... where another run of the same second was first -> its name."""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        try:
            (parent / f"{stem}{suffix}").mkdir(parents=True)
        except FileExistsError:
            continue
        return f"{stem}{suffix}"
    raise UserError(f"{parent}/{stem} and its successors exist; set name=NAME")


def read_owner(folder: Path) -> str:
    """Who trains the run, as in "process 4711 on laptop"."""
    path = folder / ".owner"
    return path.read_text() if path.exists() else "another process"


def read_summary(folder: Path) -> dict:
    """summary.json of a run's folder; empty where there is none. Raises UserError where it is damaged."""
    return read_json(folder / "summary.json")


def write_summary(folder: Path, summary: dict) -> None:
    write_json(folder / "summary.json", summary)


def flatten_dict(config: dict, prefix: str = "") -> dict:
    """{"model": {"n_layer": 2}} -> {"model.n_layer": 2}."""
    found = {}
    for key, value in config.items():
        found |= flatten_dict(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def write_config(folder: Path, config: dict) -> None:
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


class RunDir:
    """A locked folder below runs/. A context manager: on the way out summary.json says how it ended."""

    def __init__(self, name: str | None, label: str, resume: bool, dist: Any):
        """name None: the time and `label`. Of several processes rank 0 alone names, locks and writes.

        Raises UserError where the run is locked, or exists and resume is False.
        """
        self.is_main = dist.is_main
        self.summary: dict | None = None  # None: nothing has begun, and what an earlier process wrote stays
        refusal = None
        if self.is_main:
            try:
                name = self._claim(name, label, resume)
            except UserError as error:
                refusal = str(error)
        self.name, refusal = dist.broadcast((name, refusal))
        if refusal is not None:
            raise UserError(refusal)
        self.folder = ROOT / self.name

    def _claim(self, name: str | None, label: str, resume: bool) -> str:
        """Make and lock the folder -> its name."""
        if name is None:
            name = make_new_folder(ROOT, label)
        elif (ROOT / name / "config.yaml").exists() and not resume:
            raise UserError(f"{ROOT / name} exists; set another name, or resume=true to continue it")
        folder = ROOT / name
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(folder / ".lock")  # the kernel lets go of it however the process ends
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"{folder} is being trained by {read_owner(folder)}; wait for it, or set another name"
            ) from None
        (folder / ".owner").write_text(f"process {os.getpid()} on {platform.node()}")
        return name

    @property
    def last(self) -> Path:
        return self.folder / "checkpoints/last.pt"

    @property
    def best(self) -> Path:
        return self.folder / "checkpoints/best.pt"

    def start(self, config: dict, summary: dict) -> None:
        """Write config.yaml and a first summary.json: from here on the folder tells of this process."""
        self.summary = {"name": self.name, "status": "running", "error": None}
        if self.is_main:
            write_config(self.folder, config)
        self.update(summary)

    def update(self, summary: dict) -> None:
        """Bring summary.json up to date, at a checkpoint: a process that is killed leaves it as it was then."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in summary.items()}
        self.summary |= finite  # JSON has no infinity, which the best loss is before the first
        self._write()

    def finish(self) -> bool:
        """Put on record that there is nothing left to do -> whether a process was killed before it could say so."""
        summary = read_summary(self.folder) or {"name": self.name, "status": "unknown"}
        if summary["status"] == "finished":
            return False
        self.summary = summary
        return True

    def _write(self) -> None:
        if self.is_main:
            write_summary(self.folder, self.summary)

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self.summary is not None:
            self.summary["status"] = status_of(error)
            ours = isinstance(error, KeyboardInterrupt | UserError | TrainingFailed)  # whose words are for users
            self.summary["error"] = None if error is None else str(error) if ours else f"{kind.__name__}: {error}"
            self._write()
        if self.is_main:
            self.lock.release()


def status_of(error: BaseException | None) -> str:
    """How a run ended: a key of EXIT_CODES."""
    if error is None:
        return "finished"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "refused" if isinstance(error, UserError) else "failed"
