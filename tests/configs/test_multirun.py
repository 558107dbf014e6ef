"""Combinations of swept values, and the jobs of a sweep."""

import pytest
from config_helpers import name_case, refuse
from data_helpers import write_file
from helpers import TEXT, TINY

from common.errors import UserError
from configs.cli import parse_config
from configs.multirun import list_values, make_jobs
from sweep.jobs import Job
from training.presets import parse_preset
from training.run_folder import write_config

SWEEP = ["-m", "seed=1,2"]


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("optimizer.lr=1e-3,1e-2", ["1e-3", "1e-2"]),
        ("model.bias=false,true", ["false", "true"]),
        ("wandb.tags=[1e3],[1.10, true]", ["[1e3]", "[1.10, true]"]),
        ("optimizer.betas=[0.9,1],[0.8,1]", ["[0.9,1]", "[0.8,1]"]),
        ("dtype=float32,bfloat16", ["float32", "bfloat16"]),
        ("seed=range(1,3)", ["1", "2"]),
        ("attention=glob(*, exclude=[a*,s*,f*,c*])", ["naive"]),
        ("optimizer=glob(*)", ["adamw", "muon"]),
        ("train.minutes=null,5", ["null", "5"]),
        ("data.path=a.txt,texts/*.txt", ["a.txt", "texts/*.txt"]),
        ("data.path='a, b.txt',c.txt", ["a, b.txt", "c.txt"]),
        ('data.path=["a, b.txt"],["c.txt"]', ['["a, b.txt"]', '["c.txt"]']),
        ("wandb.project='1e3','007'", ["1e3", "007"]),
        ("data.path=北.txt,南.txt", ["北.txt", "南.txt"]),
        ("data.path=a (1).txt, b.txt", ["a (1).txt", "b.txt"]),
        ("eval.sample.stop=f(a, b):", ["f(a, b):"]),
        # one value
        ("data.path='a, b.txt'", ["'a, b.txt'"]),
        ("data.path=a (1).txt", ["a (1).txt"]),
        ("data.separator=???", ["???"]),
        ("wandb.project=007", ["007"]),
        ("wandb.tags=[a,b]", ["[a,b]"]),
    ],
)
def test_values_of_a_word(word, values):
    assert list_values([word]) == {word.partition("=")[0]: values}


def start_sweep(*words: str, config_dir: str | None = None) -> list[Job]:
    """Make the jobs of a sweep. Each writes its config, as a run does."""
    jobs = make_jobs([*TINY, "name=s", *words], config_dir)
    for job in jobs:
        job.folder.mkdir(parents=True, exist_ok=True)
        write_config(job.folder, job.config)
    return jobs


def test_every_combination_is_a_job_and_every_second_seed_has_the_reverse_order(workdir):
    assert [job.name for job in start_sweep("attention=naive,sdpa", "seed=1,2,3")] == [
        "attention=naive,seed=1",
        "attention=sdpa,seed=1",
        "attention=sdpa,seed=2",
        "attention=naive,seed=2",
        "attention=naive,seed=3",
        "attention=sdpa,seed=3",
    ]


def test_automatic_seeds_are_those_up_to_the_maximum(workdir):
    jobs = start_sweep("attention=naive,sdpa", "seed=auto", "sweep.max_seeds=4")
    assert [job.config["seed"] for job in jobs] == [1, 1, 2, 2, 3, 3, 4, 4]
    assert jobs[0].name == "attention=naive,seed=1"
    assert {job.setting for job in jobs} == {job.setting for job in jobs[:2]}


def test_last_word_for_the_seed_counts(workdir):
    jobs = start_sweep("attention=naive,sdpa", "seed=auto", "seed=5,6")
    assert [job.config["seed"] for job in jobs] == [5, 5, 6, 6]


def test_job_of_an_earlier_version_without_a_new_key_keeps_its_name(workdir):
    (job, _) = start_sweep("attention=naive,sdpa")
    config = job.config | {"model": {**job.config["model"]}}
    del config["model"]["rotary_fraction"], config["sweep"]
    renamed = job.folder.with_name("attention=first")
    job.folder.rename(renamed)
    write_config(renamed, config)
    assert make_jobs([*TINY, "name=s", "attention=naive,sdpa"], None)[0].name == "attention=first"


def test_higher_maximum_of_seeds_continues_the_same_jobs(workdir):
    words = ["attention=naive,sdpa", "seed=auto"]
    job, *_ = start_sweep(*words, "sweep.max_seeds=3")
    (job.folder / "checkpoints").mkdir()
    (job.folder / "checkpoints/last.pt").touch()
    write_file(f"{job.folder}/summary.json", '{"status": "finished"}')
    same_job, other_job, *_ = make_jobs([*TINY, "name=s", *words, "sweep.max_seeds=4"], None)
    same_job.check_folder()
    assert (same_job.is_done(), other_job.is_done()) == (True, False)


def test_job_is_a_run_in_the_folder_of_the_sweep(workdir):
    job, _ = start_sweep("attention=naive,sdpa")
    assert str(job.folder) == "runs/sweeps/s/attention=naive"
    assert job.config["name"] == "sweeps/s/attention=naive"
    assert parse_config("train", "", job.arguments).name == "sweeps/s/attention=naive"


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        (["seed=1", "attention=naive,sdpa"], ["seed=1,2"], ["seed=1", "seed=2"]),
        (
            ["attention=auto,sdpa", "seed=1"],
            ["attention=auto", "seed=1,2"],
            ["attention=auto", "seed=2"],
        ),
        (["train.steps=6,9"], ["train.steps=6,12"], ["train.steps=6", "train.steps=12"]),
        (["train.steps=9,6", "seed=1"], ["seed=1,2"], ["train.steps=6", "seed=2"]),
        (["seed=1,2"], ["seed=1,2", "train.steps=9"], ["seed=1", "seed=2"]),
    ],
    ids=["other values", "one value", "swept steps", "swept steps with the default", "more steps"],
)
def test_job_of_an_extended_sweep_has_the_name_of_an_earlier_job_with_its_config(
    workdir, before, after, names
):
    start_sweep(*before)
    assert [job.name for job in start_sweep(*after)] == names


def test_jobs_of_recipes_find_the_yaml_files_of_the_user(workdir):
    write_file("own/experiment/short.yaml", "wandb: {project: a}")
    write_file("own/experiment/long.yaml", "wandb: {project: b}")
    for _ in range(2):  # the second command finds the configs of the first
        jobs = start_sweep("experiment=short,long", config_dir="own")
        assert [job.name for job in jobs] == ["experiment=short", "experiment=long"]
        assert [job.config["wandb"]["project"] for job in jobs] == ["a", "b"]
        assert parse_config("train", "", jobs[1].arguments).wandb.project == "b"


def test_job_gets_swept_text_as_typed(workdir):
    jobs = start_sweep("wandb.project='a, b','007'")
    assert [job.name for job in jobs] == ["wandb.project=a,_b", "wandb.project=007"]
    for job, project in zip(jobs, ["a, b", "007"], strict=True):
        assert job.config["wandb"]["project"] == project
        assert parse_config("train", "", job.arguments).wandb.project == project


@pytest.mark.parametrize(
    ("word", "values"),
    [
        ("data.path=[x/a.txt],[x_a.txt]", ["[x/a.txt]", "[x_a.txt]"]),
        ('data.path=["北.txt"],["南.txt"]', [["北.txt"], ["南.txt"]]),
        ("wandb.entity=a+b,'a b','a/b'", ["a+b", "a b", "a/b"]),
    ],
)
def test_jobs_of_different_values_have_different_names(word, values, workdir):
    for path in ("x/a.txt", "[x/a.txt]", "[x_a.txt]", "北.txt", "南.txt"):
        write_file(path, TEXT)
    section, key = word.partition("=")[0].split(".")
    jobs = start_sweep(word)
    assert [job.config[section][key] for job in jobs] == values
    assert len({job.name for job in jobs}) == len(values)
    assert [job.name for job in start_sweep(word)] == [job.name for job in jobs]


def test_speed_is_measured_once_and_jobs_get_the_preset(workdir, monkeypatch):
    measured = []
    monkeypatch.setattr(
        "training.speed.measure_flops_per_second", lambda *_: measured.append(1) or 1e11
    )
    jobs = make_jobs(["data.path=text.txt", "train.minutes=1", "seed=1,2", "device=cpu"], None)
    (preset,) = {job.config["preset"] for job in jobs}
    assert parse_preset(preset) is not None
    assert all(f"preset={preset}" in job.arguments for job in jobs)
    assert len(measured) == 1


@pytest.mark.parametrize(
    ("swept", "fixed"),
    [
        ("train.minutes=1,9", ["data.path=text.txt"]),
        ("data.path=text.txt,long.txt", ["train.minutes=1"]),
        ("data.text_bytes=1000,1000000", ["train.minutes=1", "data=hub", "data.repo=owner/name"]),
        ("dtype=float32,bfloat16", ["train.minutes=1", "data.path=text.txt"]),
    ],
)
def test_jobs_of_a_restarted_sweep_keep_the_preset_of_their_text_and_time(
    swept, fixed, workdir, monkeypatch
):
    write_file("text.txt", "abc " * 1000)
    write_file("long.txt", "abc " * 100_000)
    presets = []
    for speed in (1e11, 2e11):  # of two measurements
        monkeypatch.setattr(
            "training.presets.measure_speed",
            lambda device, dtype, _, speed=speed: speed * (9 if dtype == "bfloat16" else 1),
        )
        jobs = make_jobs([*fixed, swept, "name=s"], None)
        presets.append([job.config["preset"] for job in jobs])
        for job in jobs:
            job.folder.mkdir(parents=True, exist_ok=True)
            write_config(job.folder, job.config)
    assert presets[0] == presets[1]
    assert presets[0][0] != presets[0][1]


def test_sweep_with_the_name_of_a_run_is_refused(workdir):
    write_file("runs/s/config.yaml", "preset: 20kB")
    with pytest.raises(UserError, match="s is a run; set another name for the sweep"):
        start_sweep("seed=1,2")


def test_sweep_without_a_name_gets_a_new_folder(workdir):
    first, _ = make_jobs([*TINY, "seed=1,2"], None)
    second, _ = make_jobs([*TINY, "seed=1,2"], None)
    assert first.folder.parent != second.folder.parent
    assert first.folder.parent.name.endswith("-text-modern")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["-m", "seed=1"], ("several values", "seed=1,2,3, or remove -m")),
        ([*SWEEP, "data.path=text.txt", "model.n_embd=96,97"], ("model.n_embd=97", "n_head=2")),
        ([*SWEEP, "data.path=text.txt", "name=a/b"], ("name='a/b'", "use up to 100 letters")),
        ([*SWEEP, "data.path=text.txt,missing.txt"], ("data.path=missing.txt", "set a file")),
        (["-m", "seed=1,2,1"], ("seed=1", "list it once")),
        (["-m", "seed=auto"], ("several values for at least one key",)),
        (["seed=auto", "model.window=null,32"], ("seed=auto", "need -m")),
        (
            [*SWEEP, *(f"{key}={'a' * 99},{'b' * 99}" for key in ("model.name", "data.name"))],
            ("is too long", "sweep fewer keys"),
        ),
        ([*SWEEP, "--cfg", "job"], ("--cfg", "remove -m")),
        ([*SWEEP, "plan=True"], ("plan=true", "remove -m")),
        ([*SWEEP, "hydra.launcher.partition=gpu"], ("hydra.launcher.partition",)),
        (["-m", "optimizer.lr=interval(0,1)"], ("several values",)),
    ],
    ids=name_case,
)
def test_invalid_sweep_is_refused_before_anything_is_written(words, parts, workdir, capsys):
    before = sorted(workdir.rglob("*"))
    message = refuse(capsys, "train", *words)
    assert all(part in message for part in parts), message
    assert sorted(workdir.rglob("*")) == before


def test_sweep_under_torchrun_is_refused(workdir, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "torchrun" in refuse(capsys, "train", *SWEEP)
