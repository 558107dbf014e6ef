"""Reading runs and sweeps: which runs are one setting, labels, and damaged folders."""

import pytest
from comparison_helpers import KERNEL, LR, write_run, write_sweep

from common.errors import UserError
from results.read import read_settings


def labels(*folders) -> list[str]:
    return [setting.label for setting in read_settings(list(folders))]


def seeds(*folders) -> list[list[int]]:
    """The seeds of each setting."""
    return [[run.seed for run in setting.runs] for setting in read_settings(list(folders))]


def test_runs_that_differ_in_the_seed_are_one_setting(tmp_path):
    assert seeds(write_run(tmp_path / "a", 1), write_run(tmp_path / "b", 2)) == [[1, 2]]


def test_runs_that_differ_in_a_value_are_two_settings(tmp_path):
    assert seeds(write_run(tmp_path / "a"), write_run(tmp_path / "b", changes=LR)) == [[1], [1]]


def test_ways_to_run_and_to_log_do_not_make_a_setting(tmp_path):
    changes = {"wandb.mode": "online", "resume": False}
    assert seeds(write_run(tmp_path / "a"), write_run(tmp_path / "b", 2, changes=changes)) == [
        [1, 2]
    ]


def test_repeated_run_is_another_setting(tmp_path):
    runs = [write_run(tmp_path / name, seed) for name, seed in (("a", 1), ("b", 2), ("c", 1))]
    assert seeds(*runs) == [[1, 2], [1]]


def test_changed_text_is_another_setting(tmp_path):
    runs = [write_run(tmp_path / f"a{n}", n, data=f"text-{n}") for n in (1, 2)]
    assert seeds(*runs) == [[1], [2]]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2)])
def test_refused_run_without_data_belongs_to_the_setting(tmp_path, order):
    runs = [
        write_run(tmp_path / "a", 0, data="text"),
        write_run(tmp_path / "b", 1, status="refused"),
        write_run(tmp_path / "c", 2, data="text"),
    ]
    assert seeds(*(runs[i] for i in order)) == [list(order)]


def test_number_of_processes_makes_a_setting(tmp_path):
    runs = [write_run(tmp_path / f"run{n}", n, world_size=n) for n in (1, 2)]
    assert labels(*runs) == ["run1: world_size=1", "run2: world_size=2"]


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (["finished", "finished"], "2 finished"),
        (["finished", "failed", "finished"], "2 finished, 1 failed"),
        (["refused", "refused"], "refused"),
        (["finished", "refused"], "1 finished, 1 refused"),
    ],
)
def test_status_of_a_setting_counts_its_runs(tmp_path, statuses, expected):
    runs = [write_run(tmp_path / f"{n}", n, status=s) for n, s in enumerate(statuses)]
    (setting,) = read_settings(runs)
    assert setting.status == expected


def test_label_of_a_single_run_is_its_name(tmp_path):
    assert labels(write_run(tmp_path / "a")) == ["a"]


def test_label_has_the_values_that_differ(tmp_path):
    runs = write_run(tmp_path / "a"), write_run(tmp_path / "b", changes=LR)
    assert labels(*runs) == ["a: optimizer.lr=0.001", "b: optimizer.lr=0.1"]


def test_choices_are_listed_first_and_without_the_name_of_their_key(tmp_path):
    changes = {"model.n_layer": 3} | KERNEL
    runs = write_run(tmp_path / "a"), write_run(tmp_path / "b", changes=changes)
    assert labels(*runs) == [
        "a: attention=naive, model.n_layer=2",
        "b: attention=flex, model.n_layer=3",
    ]


def test_values_are_compared_with_runs_that_have_the_same_choice(tmp_path):
    muon = {"optimizer.name": "muon", "optimizer.lr": 0.02, "optimizer.beta": 0.95}
    runs = [
        write_run(tmp_path / "a"),
        write_run(tmp_path / "b", changes=LR),
        write_run(tmp_path / "c", changes=muon),
    ]
    assert labels(*runs) == [
        "a: optimizer=adamw, optimizer.lr=0.001",
        "b: optimizer=adamw, optimizer.lr=0.1",
        "c: optimizer=muon",
    ]


def test_label_has_all_values_that_differ(tmp_path):
    changes = {f"model.value{n}": n for n in range(6)}
    (_, label) = labels(write_run(tmp_path / "a"), write_run(tmp_path / "b", changes=changes))
    values = [f"model.value{n}={n}" for n in range(6)]
    assert label == f"b: {', '.join(values)}"


@pytest.fixture
def sweep(tmp_path):
    """A sweep of two backends and two seeds. A job of a third backend has not started."""
    jobs = [f"attention={name},seed={seed}" for name in ("flex", "naive") for seed in (1, 2)]
    folder = write_sweep(tmp_path / "cmp", [*jobs, "attention=flash,seed=1"])
    for job in jobs:
        name, seed = (word.split("=")[1] for word in job.split(","))
        write_run(folder / job, int(seed), changes={"attention.backend": name})
    return folder


def test_label_of_a_sweep_has_the_swept_values_without_the_seed(sweep):
    assert labels(sweep) == ["attention=flex", "attention=naive"]


def test_swept_lists_keep_their_commas(tmp_path):
    job = "model.window=_16,null_,optimizer.lr=0.1,seed=1"
    sweep = write_sweep(tmp_path / "s", [job])
    write_run(sweep / job)
    assert labels(sweep) == ["model.window=_16,null_, optimizer.lr=0.1"]


def test_label_of_a_sweep_over_seeds_is_its_name(tmp_path):
    sweep = write_sweep(tmp_path / "seeds", ["seed=1"])
    write_run(sweep / "seed=1")
    assert labels(sweep) == ["seeds"]


def test_label_has_the_name_of_the_sweep_beside_other_runs(sweep, tmp_path):
    other = write_run(tmp_path / "other", changes={"train.steps": 20})
    assert labels(sweep, other) == [
        "cmp/attention=flex",
        "cmp/attention=naive",
        "other: attention=naive, train.steps=20",
    ]


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("summary.json", '{"status": ', "summary.json cannot be read"),
        ("summary.json", "[]", "summary.json cannot be read"),
        ("summary.json", "null", "summary.json cannot be read"),
        ("summary.json", "{}", "a has status=null, of a wrong type"),
        (
            "summary.json",
            '{"status": "finished", "last_val_loss": "low"}',
            "a has last_val_loss=low, of a wrong type",
        ),
        ("config.yaml", "a: [1", "config.yaml cannot be read"),
        ("config.yaml", "null", "config.yaml cannot be read"),
        ("config.yaml", "a: 1", "a has seed=null, of a wrong type"),
        ("sweep.json", "[1]", "sweep.json cannot be read"),
        ("sweep.json", "{}", "no run to compare"),
    ],
)
def test_damaged_file_is_refused(tmp_path, file, text, message):
    folder = write_run(tmp_path / "a")
    (folder / file).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=message) as refusal:
        read_settings([folder])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ['{"step": 1}\n{"st', '{"train/loss": 1}', '{"train/loss": "a"}'])
def test_damaged_metrics_are_refused(tmp_path, text):
    folder = write_run(tmp_path / "a")
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    (setting,) = read_settings([folder])
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be read"):
        _ = setting.runs[0].curves


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_folder_that_is_not_a_run_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"is not a run: .*set folders of runs"):
        read_settings([tmp_path / name])


def test_no_folder_is_refused():
    with pytest.raises(UserError, match="set folders of runs"):
        read_settings([])
