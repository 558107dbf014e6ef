"""benchmarks/speedrun.py: its t-test, its rules, and a row of real runs."""

import subprocess
import sys

import pytest
from helpers import ROOT

from benchmarks.speedrun import p_value


@pytest.mark.parametrize(("n", "t"), [(3, 6.965), (10, 2.821), (31, 2.457)])  # from a table of Student's t, p = 0.01
def test_p_value_equals_the_table_of_students_t(n, t):
    losses = [2.0 + 0.1 * (i - (n - 1) / 2) for i in range(n)]
    mean = sum(losses) / n
    standard_error = (sum((loss - mean) ** 2 for loss in losses) / (n - 1) / n) ** 0.5
    assert p_value(losses, mean) == pytest.approx(0.5)
    assert p_value(losses, mean + t * standard_error) == pytest.approx(0.01, rel=1e-3)
    assert p_value(losses, mean - t * standard_error) == pytest.approx(0.99, rel=1e-3)


@pytest.mark.slow
def test_row_of_two_short_runs_is_no_record(workdir):
    settings = ["model.n_layer=1", "model.n_embd=16", "model.n_head=1", "tokenizer.vocab_size=300"]
    settings += ["train.minutes=0.02", "train.steps=null"]
    arguments = ["five-minutes", "text.txt", "--seeds", "2", "--change", "tiny", "--record", "0.001"]
    command = [sys.executable, ROOT / "benchmarks/speedrun.py", *arguments, "--", *settings]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    _, seeds, loss, _ = done.stdout.split("| tiny |")[1].splitlines()[0].split("|")[:4]
    printed = [line.split() for line in done.stdout.splitlines() if line.startswith("seed ")]
    assert int(seeds) == len(printed) == 2
    assert float(loss.split()[0]) == pytest.approx(sum(float(words[5]) for words in printed) / 2, abs=1e-3)
    assert "no record: it has 2 of 3 seeds, p is not below 0.01" in done.stdout
