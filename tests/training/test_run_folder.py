"""Run folders: locks, names, status and search."""

import json
import math
import os
from pathlib import Path

import pytest
from data_helpers import write_file

from common.errors import TrainingFailed, UserError
from generation.run_paths import find_checkpoint, find_run
from training.distributed import Dist
from training.run_folder import RunFolder


def test_run_folder_is_locked_while_it_is_used(workdir):
    for file in ("config.yaml", "checkpoints/last.pt"):
        write_file(f"runs/a/{file}.1.partial", "")  # of a process that was killed
    with RunFolder("a", "", True, Dist()) as run:
        assert not [*Path().rglob("*.partial")]
        with pytest.raises(UserError, match="runs/a is being trained by another process"):
            RunFolder("a", "", True, Dist())
        run.start({"seed": 1}, {"device": "cpu", "best_val_loss": math.inf})
        run.end(3, is_interrupted=False)
    summary = json.loads((workdir / "runs/a/summary.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["error"], summary["device"]) == ("finished", None, "cpu")
    assert summary["best_val_loss"] is None, "JSON has no infinity"
    with pytest.raises(UserError, match="runs/a exists"):
        RunFolder("a", "", False, Dist())
    for content in ("null", "[1]", '{"sta'):
        write_file("runs/a/summary.json", content)
        with pytest.raises(
            UserError, match=r"runs/a/summary.json cannot be read .*; restore it, or remove it"
        ):
            RunFolder("a", "", True, Dist())


def test_unnamed_runs_of_the_same_second_get_different_folders(workdir):
    runs = [RunFolder(None, "label", True, Dist()) for _ in range(3)]
    assert len({run.name for run in runs}) == 3


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (UserError("no"), "refused", "no"),
        (TrainingFailed("nan"), "failed", "nan"),
        (KeyboardInterrupt("saved"), "interrupted", "saved"),
        (ValueError("odd"), "failed", "ValueError: odd"),
    ],
)
def test_summary_records_how_a_run_ended(workdir, error, status, message):
    with pytest.raises(type(error)), RunFolder("a", "", True, Dist()) as run:
        run.start({}, {})
        raise error
    summary = json.loads((workdir / "runs/a/summary.json").read_text(encoding="utf-8"))
    assert (summary["status"], summary["error"]) == (status, message)


def test_newest_run_with_a_checkpoint_is_found_also_in_sweeps(workdir):
    with pytest.raises(UserError, match=r"train one: python train.py"):
        find_run("last")
    for age, name in ((30, "old"), (10, "sweeps/s/seed=1"), (20, "middle")):
        os.utime(write_file(f"runs/{name}/checkpoints/last.pt", ""), (1e9 - age, 1e9 - age))
    (workdir / "runs/empty/checkpoints").mkdir(parents=True)
    assert str(find_run("last")) == "runs/sweeps/s/seed=1"
    assert str(find_run("old")) == "runs/old"
    (workdir / "runs/linked").symlink_to("old")
    assert str(find_run("linked")) == "runs/linked"
    for wrong in ("empty", "nothing", "/etc"):
        with pytest.raises(UserError, match="run="):
            find_run(wrong)


def test_wrong_name_of_a_run_gets_the_nearest_name(workdir):
    for age, name in ((30, "keep"), (10, "other"), (20, "sweeps/s/seed=1")):
        os.utime(write_file(f"runs/{name}/checkpoints/last.pt", ""), (1e9 - age, 1e9 - age))
    for wrong, nearest in (("kee", "keep"), ("sweeps/s/seed=2", "sweeps/s/seed=1"), ("x", "other")):
        with pytest.raises(
            UserError, match=f"run={wrong} has no checkpoint .*; set run={nearest}, for example"
        ):
            find_run(wrong)


def test_missing_checkpoint_is_refused_with_those_that_exist(workdir):
    for name in ("best", "other"):
        write_file(f"runs/a/checkpoints/{name}.pt", "")
    with pytest.raises(
        UserError,
        match=r"runs/a has no checkpoint last.pt; set run=runs/a checkpoint=best or other",
    ):
        find_checkpoint("a", "last")
    assert (
        find_checkpoint("a", "best").name
        == find_checkpoint("runs/a/checkpoints/best.pt", "last").name
        == "best.pt"
    )
