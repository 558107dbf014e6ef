"""Hyperparameter search: ranges, suggestions, continuation and failed trials."""

import json
import math
import sys
from pathlib import Path

import pytest
from helpers import TINY, run_command

from common.errors import UserError
from common.files import read_json, write_json
from comparison.sweep import search
from comparison.sweep.jobs import Job, Outcome
from comparison.sweep.search import make_distribution, run_search
from configs.compose import hydra_initialized, parse_word
from generation.run_paths import SWEEPS
from training.run_folder import write_config

optuna = pytest.importorskip("optuna")
FLOAT, INT = optuna.distributions.FloatDistribution, optuna.distributions.IntDistribution
CHOICE = optuna.distributions.CategoricalDistribution
SPACE = {
    "optimizer.lr": FLOAT(1e-4, 1e-2, log=True),
    "model.n_layer": INT(1, 4),
    "attention": CHOICE(["naive", "sdpa"]),
}


# Ranges


def make(word: str, is_int: bool = False):
    with hydra_initialized("train", None):
        return make_distribution(parse_word("train", word), is_int)


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
    assert make(word, is_int) == expected


@pytest.mark.parametrize("values", ["log(0,1)", "interval(2,1)", "interval(0,inf)", "range(3,1)"])
def test_invalid_range_is_refused(values):
    with pytest.raises(UserError, match=r"optimizer\.lr has an invalid range; set log\(A,B\)"):
        make(f"optimizer.lr={values}")


# Invalid searches


LR = "optimizer.lr=log(1e-4,1e-2)"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["sweep.trials=0", LR], ("sweep.trials=0", "1 or more")),
        (["sweep.trials=many", LR], ("sweep.trials=many", "1 or more")),
        (["sweep.trials=2", "seed=1,2"], ("another key than seed",)),
        (["sweep.trials=2", "optimizer.lx=1,2"], ("optimizer.lx", "did you mean optimizer.lr?")),
        (["sweep.trials=2", LR, "hydra/launcher=submitit_local"], ("without a launcher",)),
        (["sweep.trials=2", "model.n_layer=interval(3,2)"], ("model.n_layer", "set log(A,B)")),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_search_is_refused_before_anything_is_written(words, parts, workdir, capsys):
    assert run_command("train", "-m", *TINY[1:], *words) == 2
    message = capsys.readouterr().err
    for part in parts:
        assert part in message
    assert not Path("runs").exists()


def test_search_with_an_invalid_setting_is_refused(workdir, capsys, monkeypatch):
    monkeypatch.setattr(search, "MAX_INVALID", 2)  # each takes a tenth of a second
    assert run_command("train", "-m", *TINY, "sweep.trials=2", LR, "train.steps=0") == 2
    assert "the last: train.steps=0 must be at least 1" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_search_without_optuna_says_how_to_install_it(workdir, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    monkeypatch.delitem(sys.modules, "comparison.sweep.search")
    assert run_command("train", "-m", *TINY, "sweep.trials=2", LR) == 2
    assert "pip install 'optuna" in capsys.readouterr().err


# Searches whose jobs compute a loss instead of training


def loss_of(values: dict[str, str]) -> float:
    """The loss of a trial. It is lowest with three layers and a learning rate of 1e-3."""
    lr = float(values["optimizer.lr"])
    return abs(math.log(lr / 1e-3)) + abs(int(values["model.n_layer"]) - 3)


def make_fake_jobs(name: str | None, values: dict[str, str]) -> list[Job]:
    """One job for each of two seeds. Two layers are invalid."""
    if values["model.n_layer"] == "2":
        raise UserError("two layers are invalid")
    words = ",".join(f"{key}={value}" for key, value in values.items())
    jobs = []
    for seed in (1, 2):
        folder = SWEEPS / "s" / f"{words},seed={seed}"
        jobs.append(Job(folder.name, folder, [], {"values": values, "seed": seed}))
    return jobs


def finish(values: dict[str, str]) -> str:
    return "finished"


class FakeTraining:
    """Replaces train_jobs. outcome(values) is the status of a job."""

    def __init__(self):
        self.outcome = finish
        self.trained: list[dict[str, str]] = []

    def __call__(self, todo: list[Job]) -> dict[str, Outcome]:
        return {job.name: self.train(job) for job in todo}

    def train(self, job: Job) -> Outcome:
        values = job.config["values"]
        self.trained.append(values)
        status = self.outcome(values)
        (job.folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        (job.folder / "checkpoints/last.pt").touch()
        write_config(job.folder, job.config)
        loss = loss_of(values) + job.config["seed"]
        write_json(job.folder / "summary.json", {"status": status, "best_val_bpb": loss})
        if status == "interrupted":
            raise KeyboardInterrupt
        return Outcome(status, "")


@pytest.fixture
def training(workdir, monkeypatch) -> FakeTraining:
    training = FakeTraining()

    def finish_sweep(folder, jobs, outcomes) -> int:
        return 0

    monkeypatch.setattr(search, "train_jobs", training)
    monkeypatch.setattr(search, "finish_sweep", finish_sweep)
    return training


def run_fake_search(n_trials: int, space=SPACE, words=()) -> None:
    assert run_search(space, make_fake_jobs, n_trials, list(words)) == 0


def list_trials() -> list[dict[str, str]]:
    """The values of all trials that have started, in order, without repetitions."""
    names = read_json(SWEEPS / "s/sweep.json")["jobs"]
    return [dict(word.split("=") for word in name.split(",")[:-1]) for name in names[::2]]


def test_suggestions_are_in_their_ranges_and_valid(training):
    run_fake_search(20)
    for trial in list_trials():
        assert 1e-4 <= float(trial["optimizer.lr"]) <= 1e-2
        assert trial["model.n_layer"] in ("1", "3", "4")
        assert trial["attention"] in ("naive", "sdpa")


def test_suggested_floats_have_four_digits(training):
    run_fake_search(20)
    for trial in list_trials():
        assert len(trial["optimizer.lr"].partition("e")[0].replace(".", "").lstrip("0")) <= 4


def test_later_suggestions_are_better(training):
    run_fake_search(40)
    losses = [loss_of(trial) for trial in list_trials()]
    later = losses[20:]
    assert sum(later) / len(later) < 0.9 * sum(losses[:10]) / 10


def test_search_prints_the_best_trial_and_its_command(training, capsys):
    run_fake_search(10, words=["train.steps=5"])
    best = min(list_trials(), key=loss_of)
    words = " ".join(f"{key}={value}" for key, value in best.items())
    out = capsys.readouterr().out
    mean_loss = loss_of(best) + 1.5  # over the seeds 1 and 2
    assert f"{words}: {mean_loss:.4f} bits per byte, the lowest of 10 finished trials" in out
    assert f"python train.py train.steps=5 {words}" in out


def interrupt_fifth_trial(training: FakeTraining) -> list[dict[str, str]]:
    """Run a search of six trials until the second job of the fifth. Returns the trained values."""

    def interrupt(values):
        return "interrupted" if len(training.trained) == 10 else "finished"

    training.outcome = interrupt
    with pytest.raises(KeyboardInterrupt):
        run_fake_search(6)
    training.outcome = finish
    return list(training.trained)


def test_interrupted_search_resumes_its_trial(training):
    before = interrupt_fifth_trial(training)
    run_fake_search(6)
    assert training.trained[len(before)] == before[-1]


def test_interrupted_search_trains_only_the_missing_runs(training, capsys):
    before = interrupt_fifth_trial(training)
    run_fake_search(6)
    assert "6 trials, 4 of them finished before" in capsys.readouterr().out
    assert len(training.trained) == len(before) + 3


def test_finished_search_can_be_extended(training, capsys):
    run_fake_search(3)
    trials = list_trials()
    run_fake_search(5)
    assert list_trials()[:3] == trials
    assert len(list_trials()) == 5
    assert "5 trials, 3 of them finished before" in capsys.readouterr().out


def test_failed_trials_have_no_loss(training, capsys):
    def fail_naive(values):
        return "failed" if values["attention"] == "naive" else "finished"

    training.outcome = fail_naive
    run_fake_search(6)
    failed = [trial for trial in list_trials() if trial["attention"] == "naive"]
    assert 0 < len(failed) < 6
    assert f"the lowest of {6 - len(failed)} finished trials" in capsys.readouterr().out


def test_failed_trials_are_tried_again(training, capsys):
    def fail(values):
        return "failed"

    training.outcome = fail
    run_fake_search(4)
    trials = list_trials()
    assert "best" not in capsys.readouterr().out
    training.outcome = finish
    run_fake_search(4)
    assert list_trials() == trials
    assert "the lowest of 4 finished trials" in capsys.readouterr().out


def test_trial_with_the_values_of_an_earlier_one_is_not_trained_again(training, capsys):
    space = {key: CHOICE(["1e-3" if key == "optimizer.lr" else "3"]) for key in list(SPACE)[:2]}
    run_fake_search(4, space)
    assert len(training.trained) == 2  # one trial with two seeds
    assert "the lowest of 4 finished trials" in capsys.readouterr().out


def test_search_without_a_valid_combination_is_refused(training):
    space = SPACE | {"model.n_layer": INT(2, 2)}
    with pytest.raises(UserError, match="are invalid; the last: two layers are invalid"):
        run_fake_search(5, space)
    assert not SWEEPS.exists()


@pytest.mark.parametrize(
    ("space", "words"),
    [
        ({key: SPACE[key] for key in ("optimizer.lr", "model.n_layer")}, ["train.steps=5"]),
        (SPACE | {"attention": CHOICE(["naive", "flex"])}, ["train.steps=5"]),
        (SPACE, ["train.steps=6"]),
    ],
    ids=["other keys", "other choices", "other settings"],
)
def test_search_that_is_continued_with_other_settings_is_refused(space, words, training):
    run_fake_search(1, words=["train.steps=5"])
    message = r"is a search with train\.steps=5 optimizer\.lr=\.\.\. .* restore these"
    with pytest.raises(UserError, match=message):
        run_fake_search(2, space, words)


def test_search_can_be_continued_with_other_ranges(training):
    run_fake_search(2)
    run_fake_search(4, SPACE | {"optimizer.lr": FLOAT(1e-3, 1e-1, log=True)})
    assert len(list_trials()) == 4


# A search with real processes


@pytest.mark.slow
def test_search_trains_runs_and_continues(workdir, monkeypatch, capfd):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    ranges = ["optimizer.lr=log(1e-3,1e-1)", "model.n_layer=interval(1,3)"]
    words = ["-m", *TINY[1:], "name=s", *ranges]
    folder = SWEEPS / "s"
    assert run_command("train", *words, "sweep.trials=2") == 0
    finished = {path: path.stat().st_mtime for path in folder.glob("*/*/*.pt")}
    assert run_command("train", *words, "sweep.trials=3") == 0
    checkpoints = {path: path.stat().st_mtime for path in folder.glob("*/*/*.pt")}
    assert finished.items() <= checkpoints.items()
    summaries = [
        json.loads(path.read_text(encoding="utf-8")) for path in folder.glob("*/summary.json")
    ]
    assert [summary["status"] for summary in summaries] == ["finished"] * 3
    best_loss = min(summary["best_val_bpb"] for summary in summaries)
    assert f": {best_loss:.4f} bits per byte" in capfd.readouterr().out
    assert (folder / "comparison.png").exists()
