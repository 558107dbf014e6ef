"""Runs that several tests look at, comparisons of runs, and signals."""

import io
import shutil
import signal
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path

import torch
from helpers import TEXT, load, metrics, train_here, untimed

from common.process import STOP_SIGNALS


def run_in(folder: Path, *words: str) -> tuple[int, str]:
    """Train a tiny model on text.txt in a folder. Returns the exit code and the output."""
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    output = io.StringIO()
    with chdir(folder), redirect_stdout(output), redirect_stderr(output):
        code = train_here(*words)
    return code, output.getvalue()


def train_in(folder: Path, *words: str) -> str:
    """Train a tiny model that finishes. Returns what the run prints."""
    code, printed = run_in(folder, *words)
    assert code == 0, printed
    return printed


def copy_here(folder: Path) -> None:
    """Copy a folder with runs into the current folder."""
    shutil.copytree(folder, Path.cwd(), dirs_exist_ok=True)


@contextmanager
def restored_signal_handlers() -> Iterator[None]:
    """Context manager: restores the handlers, which an interrupted run changes.

    Processes that later tests start would inherit ignored signals.
    """
    previous = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def read_files(folder: Path) -> dict[Path, bytes]:
    """The content of all files in a folder, except locks."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {path.relative_to(folder): path.read_bytes() for path in files}


def val_losses(name: str) -> dict[int, float]:
    """The validation losses of a run by step."""
    return {row["step"]: row["val/loss"] for row in metrics(name) if "val/loss" in row}


def assert_same_run(a: str, b: str) -> None:
    """Check that rows, weights and optimizer state are bit-identical."""
    assert untimed(metrics(a)) == untimed(metrics(b))
    for kind in ("last", "best"):
        one = _read_results(a, kind)
        two = _read_results(b, kind)
        assert bool(one["optimizer"]) == (kind == "last")
        torch.testing.assert_close(one, two, atol=0, rtol=0)


def _read_results(run: str, kind: str) -> dict:
    saved = load(run, kind)
    return {key: saved[key] for key in ("step", "best_val_loss", "model", "optimizer")}
