"""wandb: starting, resuming, failing and finishing a run."""

import threading
from types import SimpleNamespace

import pytest
import wandb

from common.run_dir import EXIT_CODES
from training.config import WandbConfig
from training.wandb_logger import WandbRun

CONFIG = WandbConfig(mode="online", project="p", entity=None, group=None, tags=[])


@pytest.fixture
def calls(monkeypatch):
    """The calls that wandb receives."""
    calls = []
    run = SimpleNamespace(
        define_metric=lambda *_, **__: None,
        summary=SimpleNamespace(update=calls.append),
        log=calls.append,
        finish=lambda code: calls.append({"exit_code": code}),
    )
    monkeypatch.setattr(wandb, "init", lambda **given: calls.append({k: given[k] for k in ("id", "resume")}) or run)
    return calls


def wandb_run(folder, run_id=None, is_main=True):
    run = SimpleNamespace(is_main=is_main, name="a", folder=folder, summary={"attention": {}})
    return WandbRun(CONFIG, run, {"attention": {}}, run_id)


def test_new_run_gets_an_id_and_all_rows(tmp_path, calls):
    run = wandb_run(tmp_path)
    assert run.id and not calls
    run.log([{"step": 0}, {"step": 1}])
    run.finish(1)
    assert calls == [{"id": run.id, "resume": None}, {"step": 0}, {"step": 1}, {"exit_code": 1}]


def test_resumed_run_keeps_its_id(tmp_path, calls):
    run = wandb_run(tmp_path, run_id="before")
    run.finish(0)
    assert calls == [{"id": "before", "resume": "allow"}, {"exit_code": 0}]


def test_training_does_not_wait_for_the_start_of_wandb(tmp_path, calls, monkeypatch):
    start, init = threading.Event(), wandb.init
    monkeypatch.setattr(wandb, "init", lambda **given: start.wait() and init(**given))
    run = wandb_run(tmp_path)
    run.log([{"step": 0}])
    run.log([{"step": 1}])
    assert not calls
    start.set()
    run.finish(0)
    assert calls[1:] == [{"step": 0}, {"step": 1}, {"exit_code": 0}]


def test_interrupted_run_does_not_wait_for_wandb(tmp_path, calls, monkeypatch):
    start, init = threading.Event(), wandb.init
    monkeypatch.setattr(wandb, "init", lambda **given: start.wait() and init(**given))
    wandb_run(tmp_path).finish(EXIT_CODES["interrupted"])  # before the first row
    run = wandb_run(tmp_path)
    run.log([{"step": 0}])
    run.finish(EXIT_CODES["interrupted"])  # while wandb starts
    assert not calls
    start.set()


def test_summary_is_sent_when_it_changes(tmp_path, calls):
    run = wandb_run(tmp_path)
    run.set_summary({"status": "running", "best_val_loss": 2.0})
    run.finish(0)
    assert calls[1:] == [{"best_val_loss": 2.0}, {"exit_code": 0}]


def test_other_ranks_do_not_use_wandb(tmp_path, calls):
    run = wandb_run(tmp_path, is_main=False)
    run.log([{"step": 0}])
    run.finish(0)
    assert not calls
