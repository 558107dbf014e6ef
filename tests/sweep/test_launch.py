"""Launching a sweep: sweep.json, the lines that it prints, and its exit code."""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from comparison_helpers import write_run

from common.errors import EXIT_CODES, UserError
from common.files import read_json
from sweep import launch
from sweep.jobs import Job, Outcome
from sweep.launch import check_baseline, find_missing_jobs, finish_sweep, run_sweep, train_jobs
from training.run_folder import write_config

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
    assert second == "seed=2  failed: why"


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
    def compare(folders, out, negligible):
        return []

    def print_nothing(rows, out):
        """The table of the comparison."""

    monkeypatch.setattr(launch, "compare", compare)
    monkeypatch.setattr(launch, "print_comparison", print_nothing)
    monkeypatch.setattr(launch.WandbExport, "start", lambda export, folder: None)
    outcomes = {f"seed={n}": Outcome(status, "") for n, status in enumerate(statuses)}
    jobs = [make_job(1), make_job(2)]
    assert finish_sweep(SWEEP, jobs, outcomes, 0.005) == EXIT_CODES[status]


# Sweeps that stop when all settings have a verdict

LOSSES = {"first": 2.0, "better": 1.9, "equal": 2.0, "noise": 2.0, "unstable": 1.9}
NOISE = [0.0, 0.1, -0.1, 0.05, -0.1, 0.0, 0.1]  # by seed
NOISE_SCALES = {"first": 0.001, "better": -0.001, "equal": -0.001, "noise": 1.0, "unstable": 0.1}


def make_model_job(name: str, seed: int, steps: int = 8) -> Job:
    config = {
        "seed": seed,
        "model": {"name": name},
        "sweep": {"difference": 0.005},
        "train": {"steps": steps},
        "wandb": {"mode": "disabled"},
    }
    return Job(f"{name}-{seed}", SWEEP / f"{name}-{seed}", [], config)


def train_quickly(job: Job) -> Outcome:
    """Write the run of a job, with the loss of its setting and the noise of its seed."""
    shutil.rmtree(job.folder, ignore_errors=True)
    name = job.config["model"]["name"]
    seed = job.config["seed"]
    if name == "unstable" and seed == 2:
        write_run(job.folder, seed, status="failed", changes={"model.name": name})
        write_config(job.folder, job.config)
        return Outcome("failed", "no")
    if name in ("refused", "failed"):
        write_run(job.folder, seed, status=name, changes={"model.name": name})
        return Outcome(name, "no")
    noise = NOISE[seed] * NOISE_SCALES[name]
    loss = LOSSES[name] + noise
    write_run(job.folder, seed, val=loss, losses=[loss] * 8, changes={"model.name": name})
    write_config(job.folder, job.config)
    (job.folder / "checkpoints").mkdir()
    (job.folder / "checkpoints/last.pt").touch()
    return Outcome("finished", "")


def run_automatic_sweep(monkeypatch, *names: str, max_seeds: int = 6) -> list[str]:
    """Run a sweep of models with these names. Returns the trained jobs, as in first-1."""
    trained = []

    def train_job(job: Job) -> Outcome:
        trained.append(job.name)
        return train_quickly(job)

    monkeypatch.setattr(launch, "train_job", train_job)
    seeds = range(1, max_seeds + 1)
    jobs = [make_model_job(name, seed) for seed in seeds for name in names]
    run_sweep(jobs, stops_early=True)
    return trained


def test_sweep_trains_more_seeds_of_undecided_settings_and_of_the_first(workdir, monkeypatch):
    trained = run_automatic_sweep(monkeypatch, "first", "better", "noise", max_seeds=5)
    assert [trained.count(f"better-{seed}") for seed in range(1, 6)] == [1, 1, 1, 1, 0]
    for name in ("first", "noise"):
        assert [trained.count(f"{name}-{seed}") for seed in range(1, 6)] == [1] * 5


def test_sweep_ends_when_all_settings_have_a_verdict(workdir, monkeypatch, capsys):
    trained = run_automatic_sweep(monkeypatch, "first", "better", "equal")
    assert len(trained) < 18
    printed = capsys.readouterr().out
    assert "better-1: better by 5.00 %" in printed
    assert "equal-1: no difference above 0.5 %" in printed


def test_sweep_that_is_started_again_with_a_higher_maximum_continues(workdir, monkeypatch):
    first = run_automatic_sweep(monkeypatch, "first", "noise", max_seeds=4)
    assert run_automatic_sweep(monkeypatch, "first", "noise", max_seeds=4) == []
    assert len(first) == 8
    assert run_automatic_sweep(monkeypatch, "first", "noise", max_seeds=5) == ["first-5", "noise-5"]


def test_setting_that_cannot_run_is_not_tried_again(workdir, monkeypatch):
    trained = run_automatic_sweep(monkeypatch, "first", "refused", "better")
    assert trained.count("refused-1") == 1
    assert "refused-2" not in trained


def test_setting_that_fails_is_not_trained_again(workdir, monkeypatch):
    trained = run_automatic_sweep(monkeypatch, "first", "failed", "unstable", "better")
    assert "failed-2" not in trained
    assert "unstable-2" in trained
    assert "unstable-3" not in trained


@pytest.mark.parametrize("names", [("noise", "first"), ("better", "equal")])
def test_sweep_with_another_first_setting_is_refused(workdir, monkeypatch, names):
    run_automatic_sweep(monkeypatch, "first", "noise", max_seeds=2)
    with pytest.raises(UserError, match=r"compares all settings with first-1; list this setting"):
        run_automatic_sweep(monkeypatch, *names, max_seeds=3)


def test_sweep_with_more_steps_continues(workdir, monkeypatch):
    """The steps of a sweep may change, so that its runs continue."""
    run_automatic_sweep(monkeypatch, "first", "better", max_seeds=2)
    check_baseline(SWEEP, make_model_job("first", seed=1, steps=9))


def test_run_of_a_decided_setting_gets_the_new_steps_of_the_sweep(workdir, monkeypatch):
    """Otherwise, it would be compared with a longer run of the first setting."""
    train_quickly(make_model_job("better", seed=5, steps=7))
    trained = run_automatic_sweep(monkeypatch, "first", "better", "noise", max_seeds=5)
    assert trained.count("better-5") == 1


def test_finished_sweep_logs_its_comparison_again(workdir, monkeypatch):
    """Its sweep.difference can have changed."""
    exported = []
    monkeypatch.setattr(launch.WandbExport, "start", lambda export, folder: exported.append(folder))
    for _ in range(2):
        run_automatic_sweep(monkeypatch, "first", "better")
    assert exported == [SWEEP, SWEEP]


def test_sweep_ends_if_its_first_setting_cannot_run(workdir, monkeypatch):
    assert run_automatic_sweep(monkeypatch, "refused", "first") == ["refused-1", "first-1"]
