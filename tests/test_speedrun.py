"""benchmarks/speedrun.py: its rules, and a row of real runs."""

import subprocess
import sys

import pytest
from helpers import ROOT


@pytest.mark.slow
def test_row_of_two_short_runs_is_no_record(workdir):
    settings = ["model.n_layer=1", "model.n_embd=16", "model.n_head=1", "tokenizer.vocab_size=300"]
    settings += ["train.minutes=0.02", "train.steps=null"]
    arguments = [
        "five-minutes",
        "text.txt",
        "--seeds",
        "2",
        "--change",
        "tiny",
        "--record",
        "0.001",
    ]
    command = [sys.executable, ROOT / "benchmarks/speedrun.py", *arguments, "--", *settings]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    _, seeds, loss, _ = done.stdout.split("| tiny |")[1].splitlines()[0].split("|")[:4]
    printed = [line.split() for line in done.stdout.splitlines() if line.startswith("seed ")]
    assert int(seeds) == len(printed) == 2
    assert float(loss.split()[0]) == pytest.approx(
        sum(float(words[5]) for words in printed) / 2, abs=1e-3
    )
    assert "no record: it has 2 of 3 seeds, p is not below 0.01" in done.stdout
