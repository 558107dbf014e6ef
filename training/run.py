"""A run's folder: its name, its lock, its status.

runs/<name>/config.yaml  metrics.jsonl  summary.json  loss.png  checkpoints/{last,best}.pt  wandb/
"""

import json
import math
import os
import re
import signal
import time
from pathlib import Path

import yaml
from filelock import FileLock, Timeout

from errors import UserError

ROOT = Path("runs")  # below the folder where the command is typed
RESERVED = ("sweeps", "bench", "last")
EXIT_CODES = {"finished": 0, "failed": 1, "refused": 2, "interrupted": 75}


def check_word(key: str, word: str) -> None:
    """Raises UserError for a word that could not be a part of a folder's name."""
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", word) or ".." in word or word.startswith((".", "-")):
        raise UserError(
            f"{key}={word!r} cannot name a folder; use at most 100 letters, digits, '.', '_' and '-', as in {key}=my-1"
        )


def check_name(name: str) -> None:
    """Raises UserError for a run name that could not be a folder of runs/."""
    check_word("name", name)
    if name in RESERVED:
        raise UserError(f"name={name} is taken by trilGPT itself; set another name")


def find_run(name: str) -> Path:
    """The folder of the run called `name` below runs/, or of the newest one with a checkpoint for "last".

    Raises UserError where there is none, naming those there are.
    """
    if not re.fullmatch(r"[A-Za-z0-9._/=,-]+", name) or ".." in name or name.startswith("/"):
        raise UserError(f"run={name!r} cannot name a run; set the name of a folder below {ROOT}/, or last")
    newest = {path.parent.parent: path.stat().st_mtime for path in ROOT.glob("**/checkpoints/*.pt")}
    with_checkpoint = sorted(newest, key=newest.get, reverse=True)
    if name == "last":
        if not with_checkpoint:
            raise UserError(f"there is no run with a checkpoint below {Path.cwd() / ROOT}; train one: python train.py")
        return with_checkpoint[0]
    if ROOT / name not in with_checkpoint:
        have = ", ".join(str(folder.relative_to(ROOT)) for folder in with_checkpoint[:5]) or "none yet"
        raise UserError(f"run={name} has no checkpoint below {ROOT}/; the newest runs that have one: {have}")
    return ROOT / name


def _make_new_folder(stem: str) -> str:
    """Make runs/<stem>, or runs/<stem>-2, ... where another run of the same second was first -> its name."""
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        try:
            (ROOT / f"{stem}{suffix}").mkdir()
        except FileExistsError:
            continue
        return f"{stem}{suffix}"
    raise UserError(f"{ROOT}/{stem} and its successors exist; set name=NAME")


class Run:
    """A locked folder below runs/. A context manager: on the way out summary.json says how it ended."""

    def __init__(self, name: str | None, label: str, resume: bool):
        """name None: the time and `label`. Raises UserError where the run is locked, or exists and resume is False."""
        ROOT.mkdir(exist_ok=True)
        if name is None:
            name = _make_new_folder(f"{time.strftime('%Y%m%d-%H%M%S')}-{label}")
        elif (ROOT / name).exists() and not resume:
            raise UserError(f"{ROOT / name} exists; set another name, or resume=true to continue it")
        self.name, self.folder = name, ROOT / name
        self.last.parent.mkdir(parents=True, exist_ok=True)
        self.lock = FileLock(self.folder / ".lock")  # the kernel lets go of it however the process ends
        try:
            self.lock.acquire(timeout=0)
        except Timeout:
            raise UserError(
                f"{self.folder} is being trained by another process; wait for it, or set another name"
            ) from None
        self.summary: dict | None = None  # None: nothing has begun, and what an earlier process wrote stays

    @property
    def last(self) -> Path:
        return self.folder / "checkpoints/last.pt"

    @property
    def best(self) -> Path:
        return self.folder / "checkpoints/best.pt"

    def begin(self, config: dict, summary: dict) -> None:
        """Write config.yaml and a first summary.json: from here on the folder tells of this process."""
        text = yaml.safe_dump(config, sort_keys=False, allow_unicode=True)
        (self.folder / "config.yaml").write_text(text)
        self.summary = {"name": self.name, "status": "running", "error": None} | summary
        self._write_summary()

    def update(self, summary: dict) -> None:
        """Bring summary.json up to date, at a checkpoint: a process that is killed leaves it as it was then."""
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in summary.items()}
        self.summary |= finite  # JSON has no infinity, which the best loss is before the first
        self._write_summary()

    def finish(self) -> bool:
        """Put on record that there is nothing left to do -> whether a process was killed before it could say so."""
        path = self.folder / "summary.json"
        summary = json.loads(path.read_text()) if path.exists() else {"name": self.name, "status": "unknown"}
        if summary["status"] == "finished":
            return False
        self.summary = summary
        return True

    def _write_summary(self) -> None:
        partial = self.folder / "summary.json.partial"
        partial.write_text(json.dumps(self.summary, indent=2) + "\n")
        os.replace(partial, self.folder / "summary.json")

    def __enter__(self) -> "Run":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self.summary is not None:
            self.summary["status"] = status_of(error)
            self.summary["error"] = None if error is None else f"{kind.__name__}: {error}"
            self._write_summary()
        self.lock.release()


def status_of(error: BaseException | None) -> str:
    """How a run ended: a key of EXIT_CODES."""
    if error is None:
        return "finished"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "refused" if isinstance(error, UserError) else "failed"


class StopRequest:
    """Ctrl-C or SIGTERM asks the loop to stop after the step at hand; a second one stops at once."""

    def __init__(self):
        self.requested = False

    def __enter__(self) -> "StopRequest":
        self.before = {kind: signal.signal(kind, self._handle) for kind in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _handle(self, number, frame) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True

    def __exit__(self, *_) -> None:
        for kind, handler in self.before.items():
            signal.signal(kind, handler)
