"""benchmarks/speedrun.py: its t-test, its rules, and a row of real runs."""

import subprocess
import sys

import pytest
from helpers import ROOT

from benchmarks.speedrun import p_value

COMMAND = [sys.executable, str(ROOT / "benchmarks/speedrun.py")]


@pytest.mark.parametrize(("n", "t"), [(3, 6.965), (10, 2.821), (31, 2.457)])  # from a table of Student's t, p = 0.01
def test_p_value_equals_the_table_of_students_t(n, t):
    losses = [2.0 + 0.1 * (i - (n - 1) / 2) for i in range(n)]
    mean = sum(losses) / n
    standard_error = (sum((loss - mean) ** 2 for loss in losses) / (n - 1) / n) ** 0.5
    assert p_value(losses, mean) == pytest.approx(0.5)
    assert p_value(losses, mean + t * standard_error) == pytest.approx(0.01, rel=1e-3)
    assert p_value(losses, mean - t * standard_error) == pytest.approx(0.99, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nanogpt-cpu", "none.txt"], "none.txt does not exist"),
        (["nanogpt-cpu", "text.txt", "--seeds", "1"], "--seeds 1 is too small"),
        (["nanogpt-cpu", "text.txt", "--", "eval.batches=1"], "eval.batches=1 changes the goal of nanogpt-cpu"),
        (["nanogpt-gpu", "text.txt", "--", "data.val_fraction=0.5"], "data.val_fraction=0.5 changes the goal"),
        (["nanogpt-cpu", "text.txt", "--", "tokenizer=byte"], "tokenizer=byte changes the goal"),
        (["five-minutes", "text.txt", "--", "+train.init_from=run:a"], "train.init_from=run:a changes the goal"),
    ],
)
def test_arguments_against_the_rules_are_refused(workdir, arguments, message):
    done = subprocess.run([*COMMAND, *arguments], cwd=workdir, capture_output=True, text=True)
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.slow
def test_row_of_two_short_runs_is_no_record(workdir):
    size = ["model.n_layer=1", "model.n_embd=16", "model.n_head=1", "train.minutes=0.02", "tokenizer=byte"]
    command = [*COMMAND, "five-minutes", "text.txt", "--seeds", "2", "--change", "tiny", "--below", "100", "--", *size]
    done = subprocess.run(command, cwd=workdir, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    cells = done.stdout.split("| tiny |")[1].splitlines()[0].split("|")
    seconds, loss, p = float(cells[0].split()[0]), float(cells[2].split()[0]), float(cells[3])
    assert cells[1].strip() == "2"
    assert 1.2 < seconds < 300
    assert 0 < loss < 8
    assert p < 0.5
    assert "no record: it has 2 of 3 seeds" in done.stdout
