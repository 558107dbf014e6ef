"""Fixtures for all tests: a folder with a document, a trained run, and commands in this process."""

import base64
import getpass
import os
import signal
import sys
import tempfile
from pathlib import Path

# `pytest &` in a script ignores Ctrl-C, and nohup ignores SIGHUP. The processes that tests start
# must not inherit this.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP"):  # not on Windows
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# parallel test processes use one thread each
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# torch.compile otherwise compiles a test program per instruction set, which takes ten seconds for
# each empty cache
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

import pytest

# Fixtures import torch and the project: the main process of pytest -n would import them in vain,
# while the workers wait for it.


def pytest_collection_modifyitems(items):
    import torch

    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="NOT RUN: needs a CUDA device, and this machine has none")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory):
    """torchrun and wandb leave temporary files, here in a folder that pytest removes later."""
    folder = tmp_path_factory.mktemp("tmp")
    with pytest.MonkeyPatch.context() as patch:
        # Compiled kernels stay in one folder: all workers and later sessions use them.
        kernels = Path(tempfile.gettempdir()) / f"trilgpt-compiled-{getpass.getuser()}"
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kernels))
        patch.setenv("TMPDIR", str(folder))
        patch.setattr("tempfile.tempdir", None)  # read TMPDIR again
        yield


BLANK_PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="session", autouse=True)
def blank_pictures():
    """Pictures are blank in this process, because drawing takes half of the time of a tiny run.

    Yields the function that draws.
    """
    from matplotlib.figure import Figure

    draw = Figure.savefig
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Figure, "savefig", lambda self, file, **_: file.write(BLANK_PNG))
        yield draw


@pytest.fixture(autouse=True)
def pictures(request, blank_pictures, monkeypatch):
    """Tests with the mark `draws` draw their pictures."""
    if "draws" in request.keywords:
        monkeypatch.setattr("matplotlib.figure.Figure.savefig", blank_pictures)


@pytest.fixture(scope="session")
def remote_code(tmp_path_factory):
    """transformers copies the code of exported folders into a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        modules = str(tmp_path_factory.mktemp("modules"))
        patch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
        patch.setattr(sys, "path", [*sys.path])  # to which transformers appends the folder
        yield


@pytest.fixture(autouse=True)
def signal_handlers():
    from run_helpers import restored_signal_handlers

    with restored_signal_handlers():
        yield


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    """A temporary folder that contains only text.txt. It is the current folder."""
    from helpers import TEXT

    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


@pytest.fixture
def clock(monkeypatch) -> list[float]:
    """The current time, which only the test changes."""
    clock = [100.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    return clock


@pytest.fixture
def train(workdir):
    """train("name=a", ...) trains a tiny model in this process. Returns the exit code."""
    from helpers import train_here

    return train_here


@pytest.fixture(scope="session")
def folder_with_a_run(tmp_path_factory) -> Path:
    """A folder with the run and the data of train("name=a"). Tests only read it."""
    from run_helpers import train_in

    folder = tmp_path_factory.mktemp("trained")
    train_in(folder, "name=a")
    return folder


@pytest.fixture
def trained(workdir, folder_with_a_run) -> None:
    """Copies the run and the data of train("name=a") into the current folder."""
    from run_helpers import copy_here

    copy_here(folder_with_a_run)


@pytest.fixture
def sample(workdir, capsys):
    """sample("run=a", ...) runs sample.py in this process. Returns its output."""
    return lambda *overrides: run_script("sample", capsys, overrides)


@pytest.fixture
def evaluate(workdir, capsys):
    """evaluate("run=a", ...) runs eval.py in this process. Returns its output."""
    return lambda *overrides: run_script("eval", capsys, overrides)


def run_script(script: str, capsys, overrides: tuple[str, ...]) -> str:
    from helpers import run_command

    capsys.readouterr()
    assert run_command(script, *overrides) == 0, capsys.readouterr().err
    return capsys.readouterr().out
