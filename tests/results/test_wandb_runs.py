"""What compare.py logs to wandb, read from the files that wandb has written offline."""

import shutil
from contextlib import chdir
from pathlib import Path

import pytest
from comparison_helpers import KERNEL, compare_rows, write_run, write_sweep
from helpers import read_jsonl, run_command
from run_helpers import copy_here
from wandb_helpers import OfflineRun, read_offline_runs

SWEEP = Path("runs/sweeps/s")
JOBS = [f"attention={name},seed={n}" for name in ("naive", "flex") for n in (1, 2)]


def write_runs() -> None:
    """The sweep s: two backends, each with the seeds 1 and 2."""
    write_sweep(SWEEP, JOBS)
    for name, changes, losses in (("naive", None, [3.0, 2.0]), ("flex", KERNEL, [3.0, 2.1])):
        for seed in (1, 2):
            folder = SWEEP / f"attention={name},seed={seed}"
            facts = {"name": f"sweeps/s/{folder.name}", "wandb_id": f"id{name}{seed}"}
            losses_of_seed = [loss + seed / 100 for loss in [*losses, 2, 2, 2, 2, 2]]
            write_run(folder, seed, losses=losses_of_seed, val=seed, changes=changes, **facts)


def log_sweep() -> None:
    assert run_command("compare", "sweeps/s", "wandb.mode=offline") == 0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with a sweep that was logged. Tests only read it."""
    folder = tmp_path_factory.mktemp("compared")
    with chdir(folder):
        write_runs()
        log_sweep()
    return folder


@pytest.fixture(scope="module")
def logged(folder) -> dict[str, OfflineRun]:
    """The wandb runs, by name."""
    runs = read_offline_runs(folder / SWEEP)
    assert len(runs) == 5
    return {run.run["display_name"]: run for run in runs}


@pytest.fixture(scope="module")
def comparison(logged) -> OfflineRun:
    return logged["s comparison"]


def test_comparison_and_its_runs_are_logged(logged):
    assert logged.keys() == {*JOBS, "s comparison"}


def test_same_command_updates_the_comparison_and_leaves_complete_runs(folder, logged, workdir):
    copy_here(folder)
    earlier = SWEEP / "wandb" / logged["s comparison"].folder.name
    earlier.rename(earlier.with_name(f"offline-run-20260101_000000-{logged['s comparison'].id}"))
    log_sweep()
    runs = read_offline_runs(SWEEP)
    assert len(runs) == len(logged)
    again = {run.run["display_name"]: run for run in runs}
    assert {name: run.id for name, run in again.items()} == {n: run.id for n, run in logged.items()}
    kept = [name for name in again if again[name].folder.name == logged[name].folder.name]
    assert set(JOBS) <= set(kept)


def test_wandb_shows_the_command_of_the_training(logged):
    assert logged[JOBS[0]].program == ["train.py", f"name={JOBS[0]}"]


def test_runs_of_a_comparison_keep_their_ids(logged):
    assert [logged[job].id for job in JOBS] == ["idnaive1", "idnaive2", "idflex1", "idflex2"]


@pytest.mark.parametrize("job", JOBS)
def test_runs_that_were_not_logged_are_logged_in_full(logged, folder, job):
    run = logged[job]
    expected = read_jsonl(folder / SWEEP / job / "metrics.jsonl")
    assert run.steps == list(range(8))
    for row, values in zip(run.rows, expected, strict=True):
        assert values.items() <= row.items()
    assert run.exit_code == 0


def test_comparison_belongs_to_the_group_of_the_sweep(comparison):
    assert comparison.run["run_group"] == "s"


def test_config_of_a_comparison_has_the_common_settings(comparison):
    assert comparison.config["model"] == {"name": "small", "n_layer": 2, "dropout": 0.0}
    assert "backend" not in comparison.config["attention"]


def test_summary_of_a_comparison_has_the_figures_of_each_setting(comparison, folder):
    with chdir(folder):
        rows = compare_rows([SWEEP])
    assert len(rows) == 2
    for name, row in zip(("attention_naive", "attention_flex"), rows, strict=True):
        for field in ("difference", "step_ms", "peak_memory_bytes"):
            assert comparison.summary.get(f"{field}/{name}") == row[field].value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("verdict/attention_naive", "baseline"),
        ("verdict/attention_flex", "differs from step 2"),
        ("kernel/attention_flex", "flex"),
        ("speed_ratio/attention_flex", 1.0),
    ],
)
def test_summary_of_a_comparison_has_the_answers(comparison, key, value):
    assert comparison.summary[key] == value


def test_notes_of_a_comparison_have_the_answers(comparison):
    first, second = comparison.run["notes"].splitlines()
    assert first.startswith("attention=naive: baseline; kernel naive")
    assert second.startswith("attention=flex: differs from step 2; kernel flex; difference 0")
    assert second.endswith("; 1.00 times as fast")


def test_comparison_has_the_table_with_numbers(comparison):
    table = comparison.table("comparison")
    assert [row["variant"] for row in table] == ["attention=naive", "attention=flex"]
    assert [row["seeds"] for row in table] == [2, 2]
    assert [row["vocab_size"] for row in table] == ["65", "65"]


def test_comparison_has_the_picture(comparison, folder):
    (file,) = comparison.media("picture")
    assert file.read_bytes() == (folder / SWEEP / "comparison.png").read_bytes()


def test_run_that_was_copied_gets_another_id(workdir):
    write_run(Path("runs/a"), wandb_id="ida")
    shutil.copytree("runs/a", "runs/b")
    assert run_command("compare", "a", "b", "wandb.mode=offline") == 0
    (first,) = read_offline_runs(Path("runs/a"))
    (copy,) = read_offline_runs(Path("runs/b"))
    assert first.id == "ida"
    assert copy.id != "ida"
    assert copy.steps == first.steps


def test_runs_are_not_logged_by_default(workdir):
    write_run(Path("runs/a"))
    assert run_command("compare", "a") == 0
    assert not list(Path("runs").rglob("offline-run-*"))
