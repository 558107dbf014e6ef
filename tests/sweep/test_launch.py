"""Launching a sweep: sweep.json, the lines that it prints, and its exit code."""

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from common.errors import EXIT_CODES
from common.files import read_json
from sweep import launch
from sweep.jobs import Job, Outcome
from sweep.launch import find_missing_jobs, finish_sweep, train_jobs

SWEEP = Path("runs/sweeps/s")


def make_job(seed: int) -> Job:
    config = {"wandb": {"mode": "disabled"}}
    return Job(f"seed={seed}", SWEEP / f"seed={seed}", [], config)


def test_sweeps_that_are_started_together_list_all_jobs(workdir):
    jobs = [[make_job(seed)] for seed in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(find_missing_jobs, [SWEEP] * 40, jobs))
    assert len(read_json(SWEEP / "sweep.json")["jobs"]) == 40


def test_sweep_lists_each_job_once_in_the_order_of_the_first_start(workdir):
    find_missing_jobs(SWEEP, [make_job(2), make_job(1)])
    find_missing_jobs(SWEEP, [make_job(1), make_job(3)])
    assert read_json(SWEEP / "sweep.json")["jobs"] == ["seed=2", "seed=1", "seed=3"]


def test_sweep_names_each_run_and_its_log_when_it_starts(workdir, monkeypatch, capsys):
    printed = []

    def start(*_, **__):
        printed.append(capsys.readouterr().out)
        raise ZeroDivisionError

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(ZeroDivisionError):
        train_jobs([make_job(1)])
    assert printed == ["seed=1  started, with its output in runs/sweeps/s/seed=1/train.log\n"]


def test_sweep_prints_each_outcome(monkeypatch, capsys):
    def fail(job):
        return Outcome("failed", "why")

    monkeypatch.setattr(launch, "train_job", fail)
    outcomes = train_jobs([make_job(1), make_job(2)])
    assert list(outcomes) == ["seed=1", "seed=2"]
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("seed=1  failed: why (1 to go, ")
    assert second == "seed=2  failed: why (0 to go, 0:00:00 left)"


@pytest.mark.parametrize(
    ("statuses", "status"),
    [
        (["finished", "finished"], "finished"),
        (["finished", "refused"], "finished"),
        (["refused", "refused"], "refused"),
        (["refused"], "finished"),  # the other run had finished before
        (["failed", "interrupted"], "failed"),
        (["refused", "failed"], "failed"),
        (["finished", "interrupted"], "interrupted"),
        ([], "finished"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_exit_code_of_a_sweep(statuses, status, monkeypatch):
    def compare(folders, out):
        return []

    def print_nothing(rows, out):
        """The table of the comparison."""

    monkeypatch.setattr(launch, "compare", compare)
    monkeypatch.setattr(launch, "print_comparison", print_nothing)
    monkeypatch.setattr(launch.WandbExport, "start", lambda export, folder: None)
    outcomes = {f"seed={n}": Outcome(status, "") for n, status in enumerate(statuses)}
    jobs = [make_job(1), make_job(2)]
    assert finish_sweep(SWEEP, jobs, outcomes) == EXIT_CODES[status]
