"""Names of runs, and the search for a run or a checkpoint."""

import os
from pathlib import Path

import pytest
from data_helpers import write_file

from common.errors import UserError
from common.run_paths import (
    check_name,
    find_checkpoint,
    find_run,
    make_new_folder,
)


def write_run(name: str, age: int = 0, checkpoint: str = "last") -> None:
    """Write a run whose checkpoint is `age` seconds old."""
    path = write_file(f"runs/{name}/checkpoints/{checkpoint}.pt", "")
    os.utime(path, (1e9 - age, 1e9 - age))


@pytest.fixture
def runs(workdir) -> None:
    """Three runs, and a run without a checkpoint."""
    write_run("old", age=30)
    write_run("sweeps/s/seed=1", age=10)
    write_run("middle", age=20)
    (workdir / "runs/empty/checkpoints").mkdir(parents=True)


def test_last_is_the_newest_run_with_a_checkpoint_also_in_sweeps(runs):
    assert find_run("last") == Path("runs/sweeps/s/seed=1")


def test_last_of_copied_runs_with_equal_times_is_the_last_name(workdir):
    for number in (9, *range(9)):
        write_run(f"2026-{number}")
    assert find_run("last") == Path("runs/2026-9")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("old", "runs/old"),
        ("runs/old", "runs/old"),
        ("sweeps/s/seed=1", "runs/sweeps/s/seed=1"),
        ("runs/old/checkpoints/last.pt", "runs/old"),
    ],
)
def test_run_is_found_by_its_name_its_path_or_its_checkpoint(runs, name, expected):
    assert find_run(name) == Path(expected)


@pytest.mark.parametrize(
    ("wrong", "nearest"),
    [
        ("ol", "old"),
        ("runs/ol", "old"),
        ("sweeps/s/seed=2", "sweeps/s/seed=1"),
        ("x", "sweeps/s/seed=1"),
        ("empty", "sweeps/s/seed=1"),
        ("/etc", "sweeps/s/seed=1"),
    ],
)
def test_run_without_a_checkpoint_is_refused_with_the_nearest_name(runs, wrong, nearest):
    with pytest.raises(UserError, match=f"run={wrong} has no checkpoint .* set run={nearest},"):
        find_run(wrong)


@pytest.fixture
def two_checkpoints(workdir) -> None:
    write_run("a", checkpoint="best")
    write_run("a", checkpoint="step-000010")


@pytest.mark.parametrize(
    ("run", "checkpoint", "expected"),
    [
        ("a", "best", "best.pt"),
        ("a", "step-000010", "step-000010.pt"),
        ("a", "step-10", "step-000010.pt"),
        ("runs/a/checkpoints/best.pt", "last", "best.pt"),
    ],
    ids=["best", "file", "step", "path"],
)
def test_checkpoint_is_found_by_its_name_or_its_path(two_checkpoints, run, checkpoint, expected):
    assert find_checkpoint(run, checkpoint) == Path("runs/a/checkpoints", expected)


def test_missing_checkpoint_is_refused_with_those_that_exist(two_checkpoints):
    advice = "set run=runs/a checkpoint=best or step-000010"
    with pytest.raises(UserError, match=f"runs/a has no checkpoint last.pt; {advice}"):
        find_checkpoint("a", "last")


@pytest.mark.parametrize("name", ["a", "A.b_c-1", "sweeps/s/attention=flash,seed=1"])
def test_name_that_can_be_a_folder_is_accepted(name):
    check_name(name)


@pytest.mark.parametrize(
    "name", ["a/b", "..", "../a", ".a", "-a", "a b", "", "sweeps/../x=1", "sweeps", "bench", "last"]
)
def test_name_that_cannot_be_a_folder_or_is_reserved_is_refused(name):
    with pytest.raises(UserError, match=r"is not a folder name|is reserved"):
        check_name(name)


def test_new_folders_of_the_same_second_have_different_names(workdir, monkeypatch):
    monkeypatch.setattr("time.strftime", lambda form: "20260102-030405")
    names = [make_new_folder(Path("runs"), "label") for _ in range(3)]
    stem = "20260102-030405-label"
    assert names == [stem, f"{stem}-2", f"{stem}-3"]
    assert all(Path("runs", name).is_dir() for name in names)
