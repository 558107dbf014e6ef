"""benchmarks/speedrun.py: the goal of a track, the t-test, and a row of real runs."""

import statistics
import subprocess
import sys
from copy import deepcopy
from dataclasses import asdict
from functools import cache

import pytest
from helpers import ROOT

from benchmarks.speedrun import TRACKS, check_config, p_value
from configs.cli import parse_config


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
def test_only_settings_that_do_not_change_the_goal_are_allowed(track):
    for key, value in (("model.n_layer", 1), ("optimizer.lr", 0.002), ("train.steps", 440)):
        check_change(track, key, value)
    for key, value, goal in (
        ("device", "cuda", "cpu"),
        ("train.init_from", "run:a", "null"),
        ("eval.windows", 1, "null"),
        ("data.val_fraction", 0.5, "0.1"),
        ("data.val_path", "val.txt", "null"),
        ("data.val_documents", 1, "null"),
        ("data.max_documents", 1, "null"),
    ):
        message = f"{key}={value} changes the goal of the track; set {key}={goal}"
        with pytest.raises(SystemExit, match=message):
            check_change(track, key, value)


@pytest.mark.parametrize(
    ("key", "value", "goal"), [("model.block_size", 32, "64"), ("tokenizer.name", "byte", "char")]
)
def test_nanogpt_cpu_has_the_context_and_the_characters_of_nanogpt(key, value, goal):
    with pytest.raises(SystemExit, match=f"set {key}={goal}"):
        check_change("nanogpt-cpu", key, value)


@pytest.mark.parametrize(
    ("n", "t"), [(3, 6.965), (10, 2.821), (31, 2.457)], ids=["3 seeds", "10 seeds", "31 seeds"]
)
def test_p_value_equals_the_table_of_students_t(n, t):
    """t is from the table for p = 0.01."""
    losses = [2.0 + 0.1 * i for i in range(n)]
    mean = statistics.mean(losses)
    difference = t * statistics.stdev(losses) / n**0.5
    for max_loss, p in ((mean + difference, 0.01), (mean, 0.5), (mean - difference, 0.99)):
        assert p_value(losses, max_loss) == pytest.approx(p, rel=1e-3)


@pytest.mark.slow
def test_row_of_two_short_runs(workdir):
    settings = ["model.n_layer=1", "model.n_embd=16", "model.n_head=1", "tokenizer.vocab_size=300"]
    settings += ["train.minutes=0.02", "train.steps=null"]
    arguments = ["five-minutes", "text.txt", "--seeds", "2", "--change", "tiny"]
    command = [sys.executable, ROOT / "benchmarks/speedrun.py", *arguments, "--record", "0.001"]
    done = subprocess.run([*command, "--", *settings], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "| tiny |" in done.stdout
    assert "no record: it has 2 of 3 seeds, p is not below 0.01" in done.stdout
