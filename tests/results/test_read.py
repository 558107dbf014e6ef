"""Reading runs and sweeps: which runs are one variant, labels, and damaged folders."""

import pytest
from comparison_helpers import KERNEL, LR, write_run, write_sweep

from common.errors import UserError
from results.read import read_curves, read_variants

LOGGING = {"wandb.mode": "online", "resume": False}
SAVING = {"checkpoint.every": 5}
REFUSED = {"seed": 9, "status": "refused"}


def labels(*folders) -> list[str]:
    return [variant.label for variant in read_variants(list(folders))]


def seeds(*folders) -> list[list[int]]:
    """The seeds of each variant."""
    return [[run.seed for run in variant.runs] for variant in read_variants(list(folders))]


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        pytest.param([{}, {"seed": 2}], [[1, 2]], id="seeds"),
        pytest.param([{}, {"seed": 2, "changes": LR}], [[1], [2]], id="value"),
        pytest.param([{}, {"seed": 2, "changes": LOGGING}], [[1, 2]], id="logging"),
        pytest.param([{}, {"seed": 2, "changes": SAVING}], [[1, 2]], id="checkpoints"),
        pytest.param([{}, {"seed": 2}, {}], [[1, 2], [1]], id="repeated run"),
        pytest.param([{"data": "x"}, {"seed": 2, "data": "y"}], [[1], [2]], id="text"),
        pytest.param([{"data": "x"}, REFUSED, {"seed": 2, "data": "x"}], [[1, 9, 2]], id="no text"),
        pytest.param([REFUSED, {"data": "x"}], [[9, 1]], id="no text at first"),
        pytest.param([{}, {"seed": 2, "world_size": 2}], [[1], [2]], id="processes"),
    ],
)
def test_runs_with_equal_configs_are_one_variant(tmp_path, runs, expected):
    assert seeds(*(write_run(tmp_path / f"{n}", **facts) for n, facts in enumerate(runs))) == (
        expected
    )


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (["finished", "finished"], "2 finished"),
        (["finished", "failed", "finished"], "2 finished, 1 failed"),
        (["refused", "refused"], "refused"),
        (["finished", "refused"], "1 finished, 1 refused"),
    ],
)
def test_status_of_a_variant_counts_its_runs(tmp_path, statuses, expected):
    runs = [write_run(tmp_path / f"{n}", n, status=s) for n, s in enumerate(statuses)]
    (variant,) = read_variants(runs)
    assert variant.status == expected


def test_label_of_a_single_run_is_its_name(tmp_path):
    assert labels(write_run(tmp_path / "a")) == ["a"]


def test_label_has_all_values_that_differ_and_choices_first(tmp_path):
    changes = {"model.n_layer": 3, "model.window": 8} | KERNEL
    runs = write_run(tmp_path / "a"), write_run(tmp_path / "b", changes=changes)
    assert labels(*runs) == [
        "a: attention=naive, model.n_layer=2",
        "b: attention=flex, model.n_layer=3, model.window=8",
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


@pytest.mark.parametrize(
    ("job", "label"),
    [
        ("model.window=_16,null_,model.n_head=2,seed=1", "model.window=_16,null_, model.n_head=2"),
        ("seed=1", "s"),
        ("seed=1,train.steps=2", "train.steps=2"),
        ("data.path=_.txt,seed=1-ab12cd", "data.path=_.txt-ab12cd"),
    ],
    ids=["list with commas", "only seeds", "seed first", "hash"],
)
def test_label_of_a_single_job_of_a_sweep(tmp_path, job, label):
    sweep = write_sweep(tmp_path / "s", [job])
    write_run(sweep / job)
    assert labels(sweep) == [label]


def test_label_has_the_name_of_the_sweep_beside_other_runs(sweep, tmp_path):
    other = write_run(tmp_path / "other", changes={"train.steps": 20})
    assert labels(sweep, other) == [
        "cmp/attention=flex",
        "cmp/attention=naive",
        "other: attention=naive, train.steps=20",
    ]


def test_swept_key_is_compared_although_runs_of_a_variant_may_differ_in_it(tmp_path):
    jobs = [f"checkpoint.every={n},seed={seed}" for n, seed in ((1, 1), (9, 1), (9, 2), (1, 2))]
    sweep = write_sweep(tmp_path / "s", jobs)
    for job in jobs:
        key, value = job.split(",")[0].split("=")
        write_run(sweep / job, int(job[-1]), changes={key: int(value)})
    assert labels(sweep) == ["checkpoint.every=1", "checkpoint.every=9"]
    assert [[run.folder.name for run in variant.runs] for variant in read_variants([sweep])] == [
        [jobs[0], jobs[3]],
        [jobs[1], jobs[2]],
    ]


def test_swept_key_that_ends_like_another_one_does_not_divide_a_variant(tmp_path):
    """Each run has its own `name`, which is also the end of tokenizer.name."""
    jobs = [f"tokenizer.name=byte,seed={seed}" for seed in (1, 2)]
    sweep = write_sweep(tmp_path / "s", jobs)
    for job in jobs:
        write_run(sweep / job, int(job[-1]), changes={"tokenizer.name": "byte"})
    assert seeds(sweep) == [[1, 2]]


def test_labels_of_a_sweep_whose_steps_have_changed_differ(tmp_path):
    sweep = write_sweep(tmp_path / "s", ["n=1,seed=1", "n=1,seed=2"])
    for seed, steps in enumerate((10, 20), 1):
        write_run(sweep / f"n=1,seed={seed}", seed, changes={"train.steps": steps})
    assert labels(sweep) == ["n=1: train.steps=10", "n=1: train.steps=20"]


@pytest.mark.parametrize(
    ("attention", "kernel"),
    [
        ({"resolved": "math", "flash_package": None}, "math"),
        ({"resolved": "flash", "flash_package": "FA3"}, "flash (FA3)"),
        (None, None),
    ],
)
def test_kernel_is_the_one_that_ran(tmp_path, attention, kernel):
    (variant,) = read_variants([write_run(tmp_path / "a", attention=attention)])
    assert variant.runs[0].kernel == kernel


def test_curve_has_the_rows_with_a_number(tmp_path):
    content = b"""{"step": 0, "val/loss": 3}
{"step": 1, "sample": "a"}
{"step": 2, "val/loss": null}
{"step": 3, "val/loss": 2.5}
"""
    (tmp_path / "metrics.jsonl").write_bytes(content)
    curves = read_curves(tmp_path)
    assert curves["val/loss"] == {0: 3.0, 3: 2.5}
    assert curves["train/loss"] == {}


@pytest.mark.parametrize("name", ["summary.json", "config.yaml", "sweep.json"])
def test_damaged_file_is_refused(tmp_path, name):
    folder = write_run(tmp_path / "a")
    (folder / name).write_text('{"status": [', encoding="utf-8")
    with pytest.raises(UserError, match=f"{name} cannot be read"):
        read_variants([folder])


def test_empty_config_is_refused(tmp_path):
    folder = write_run(tmp_path / "a")
    (folder / "config.yaml").write_text("", encoding="utf-8")
    with pytest.raises(UserError, match=r"config.yaml cannot be read"):
        read_variants([folder])


@pytest.mark.parametrize("line", ['{"st', '{"train/loss": 1.0}'], ids=["part", "no step"])
def test_damaged_metrics_are_refused(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n' + line, encoding="utf-8")
    with pytest.raises(UserError, match=r"metrics.jsonl cannot be read"):
        read_curves(tmp_path)


def test_unfinished_run_may_have_damaged_metrics(tmp_path):
    """A killed process can leave an incomplete last line."""
    killed = write_run(tmp_path / "killed", status="running")
    (killed / "metrics.jsonl").write_text('{"step": 4, "trai', encoding="utf-8")
    (variant,) = read_variants([killed])
    assert variant.timed("step_ms") == []


@pytest.mark.parametrize("name", ["nowhere", "."])
def test_folder_that_is_not_a_run_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"is not a run: .*set folders of runs"):
        read_variants([tmp_path / name])


def test_sweep_without_a_started_run_is_refused(tmp_path):
    with pytest.raises(UserError, match="set folders of runs"):
        read_variants([write_sweep(tmp_path / "s", ["seed=1"])])
