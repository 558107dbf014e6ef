"""benchmarks/speedrun.py: its rules, its t-test, and a row of real runs."""

import statistics
import subprocess
import sys
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
from helpers import ROOT

from benchmarks import speedrun
from benchmarks.speedrun import TRACKS, check_config, p_value
from configs.cli import parse_config

# The goal of a track


@cache
def compose(track: str) -> dict:
    """The config of a track, as config.yaml has it."""
    overrides = [*TRACKS[track].overrides, f"data.path={ROOT / 'README.md'}"]
    return asdict(parse_config("train", "", overrides))


def check_change(track: str, key: str, value) -> None:
    """Check the config of a track with another value of a key."""
    config = deepcopy(compose(track))
    *sections, name = key.split(".")
    section = config
    for part in sections:
        section = section[part]
    section[name] = value
    check_config(config, TRACKS[track].fixed)


@pytest.mark.parametrize("track", TRACKS)
@pytest.mark.parametrize(
    ("key", "value"), [("model.n_layer", 1), ("optimizer.lr", 0.002), ("train.steps", 440)]
)
def test_settings_that_do_not_change_the_goal_are_allowed(track, key, value):
    check_change(track, key, value)


@pytest.mark.parametrize("track", TRACKS)
@pytest.mark.parametrize(
    ("key", "value", "goal"),
    [
        ("device", "cuda", "cpu"),
        ("train.init_from", "run:a", "null"),
        ("eval.windows", 1, "null"),
        ("data.val_fraction", 0.5, "0.1"),
        ("data.val_path", "val.txt", "null"),
        ("data.val_documents", 1, "null"),
        ("data.max_documents", 1, "null"),
    ],
)
def test_settings_that_change_the_goal_are_refused(track, key, value, goal):
    message = f"{key}={value} changes the goal of the track; set {key}={goal}"
    with pytest.raises(SystemExit, match=message):
        check_change(track, key, value)


@pytest.mark.parametrize(
    ("key", "value", "goal"), [("model.block_size", 32, "64"), ("tokenizer.name", "byte", "char")]
)
def test_nanogpt_cpu_has_the_context_and_the_characters_of_nanogpt(key, value, goal):
    with pytest.raises(SystemExit, match=f"set {key}={goal}"):
        check_change("nanogpt-cpu", key, value)


# The command, with runs that are not trained


class Runs:
    """Stands for the runs of a track. Changes of `summary` apply to all of them."""

    def __init__(self):
        self.seconds = 100.0
        self.losses = [1.5, 1.4, 1.6]
        self.summary = {"threads": 2}
        self.overrides: list[list[str]] = []
        self.fixed: dict[str, object] = {}

    def check_config(self, config: dict, fixed: dict[str, object]) -> None:
        self.fixed = fixed

    def train(self, folder: Path, overrides: list[str], name: str) -> tuple[float, dict]:
        self.overrides.append(overrides)
        run = folder / "runs" / name
        run.mkdir(parents=True)
        (run / "config.yaml").write_text("{}", encoding="utf-8")
        loss = self.losses[len(self.overrides) % len(self.losses)]
        summary = self.summary | {"last_val_loss": loss, "last_val_bpb": loss}
        return self.seconds, summary


@pytest.fixture
def runs(monkeypatch) -> Runs:
    runs = Runs()
    monkeypatch.setattr(speedrun, "train", runs.train)
    monkeypatch.setattr(speedrun, "check_config", runs.check_config)
    monkeypatch.setattr(speedrun, "select_preset", lambda overrides: "1.0e6-4.0e13")
    return runs


@pytest.fixture
def run_track(workdir, runs, monkeypatch, capsys):
    """run_track("five-minutes", ...): exit code and output."""

    def run_command(track: str, *words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["speedrun.py", track, "text.txt", *words])
        code = speedrun.main()
        return code, capsys.readouterr().out

    return run_command


def test_record_ends_with_0(run_track):
    code, printed = run_track("five-minutes", "--record", "9", "--change", "smaller")
    assert code == 0
    assert "no record" not in printed


def test_row_has_the_mean_and_the_deviation_of_all_seeds(run_track, runs):
    _, printed = run_track("five-minutes", "--record", "9", "--change", "x", "--machine", "B")
    mean, deviation = statistics.mean(runs.losses), statistics.stdev(runs.losses)
    row = printed.splitlines()[-1].split(" | ")
    assert row[1:6] == ["B", "x", "100.00 ± 0.00", "3", f"{mean:.4f} ± {deviation:.4f}"]


def test_each_run_has_another_seed(run_track, runs):
    run_track("five-minutes", "--record", "9")
    _, *trained = runs.overrides  # the first run prepares the data
    assert [overrides[-1] for overrides in trained] == ["seed=1", "seed=2", "seed=3"]


def test_overrides_follow_those_of_the_track(run_track, runs):
    run_track("five-minutes", "--record", "9", "--", "model.n_layer=1")
    expected = [*TRACKS["five-minutes"].overrides, f"data.path={Path('text.txt').resolve()}"]
    expected += ["model.n_layer=1", "preset=1.0e6-4.0e13"]
    assert runs.overrides == [
        [*expected, "train.steps=1", "train.minutes=null"],
        *([*expected, f"seed={seed}"] for seed in (1, 2, 3)),
    ]


def test_goal_includes_the_text(run_track, runs):
    run_track("nanogpt-cpu")
    text = {"data.path": str(Path("text.txt").resolve())}
    assert runs.fixed == TRACKS["nanogpt-cpu"].fixed | text


@pytest.mark.parametrize(
    ("words", "changed", "reason"),
    [
        (["--record", "9", "--seeds", "2"], {}, "it has 2 of 3 seeds"),
        ([], {}, "it was compared with no record (set --record)"),
        (["--record", "1.5"], {}, "p is not below 0.01"),
        (["--record", "9"], {"seconds": 300.5}, "a run took 300.5 s"),
        (["--record", "9"], {"summary": {"threads": 3}}, "the runs used 3 threads"),
    ],
    ids=["seeds", "record", "p", "seconds", "threads"],
)
def test_row_that_is_no_record_has_the_reason(run_track, runs, words, changed, reason):
    for name, value in changed.items():
        setattr(runs, name, value)
    code, printed = run_track("five-minutes", *words)
    assert code == 1
    assert printed.splitlines()[-1].startswith(f"no record: {reason}")


@pytest.mark.parametrize(
    ("track", "text", "words", "message"),
    [
        ("nanogpt-cpu", "none.txt", [], "none.txt does not exist"),
        ("nanogpt-cpu", "text.txt", ["--seeds", "1"], "--seeds 1 is too small"),
        ("nanogpt-gpu", "text.txt", ["--record", "2.0"], "--record is for five-minutes"),
    ],
    ids=["text", "seeds", "record"],
)
def test_wrong_arguments_are_refused(
    workdir, runs, monkeypatch, capsys, track, text, words, message
):
    monkeypatch.setattr(sys, "argv", ["speedrun.py", track, text, *words])
    with pytest.raises(SystemExit) as end:
        speedrun.main()
    assert end.value.code == 2
    assert message in capsys.readouterr().err
    assert runs.overrides == []


# The t-test


@pytest.mark.parametrize(
    ("n", "t"), [(3, 6.965), (10, 2.821), (31, 2.457)], ids=["3 seeds", "10 seeds", "31 seeds"]
)
@pytest.mark.parametrize(
    ("sign", "p"), [(1, 0.01), (0, 0.5), (-1, 0.99)], ids=["lower", "equal", "higher"]
)
def test_p_value_equals_the_table_of_students_t(n, t, sign, p):
    """t is from the table for p = 0.01."""
    losses = [2.0 + 0.1 * i for i in range(n)]
    standard_error = statistics.stdev(losses) / n**0.5
    max_loss = statistics.mean(losses) + sign * t * standard_error
    assert p_value(losses, max_loss) == pytest.approx(p, rel=1e-3)


# Real runs


@pytest.mark.slow
def test_row_of_two_short_runs(workdir):
    settings = ["model.n_layer=1", "model.n_embd=16", "model.n_head=1", "tokenizer.vocab_size=300"]
    settings += ["train.minutes=0.02", "train.steps=null"]
    arguments = ["five-minutes", "text.txt", "--seeds", "2", "--change", "tiny"]
    command = [sys.executable, ROOT / "benchmarks/speedrun.py", *arguments, "--record", "0.001"]
    done = subprocess.run([*command, "--", *settings], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    row = done.stdout.split("| tiny |")[1].splitlines()[0].split("|")
    printed = [line.split() for line in done.stdout.splitlines() if line.startswith("seed ")]
    losses = [float(words[5]) for words in printed]
    assert int(row[1]) == len(losses) == 2
    assert float(row[2].split()[0]) == pytest.approx(statistics.mean(losses), abs=1e-3)
    assert "no record: it has 2 of 3 seeds, p is not below 0.01" in done.stdout


@pytest.mark.slow
def test_command_refuses_settings_that_change_the_goal(workdir):
    words = ["nanogpt-cpu", "text.txt", "--", "model.n_layer=1", "eval.windows=1"]
    command = [sys.executable, ROOT / "benchmarks/speedrun.py", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("eval.windows=1 changes the goal of the track")
