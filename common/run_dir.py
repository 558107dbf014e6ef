"""Run folders: names, locks, summary.json and exit codes. docs/run-folder.md lists the files."""

import difflib
import math
import re
import time
from contextlib import AbstractContextManager, suppress
from itertools import chain, count
from pathlib import Path

import yaml
from filelock import FileLock, Timeout

from common.errors import UserError, error_message
from common.files import atomic_write, read_json, write_json

RUNS = Path("runs")  # in the folder where the command is run
SWEEPS = RUNS / "sweeps"  # runs/sweeps/<sweep>/<job>: the runs of a sweep
BENCHES = RUNS / "bench"  # runs/bench/<name>: results of bench.py
RESERVED = ("sweeps", "bench", "comparison", "last")  # cannot be names of runs
JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=,+-]{0,200}")  # name of a sweep's job: attention=flash,seed=1
EXIT_CODES = {"finished": 0, "failed": 1, "refused": 2, "interrupted": 75}  # by status of the run


def check_path_component(key: str, word: str) -> None:
    """Raise UserError for a word that cannot be part of a folder name."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", word) or ".." in word or word.startswith((".", "-")):
        raise UserError(f"{key}={word!r} is not a folder name; use up to 100 letters, digits, '.', '_' and '-'")


def check_name(name: str) -> None:
    """Raise UserError for a run name that cannot be a folder in runs/ or runs/sweeps/<sweep>/."""
    job = re.fullmatch(rf"sweeps/([^/]*)/{JOB.pattern}", name)
    check_path_component("name", job[1] if job else name)
    if name in RESERVED:
        raise UserError(f"name={name} is reserved; set another name")


def find_run(name: str) -> Path:
    """Find a run with a checkpoint: its name in runs/, its path or a checkpoint's path; "last" is the newest run."""
    files = [*RUNS.glob("*/checkpoints/*.pt"), *SWEEPS.glob("*/*/checkpoints/*.pt")]
    newest = list(dict.fromkeys(path.parents[1] for path in sorted(files, key=lambda path: -path.stat().st_mtime)))
    path = Path(name).parents[1] if Path(name).parent.name == "checkpoints" else Path(name)
    for folder in newest[:1] if name == "last" else (RUNS / path, path):
        if any(folder.glob("checkpoints/*.pt")):
            return folder
    names = [str(folder.relative_to(RUNS)) for folder in newest]
    nearest = difflib.get_close_matches(name.removeprefix("runs/"), names, n=1) or names
    advice = f"set run={nearest[0]}, for example" if nearest else "train one: python train.py"
    raise UserError(f"run={name} has no checkpoint in {Path.cwd() / RUNS}; {advice}")


def find_checkpoint(run: str, checkpoint: str) -> Path:
    """Path of a run's checkpoint: "best", "last" or "step-NNNNNN", unless `run` is its path. Raises UserError."""
    folder, checkpoint = find_run(run), Path(run).stem if Path(run).parent.name == "checkpoints" else checkpoint
    paths = {path.stem: path for path in sorted((folder / "checkpoints").glob("*.pt"))}
    if checkpoint not in paths:
        raise UserError(f"{folder} has no checkpoint {checkpoint}.pt; set run={folder} checkpoint={' or '.join(paths)}")
    return paths[checkpoint]


def has_checkpoint(name: str | None) -> bool:
    """Whether the run has a checkpoint to resume from."""
    return name is not None and (RUNS / name / "checkpoints" / "last.pt").exists()


def make_new_folder(parent: Path, label: str) -> str:
    """Make the folder <parent>/<time>-<label>, with -2, -3, ... appended if it exists. Returns its name."""
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{label}"
    for name in chain([stem], (f"{stem}-{number}" for number in count(2))):
        with suppress(FileExistsError):
            (parent / name).mkdir(parents=True)
            break
    return name


def flatten_dict(config: dict, prefix: str = "") -> dict:
    """Join nested keys with dots: {"model": {"n_layer": 2}} becomes {"model.n_layer": 2}."""
    flat = {}
    for key, value in config.items():
        flat |= flatten_dict(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def write_config(folder: Path, config: dict) -> None:
    atomic_write(folder / "config.yaml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))


class RunDir(AbstractContextManager):
    """Context manager: a locked folder in runs/. On exit, the status is written to summary.json.

    name: None to make one from the time and `label`. resume: whether the run may exist already.
    is_main: whether this process locks and writes the folder. broadcast: returns the main process's value.
    Raises UserError if the run is in use, if it exists and resume is False, or if its last.pt is missing.
    """

    def __init__(self, name: str | None, label: str, resume: bool, is_main: bool = True, broadcast=lambda value: value):
        self.is_main = is_main
        self.summary: dict | None = None  # None before start(): summary.json is not changed
        self.previous: dict = {}  # content of summary.json, from an earlier process
        self.name = broadcast(name or make_new_folder(RUNS, label) if is_main else None)
        self.folder = RUNS / self.name
        self.best, self.last = (self.folder / "checkpoints" / file for file in ("best.pt", "last.pt"))
        if not is_main:
            return
        if (self.folder / "config.yaml").exists() and not resume:
            raise UserError(f"{self.folder} exists; set another name, or resume=true to continue it")
        step = read_json(self.folder / "summary.json").get("step")  # above 0 only after last.pt was written
        if step and not self.last.exists():
            raise UserError(f"{self.last} is missing, but step {step} was saved; restore it, or set another name")
        self.last.parent.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(self.folder / ".lock")  # the kernel releases it, even after kill -9
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            raise UserError(f"{self.folder} is being trained by another process; wait, or set another name") from None
        self.previous = read_json(self.folder / "summary.json")
        for file in (*self.folder.glob("*.partial"), *self.last.parent.glob("*.partial")):  # of a killed process
            file.unlink()

    def start(self, config: dict, summary: dict) -> None:
        """Write config.yaml and the first summary.json. Results of an earlier process stay until they are updated."""
        self.summary = self.previous | {"name": self.name, "status": "running", "error": None}
        if self.is_main:
            write_config(self.folder, config)
        self.update(summary)

    def update(self, summary: dict) -> None:
        """Add values to summary.json, where they survive a kill. Infinite values become null: JSON has no infinity."""
        self.summary |= {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in summary.items()}
        if self.is_main:
            write_json(self.folder / "summary.json", self.summary)

    def __exit__(self, error_type, error, traceback) -> None:
        if self.summary is not None:
            message = None if error is None else error_message(error) or f"{type(error).__name__}: {error}"
            self.update({"status": status_of(error), "error": message})
        if self.is_main:
            self.lock.release()


def status_of(error: BaseException | None) -> str:
    """Status of a run that ended with `error`, or None: a key of EXIT_CODES."""
    if isinstance(error, UserError | KeyboardInterrupt):
        return "refused" if isinstance(error, UserError) else "interrupted"
    return "finished" if error is None else "failed"
