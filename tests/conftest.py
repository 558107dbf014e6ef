"""Shared by all tests: a clean folder to work in, a small text, and a short way to run the commands in this process."""

import os
import shutil
import signal
import sys
from contextlib import chdir
from pathlib import Path

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # started in the background, as by `pytest &` in a script:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # what is started here should hear Ctrl-C nonetheless
if "PYTEST_XDIST_WORKER" in os.environ:  # several test processes at once: each with one thread, or they get in the way
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from data import DataConfig, TokenizerConfig  # noqa: E402 (the path is to be known first)
from model import SamplingConfig  # noqa: E402
from model.attention import BACKENDS  # noqa: E402

ON_CPU = [name for name, each in BACKENDS.items() if "cpu" in each.on]
TRAINS_ON_CPU = [name for name in ON_CPU if BACKENDS[name].on["cpu"].gradients]

TEXT = "".join(f"The {n}th line says {n * n} and no more; après tout, it's a line.\n" for n in range(400))
TEXT_SOURCE = DataConfig(
    name="text", source="text", path="text.txt", url=None, repo=None, config=None, split=None, revision=None,
    stream=False, text_column="text", row_is_document=True, max_documents=None, val_path=None, val_split=None,
    val_documents=None, val_fraction=0.1, mix={}, weight=1.0, document_mask=False,
)  # fmt: skip
CHAR, BYTE = TokenizerConfig("char", None, None), TokenizerConfig("byte", None, None)
BPE, GPT2 = TokenizerConfig("bpe", 300, None), TokenizerConfig("gpt2", None, None)
TINY = [
    "model.n_layer=2", "model.n_head=2", "model.n_embd=16", "model.block_size=16", "model.ngram_rows=64",
    "train.batch_size=4",
    "train.steps=6", "eval.every=3", "eval.batches=2", "eval.sample.max_new_tokens=4", "checkpoint.every=3",
    "wandb.mode=disabled", "tokenizer=char", "data=text", "data.path=text.txt",
]  # fmt: skip


def sampling(**changed):
    """Settings that filter nothing, but for what is changed."""
    plain = dict(max_new_tokens=20, temperature=1.0, top_k=None, top_p=None, min_p=None, repetition_penalty=1.0)
    return SamplingConfig(**plain | dict(stop=None) | changed)


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


def train_here(*overrides: str) -> int:
    from configs.entry import run, start
    from train import main

    return run(main, start("train", "", [*TINY, *overrides]))


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
    from configs.entry import run, start
    from sample import main

    def go(*overrides: str) -> str:
        capsys.readouterr()
        assert run(main, start("sample", "", list(overrides))) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return go
