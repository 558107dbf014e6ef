"""Combinations of swept values, and the names of the jobs."""

import pytest
from data_helpers import write_file
from helpers import TINY

from common.errors import UserError
from comparison.sweep.launch import find_missing_jobs
from configs.cli import parse_config
from configs.compose import hydra_initialized, parse_word
from configs.multirun import list_combinations, make_jobs
from training.run_folder import write_config


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["attention=naive,sdpa", "seed=range(1,3)"],
            [[f"seed={n}", f"attention={name}"] for n in (1, 2) for name in ("naive", "sdpa")],
        ),
        (
            ["train.steps=5", "optimizer.betas=[0.9,0.95],[0.9,0.99]"],
            [["optimizer.betas=[0.9,0.95]"], ["optimizer.betas=[0.9,0.99]"]],
        ),
        (
            ["wandb.project=1e3,007,a", "dtype=float32,bfloat16"],
            [
                [f"wandb.project={p}", f"dtype={d}"]
                for p in ("'1e3'", "'007'", "a")
                for d in ("float32", "bfloat16")
            ],
        ),
        (["optimizer.lr=1e-3,1e-2"], [["optimizer.lr=0.001"], ["optimizer.lr=0.01"]]),
        (
            ["optimizer=glob(*, exclude=s*)", "data.path=a,b.txt"],
            [["optimizer=adamw"], ["optimizer=muon"]],
        ),
    ],
)
def test_combinations_of_swept_values(words, expected):
    assert [list(combination.values()) for combination in combine(words)] == expected


def combine(words: list[str]) -> list[dict[str, str]]:
    with hydra_initialized("train", None):
        parsed = {word: parse_word("train", word) for word in words}
        return list_combinations(
            {word: parsed[word] for word in words if parsed[word].is_sweep_override()}
        )


def start_sweep(*words: str) -> list[str]:
    """Names of the jobs that a sweep starts. Each writes its config, as a run does."""
    _, jobs = make_jobs(
        None, combine(words), [*TINY, "name=s", *[word for word in words if "," not in word]], None
    )
    for job in find_missing_jobs(jobs[0].folder.parent, jobs):
        job.folder.mkdir(exist_ok=True)
        write_config(job.folder, job.config)
    assert [job.config["name"] for job in jobs] == [f"sweeps/s/{job.name}" for job in jobs]
    assert all(f"name=sweeps/s/{job.name}" in job.arguments for job in jobs)
    return [job.name for job in jobs]


@pytest.mark.parametrize(
    ("before", "after", "names"),
    [
        (["attention=naive,sdpa", "seed=1"], ["attention=naive,sdpa", "seed=1,2"],
         ["attention=naive", "attention=sdpa", "attention=naive,seed=2", "attention=sdpa,seed=2"]),
        (["attention=naive,sdpa"], ["attention=naive", "seed=1337,2"], ["attention=naive", "seed=2"]),
        (["train.steps=6,9"], ["train.steps=6,12"], ["train.steps=6", "train.steps=12"]),
        (["train.steps=9,6", "seed=1"], ["seed=1,2"], ["train.steps=6", "seed=2"]),
        (["seed=1,2"], ["seed=1,2", "train.steps=9"], ["seed=1", "seed=2"]),
    ],
    ids=["one value", "default value", "swept steps", "swept steps with the default", "more steps"],
)  # fmt: skip
def test_job_of_an_extended_sweep_has_the_name_of_an_earlier_job_with_its_config(
    workdir, before, after, names
):
    start_sweep(*before)
    assert start_sweep(*after) == names


def test_recipes_that_differ_in_the_number_of_steps_are_different_jobs(workdir):
    for name, steps in (("short", 6), ("long", 9)):
        write_file(f"own/experiment/{name}.yaml", f"train: {{steps: {steps}}}")
    combinations = [{"experiment": "experiment=short"}, {"experiment": "experiment=long"}]
    for count in (1, 2):  # the second command finds the config of the first job
        _, jobs = make_jobs(None, combinations, ["name=s"], "own")
        assert [job.name for job in jobs] == ["experiment=short", "experiment=long"]
        jobs[0].folder.mkdir(parents=True, exist_ok=True)
        write_config(jobs[0].folder, jobs[0].config)
        assert [job.config["train"]["steps"] for job in jobs] == [6, 9], count


@pytest.mark.parametrize("content", ["[1]", "null", "a: ["])
def test_damaged_config_of_a_job_is_refused(workdir, content):
    write_file("runs/sweeps/s/seed=1/config.yaml", content)
    with pytest.raises(UserError, match=r"runs/sweeps/s/seed=1/config.yaml cannot be read"):
        start_sweep("seed=1,2")


def test_job_with_a_quoted_word_has_a_plain_name_and_the_same_text_in_its_process(workdir):
    with hydra_initialized("train", None):
        word = "wandb.project=1e3,007"
        combinations = list_combinations({word: parse_word("train", word)})
    _, jobs = make_jobs("s", combinations, ["data.revision=null"], None)
    assert [job.name for job in jobs] == ["wandb.project=1e3", "wandb.project=007"]
    assert [job.config["wandb"]["project"] for job in jobs] == ["1e3", "007"]
    assert parse_config("train", "", jobs[0].arguments).wandb.project == "1e3"
