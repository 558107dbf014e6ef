"""Hyperparameter search: ranges, suggestions, continuation, failed trials, and a search with real processes."""

import json
import math
import re
import sys
from pathlib import Path

import pytest
from helpers import TINY, run_command

from common.errors import UserError
from common.files import write_json
from comparison.sweep import search
from comparison.sweep.jobs import Job, Outcome
from comparison.sweep.search import make_distribution, run_search
from configs.compose import hydra_initialized, parse_word
from generation.run_paths import SWEEPS
from training.run_folder import write_config

optuna = pytest.importorskip("optuna")
FLOAT, INT = optuna.distributions.FloatDistribution, optuna.distributions.IntDistribution
CHOICE = optuna.distributions.CategoricalDistribution
SPACE = {"optimizer.lr": FLOAT(1e-4, 1e-2, log=True), "model.n_layer": INT(1, 4)}
SPACE |= {"attention": CHOICE(["naive", "sdpa"])}


def distribution(word: str, is_int: bool = False):
    with hydra_initialized("train", None):
        return make_distribution(word, parse_word("train", word), is_int)


@pytest.mark.parametrize(
    ("word", "is_int", "expected"),
    [
        ("optimizer.lr=log(1e-4,1e-2)", False, FLOAT(1e-4, 1e-2, log=True)),
        ("model.dropout=interval(0,0.3)", False, FLOAT(0, 0.3)),
        ("model.n_layer=interval(2,8)", True, INT(2, 8)),
        ("train.batch_size=log(4,64)", True, INT(4, 64, log=True)),
        ("model.n_embd=range(32,128,32)", True, CHOICE(["32", "64", "96"])),
        ("model.n_layer=2,3,4", True, CHOICE(["2", "3", "4"])),
        ("attention=choice(naive,sdpa)", False, CHOICE(["naive", "sdpa"])),
    ],
)
def test_ranges_become_distributions(word, is_int, expected):
    assert distribution(word, is_int) == expected


@pytest.mark.parametrize("values", ["log(0,1)", "interval(2,1)", "interval(0,inf)", "range(3,1)"])
def test_invalid_range_is_refused(values):
    with pytest.raises(
        UserError, match=re.escape(f"optimizer.lr={values} is not a range; set log(A,B)")
    ):
        distribution(f"optimizer.lr={values}")


def refusal(capsys, *words: str) -> str:
    assert run_command("train", "-m", *TINY[1:], *words) == 2
    return capsys.readouterr().err


def test_invalid_search_is_refused_before_anything_is_written(workdir, capsys, monkeypatch):
    lr, _ = (
        "optimizer.lr=log(1e-4,1e-2)",
        monkeypatch.setattr("comparison.sweep.search.MAX_REJECTED", 2),
    )
    assert "set sweep.trials=N once" in refusal(capsys, "sweep.trials=0", lr)
    assert "is a range without steps; set sweep.trials=N to search it" in refusal(capsys, lr)
    assert "ranges of keys other than seed" in refusal(capsys, "sweep.trials=2", "seed=1,2")
    assert "did you mean optimizer.lr?" in refusal(capsys, "sweep.trials=2", "optimizer.lx=1,2")
    assert "the last: train.steps=0 must be at least 1" in refusal(
        capsys, "sweep.trials=2", lr, "train.steps=0"
    )
    assert "no launcher" in refusal(capsys, "sweep.trials=2", lr, "hydra/launcher=submitit_local")
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "comparison.sweep.search")
    assert "sweep.trials needs Optuna; install it: pip install 'optuna>=5,<6'" in refusal(
        capsys, "sweep.trials=2", lr
    )
    assert not Path("runs").exists()


def loss_of(values: dict[str, str]) -> float:
    return abs(math.log(float(values["optimizer.lr"]) / 1e-3)) + abs(
        int(values["model.n_layer"]) - 3
    )


@pytest.fixture
def run_fake_search(workdir, monkeypatch):
    """run_fake_search(name, n_trials, outcome) trains jobs by computing a loss. Returns the trials' values."""

    def run(name, n_trials, outcome=lambda values: "finished", space=SPACE, words=()):
        folder = SWEEPS / name

        def make_jobs(search, values):
            if values["model.n_layer"] == "2":
                raise UserError("two layers are invalid")
            jobs = [",".join([*map("=".join, values.items()), f"seed={seed}"]) for seed in (1, 2)]
            return name, [
                Job(job, folder / job, [], {"values": values, "seed": n})
                for n, job in enumerate(jobs)
            ]

        def train_jobs(todo):
            for job in todo:
                job.folder.joinpath("checkpoints").mkdir(parents=True, exist_ok=True)
                (job.folder / "checkpoints/last.pt").touch()
                values, seed = job.config["values"], job.config["seed"]
                status = outcome(values)
                write_config(job.folder, job.config)
                write_json(
                    job.folder / "summary.json",
                    {"status": status, "best_val_bpb": loss_of(values) + seed},
                )
                if status == "interrupted":
                    raise KeyboardInterrupt
            return {job.name: Outcome(status, "why") for job in todo}

        monkeypatch.setattr(search, "train_jobs", train_jobs)
        monkeypatch.setattr(search, "finish_sweep", lambda folder, jobs, outcomes: 0)
        assert run_search(space, make_jobs, n_trials, list(words)) == 0
        jobs = json.loads((folder / "sweep.json").read_text(encoding="utf-8"))["jobs"][::2]
        return [dict(word.split("=") for word in job.split(",")[:-1]) for job in jobs]

    return run


def test_suggestions_are_new_in_range_and_better_than_random_ones(run_fake_search, capsys):
    trials = run_fake_search("s", 40)
    assert len(trials) == 40 and all(trial["model.n_layer"] != "2" for trial in trials)
    assert all(1e-4 <= float(trial["optimizer.lr"]) <= 1e-2 for trial in trials)
    assert all(
        len(trial["optimizer.lr"].strip("0.")) <= 4
        for trial in trials
        if "e" not in trial["optimizer.lr"]
    )
    losses = [loss_of(trial) for trial in trials]
    assert sum(losses[20:]) / 20 < 0.9 * sum(losses[:10]) / 10
    (line,) = re.findall(r"^best .*(?=, the lowest)", capsys.readouterr().out, re.MULTILINE)
    best = min(trials, key=loss_of)
    values = {f"{key}={value}" for key, value in best.items()}
    assert (
        values <= set(line.replace(":", "").split())
        and f"{loss_of(best) + 0.5:.4f} bits per byte" in line
    )


def test_interrupted_search_resumes_its_trial_and_is_extended(run_fake_search, capsys):
    started = []

    def interrupt_fifth(values):
        started.append(values)
        return "interrupted" if len(started) == 10 else "finished"  # two seeds per trial

    with pytest.raises(KeyboardInterrupt):
        run_fake_search("parts", 6, interrupt_fifth)
    trials = run_fake_search("parts", 6, lambda values: started.append(values) or "finished")
    assert started[10] == started[9] and len(started) == 13, "only the missing runs are trained"
    assert run_fake_search("parts", 8)[:6] == trials
    assert "8 trials, 6 of them finished before" in capsys.readouterr().out


def test_failed_trials_are_tried_again(run_fake_search, capsys):
    trials = run_fake_search(
        "some", 6, lambda values: "failed" if values["attention"] == "naive" else "finished"
    )
    failed = [values for values in trials if values["attention"] == "naive"]
    assert (
        len(failed) > 0
        and f"the lowest of {6 - len(failed)} finished trials" in capsys.readouterr().out
    )
    assert run_fake_search("some", 6) == trials
    assert "the lowest of 6 finished trials" in capsys.readouterr().out


def test_search_ends_when_all_valid_choices_were_tried(run_fake_search, capsys):
    space = {
        "attention": SPACE["attention"],
        "model.n_layer": INT(2, 3),
        "optimizer.lr": CHOICE(["1e-3"]),
    }
    assert len(run_fake_search("s", 5, space=space)) == 2
    assert "ends after 2 trials" in capsys.readouterr().out
    with pytest.raises(UserError, match="are invalid; the last: two layers are invalid"):
        run_fake_search("invalid", 5, space=space | {"model.n_layer": INT(2, 2)})


def test_search_with_other_settings_is_refused(run_fake_search):
    run_fake_search("s", 1, words=["train.steps=5"])
    without_attention = {key: SPACE[key] for key in ("optimizer.lr", "model.n_layer")}
    for space, words in ((without_attention, ["train.steps=5"]), (SPACE, ["train.steps=6"])):
        with pytest.raises(
            UserError, match=r"is a search with train\.steps=5 optimizer.* restore these"
        ):
            run_fake_search("s", 2, space=space, words=words)


@pytest.mark.slow
def test_search_trains_runs_and_continues(workdir, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    words = [
        "-m",
        *TINY[1:],
        "name=s",
        "optimizer.lr=log(1e-3,1e-1)",
        "model.n_layer=interval(1,3)",
    ]
    assert run_command("train", *words, "sweep.trials=2") == 0
    folder = SWEEPS / "s"
    finished = {path: path.stat().st_mtime for path in folder.glob("*/*/*.pt")}
    assert run_command("train", *words, "sweep.trials=3") == 0
    out = capfd.readouterr().out
    assert "3 trials, 2 of them finished before" in out
    assert (
        finished.items() <= {path: path.stat().st_mtime for path in folder.glob("*/*/*.pt")}.items()
    )
    summaries = {
        path.parent.name: json.loads(path.read_text(encoding="utf-8"))
        for path in folder.glob("*/summary.json")
    }
    assert [summary["status"] for summary in summaries.values()] == ["finished"] * 3
    best_loss = min(summary["best_val_bpb"] for summary in summaries.values())
    assert f": {best_loss:.4f} bits per byte" in out
    assert {"comparison.png", "search.journal", "sweep.json"} <= {
        path.name for path in folder.iterdir()
    }
