"""Shared by all tests: a clean folder to work in, a small text, and a short way to run the commands in this process."""

import os
import shutil
import signal
from contextlib import chdir
from pathlib import Path

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started in the background, as by `pytest &` in a script:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started here should hear Ctrl-C nonetheless
if "PYTEST_XDIST_WORKER" in os.environ:  # several test processes at once: each with one thread, or they get in the way
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from helpers import TEXT, train_here


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="NOT RUN: needs a CUDA device, and this machine has none"))


@pytest.fixture
def workdir(tmp_path, monkeypatch) -> Path:
    """An empty folder with text.txt in it, as the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(TEXT, encoding="utf-8")
    return tmp_path


@pytest.fixture
def train(workdir):
    """train("name=a", ...) trains a tiny model here and now -> its exit code."""
    return train_here


@pytest.fixture(scope="session")
def folder_with_a_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    with chdir(folder):
        assert train_here("name=a") == 0
    return folder


@pytest.fixture
def trained(workdir, folder_with_a_run) -> None:
    """In the current folder there is what train("name=a") leaves; trained once, for all who only read it."""
    shutil.copytree(folder_with_a_run, workdir, dirs_exist_ok=True)


@pytest.fixture
def sample(workdir, capsys):
    """sample("run=a", ...) -> the text it printed."""
    from configs.cli import parse_config, run_main
    from sample import main

    def go(*overrides: str) -> str:
        capsys.readouterr()
        assert run_main(main, parse_config("sample", "", list(overrides))) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return go
