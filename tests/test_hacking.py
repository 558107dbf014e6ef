"""docs/hacking.md: its Python blocks run, and each of its changes applies to the code and has an effect."""

import math
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import docs_helpers as docs
import pytest
import yaml
from docs_helpers import HACKING
from helpers import ROOT, TEXT, TINY, load, metrics, summary

from data.tokenizer import from_spec

MAX_LINES, MAX_FILES = 10, 2  # of a change; removed and added lines together
STEPS = 6  # of a run with TINY
SHORT_RUN = [*TINY, "schedule.warmup_steps=0", "name=a"]
NOTEBOOK, PARTS, ATTENTION = [
    "\n".join(lines) for _, language, lines in docs.blocks(HACKING) if language == "python"
]
CHANGES = [
    pytest.param(*match.groups(), id=match[1])
    for match in re.finditer(
        r"^### (.+?)\n+```diff\n(.+?)```\n+```bash\n(.+?)```",
        HACKING.read_text(encoding="utf-8"),
        re.DOTALL | re.MULTILINE,
    )
]


def run_block(code: str) -> dict:
    namespace = {}
    exec(compile(code, HACKING.name, "exec"), namespace)
    return namespace


@pytest.mark.parametrize("code", [NOTEBOOK, PARTS], ids=["PyTorch loop", "project's parts"])
def test_loss_falls_in_a_notebook(code, workdir, capsys):
    (workdir / "mybook.txt").write_text(TEXT, encoding="utf-8")
    run_block(code)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", capsys.readouterr().out)]
    assert losses[-1] < 0.6 * losses[0]


def test_attention_weights_of_a_run_are_shown(trained, workdir, capsys):
    T = len(run_block(ATTENTION)["ids"])
    assert run_block(ATTENTION)["weights"].shape == (2, 2, T, T)
    assert "head 1:" in capsys.readouterr().out
    assert (workdir / "attention.png").stat().st_size > 0


def check_schedule(config, checkpoint):
    peak = config["optimizer"]["lr"]
    rates = [row["lr"] for row in metrics("a") if "lr" in row]
    assert rates == pytest.approx([peak * (1 - math.sqrt(step / STEPS)) for step in range(STEPS)])


def check_metric(config, checkpoint):
    evaluations = [row for row in metrics("a") if "val/loss" in row]
    assert evaluations and all(row["weight_norm"] > 0 for row in evaluations)


def check_optimizer(config, checkpoint):
    assert config["optimizer"] == {"name": "sgd", "lr": 0.1, "momentum": 0.95}
    assert set(checkpoint["optimizer"]) == set(checkpoint["model"])
    assert all("momentum_buffer" in state for state in checkpoint["optimizer"].values())
    words = ["code/train.py", *SHORT_RUN, "optimizer=sgd", "train.steps=8"]
    assert subprocess.run([sys.executable, *words]).returncode == 0
    assert [row["step"] for row in metrics("a")] == list(range(9))  # resumed


def check_tokenizer(config, checkpoint):
    tokenizer = from_spec(checkpoint["tokenizer"])
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert len(ids) < len(TEXT) / 2


# Of the other changes, the commands fail without the new name.
CHECKS = {
    "A schedule": check_schedule,
    "A metric": check_metric,
    "An optimizer": check_optimizer,
    "A tokenizer": check_tokenizer,
}


def test_page_shows_every_change():
    assert {change.id for change in CHANGES} == {*CHECKS, "An activation", "An attention backend"}


@pytest.mark.parametrize(("name", "diff", "commands"), CHANGES)
def test_change_has_its_effect(name, diff, commands, workdir):
    changed_lines = re.findall(r"^(?:\+(?!\+\+ )|-(?!-- )).*", diff, re.MULTILINE)
    assert len(changed_lines) <= MAX_LINES, f"{name}: {len(changed_lines)} changed lines"
    assert len(re.findall(r"^\+\+\+ ", diff, re.MULTILINE)) <= MAX_FILES

    code = workdir / "code"
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for file in tracked.splitlines():
        if (ROOT / file).is_file():
            (code / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, code / file)
    (workdir / "change.diff").write_text(diff, encoding="utf-8")
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(workdir), "OMP_NUM_THREADS": "1"}
    options = {"capture_output": True, "text": True, "env": environment}
    applied = subprocess.run(["git", "apply", "../change.diff"], cwd=code, **options)
    advice = f"make the change {name!r} of {HACKING.name} by hand, and replace its diff by the output of git diff -U2"
    assert applied.returncode == 0, f"{advice}\n{applied.stderr}"

    for command in commands.splitlines():
        program, *words = shlex.split(command, comments=True)
        if program == "pytest":
            words = ["-m", "pytest", *words, "-n", "0", "-p", "no:cacheprovider"]
            done = subprocess.run([sys.executable, *words], cwd=code, **options)
        else:
            words = [code / words[0], *SHORT_RUN, *words[1:]]
            done = subprocess.run([sys.executable, *words], **options)
        assert done.returncode == 0, done.stdout + done.stderr

    checkpoint = load("a")
    assert checkpoint["step"] == STEPS
    assert math.isfinite(summary("a")["last_val_loss"])
    if name in CHECKS:
        CHECKS[name](
            yaml.safe_load(Path("runs/a/config.yaml").read_text(encoding="utf-8")), checkpoint
        )
