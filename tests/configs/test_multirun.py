"""Combinations of swept values, and the jobs of a sweep."""

import pytest
from data_helpers import write_file
from helpers import TINY

from common.errors import UserError
from configs.cli import parse_config
from configs.compose import hydra_initialized, parse_word
from configs.multirun import list_combinations, make_jobs
from sweep.jobs import Job
from training.presets import parse_preset
from training.run_folder import write_config


def combine(words: list[str]) -> list[dict[str, str]]:
    """Combinations of the values of swept words."""
    with hydra_initialized("train", None):
        overrides = [parse_word("train", word) for word in words]
        return list_combinations({override.key_or_group: override for override in overrides})


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("optimizer.lr=1e-3,1e-2", ["optimizer.lr=0.001", "optimizer.lr=0.01"]),
        ("optimizer.betas=[0.9,1],[0.8,1]", ["optimizer.betas=[0.9,1]", "optimizer.betas=[0.8,1]"]),
        ("dtype=float32,bfloat16", ["dtype=float32", "dtype=bfloat16"]),
        ("seed=range(1,3)", ["seed=1", "seed=2"]),
        ("attention=glob(*, exclude=[a*,s*,f*,c*])", ["attention=naive"]),
        ("optimizer=glob(*)", ["optimizer=adamw", "optimizer=muon"]),
        ("data.path=[a.txt],[b.txt]", ["data.path=[a.txt]", "data.path=[b.txt]"]),
    ],
)
def test_values_of_a_swept_word(word, expected):
    combinations = combine([word, "model.name=a,b"])
    key = word.partition("=")[0]
    assert list(dict.fromkeys(words[key] for words in combinations)) == expected


def test_every_combination_is_a_job_and_the_seed_changes_slowest():
    assert [list(words.values()) for words in combine(["attention=naive,sdpa", "seed=1,2"])] == [
        ["seed=1", "attention=naive"],
        ["seed=1", "attention=sdpa"],
        ["seed=2", "attention=naive"],
        ["seed=2", "attention=sdpa"],
    ]


def start_sweep(*words: str) -> list[Job]:
    """Make the jobs of a sweep. Each writes its config, as a run does."""
    swept = [word for word in words if "," in word]
    fixed = [*TINY, "name=s", *(word for word in words if "," not in word)]
    jobs = make_jobs(combine(swept), fixed, None)
    for job in jobs:
        job.folder.mkdir(parents=True, exist_ok=True)
        write_config(job.folder, job.config)
    return jobs


def test_job_is_a_run_in_the_folder_of_the_sweep(workdir):
    job, _ = start_sweep("attention=naive,sdpa")
    assert str(job.folder) == "runs/sweeps/s/attention=naive"
    assert job.config["name"] == "sweeps/s/attention=naive"
    assert parse_config("train", "", job.arguments).name == "sweeps/s/attention=naive"


@pytest.mark.parametrize(("words", "group"), [([], "s"), (["wandb.group=mine"], "mine")])
def test_wandb_group_of_a_job_is_the_sweep_or_the_one_of_the_user(words, group, workdir):
    job, _ = start_sweep("seed=1,2", *words)
    assert job.config["wandb"]["group"] == group
    assert parse_config("train", "", job.arguments).wandb.group == group


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        (
            ["attention=naive,sdpa", "seed=1"],
            ["attention=naive,sdpa", "seed=1,2"],
            [
                "attention=naive",
                "attention=sdpa",
                "attention=naive,seed=2",
                "attention=sdpa,seed=2",
            ],
        ),
        (
            ["attention=naive,sdpa"],
            ["attention=naive", "seed=1337,2"],
            ["attention=naive", "seed=2"],
        ),
        (["train.steps=6,9"], ["train.steps=6,12"], ["train.steps=6", "train.steps=12"]),
        (["train.steps=9,6", "seed=1"], ["seed=1,2"], ["train.steps=6", "seed=2"]),
        (["seed=1,2"], ["seed=1,2", "train.steps=9"], ["seed=1", "seed=2"]),
    ],
    ids=["one value", "default value", "swept steps", "swept steps with the default", "more steps"],
)
def test_job_of_an_extended_sweep_has_the_name_of_an_earlier_job_with_its_config(
    workdir, before, after, names
):
    start_sweep(*before)
    assert [job.name for job in start_sweep(*after)] == names


def test_recipes_that_differ_in_the_number_of_steps_are_different_jobs(workdir):
    write_file("own/experiment/short.yaml", "train: {steps: 6}")
    write_file("own/experiment/long.yaml", "train: {steps: 9}")
    combinations = [{"experiment": "experiment=short"}, {"experiment": "experiment=long"}]
    for _ in range(2):  # the second command finds the configs of the first
        jobs = make_jobs(combinations, [*TINY[-2:], "name=s"], "own")
        assert [job.name for job in jobs] == ["experiment=short", "experiment=long"]
        assert [job.config["train"]["steps"] for job in jobs] == [6, 9]
        for job in jobs:
            job.folder.mkdir(parents=True, exist_ok=True)
            write_config(job.folder, job.config)


def test_jobs_find_the_yaml_files_of_the_user(workdir):
    write_file("own/experiment/short.yaml", "train: {steps: 6}")
    words = [*TINY[-2:], "name=s", "experiment=short"]
    job, _ = make_jobs([{"seed": "seed=1"}, {"seed": "seed=2"}], words, "own")
    assert parse_config("train", "", job.arguments).train.steps == 6


def test_jobs_get_the_preset_that_the_sweep_has_selected(workdir):
    fixed = [f"data.path={write_file('text.txt', 'abc ' * 1000)}", "train.minutes=1"]
    jobs = make_jobs(combine(["seed=1,2"]), fixed, None)
    (preset,) = {job.config["preset"] for job in jobs}
    assert parse_preset(preset) is not None
    assert all(f"preset={preset}" in job.arguments for job in jobs)


@pytest.mark.parametrize(
    ("swept", "fixed"),
    [
        ("train.minutes=1,9", ["data.path=text.txt"]),
        ("data.path=[text.txt],[long.txt]", ["train.minutes=1"]),
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
            "configs.preset.measure_speed",
            lambda device, dtype, _, speed=speed: speed * (9 if dtype == "bfloat16" else 1),
        )
        jobs = make_jobs(combine([swept]), [*fixed, "name=s"], None)
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
    combinations = [{"seed": "seed=1"}, {"seed": "seed=2"}]
    first, _ = make_jobs(combinations, TINY, None)
    second, _ = make_jobs(combinations, TINY, None)
    assert first.folder.parent != second.folder.parent
    assert first.folder.parent.name.endswith("-text-modern")


@pytest.mark.parametrize("content", ["[1]", "null", "a: ["])
def test_damaged_config_of_a_job_is_refused(workdir, content):
    write_file("runs/sweeps/s/seed=1/config.yaml", content)
    with pytest.raises(UserError, match=r"runs/sweeps/s/seed=1/config.yaml cannot be read"):
        start_sweep("seed=1,2")


def test_job_with_text_in_quotes_has_a_plain_name_and_the_same_text_in_its_process(workdir):
    jobs = make_jobs(combine(["wandb.project='1e3','007'"]), [*TINY, "name=s"], None)
    assert [job.name for job in jobs] == ["wandb.project=1e3", "wandb.project=007"]
    assert [job.config["wandb"]["project"] for job in jobs] == ["1e3", "007"]
    assert parse_config("train", "", jobs[0].arguments).wandb.project == "1e3"


def test_sweep_under_torchrun_is_refused(workdir, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as stopped:
        parse_config("train", "", ["-m", *TINY, "seed=1,2"])
    assert stopped.value.code == 2
    assert "torchrun" in capsys.readouterr().err
