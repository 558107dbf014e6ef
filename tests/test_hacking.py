"""docs/hacking.md: its Python blocks run, and its changes of the code have the described effects.

All changes are applied to one copy of the code. One run uses them all, and the tests look at its
results.
"""

import json
import math
import re
import shlex
from pathlib import Path

import docs_helpers as docs
import pytest
import yaml
from changes_helpers import copy_changed_code, run_python
from docs_helpers import HACKING
from helpers import TEXT, load, metrics, summary

from data.tokenizer import from_spec

STEPS = 6  # of train_here
BLOCKS = list(docs.blocks(HACKING))
SAMPLE, NOTEBOOK, PARTS, ATTENTION = [
    "\n".join(lines) for _, language, lines in BLOCKS if language == "python"
]
# Runs in a copy of the code: trains, resumes, and writes what the run folder does not show.
PROGRAM = """
import json, sys, torch
sys.path[:0] = [".", "tests"]
from helpers import train_here
from model import GPTConfig
from model.gpt import GPT

assert train_here(*sys.argv[1:]) == 0
assert train_here(*sys.argv[1:], "train.steps=8") == 0

model = GPT(GPTConfig(block_size=8), vocab_size=20)
torch.nn.init.normal_(model.lm_head.weight)  # so that the model is sure of its predictions
tokens = torch.arange(8).unsqueeze(0)
with torch.no_grad():
    logits = model(tokens)
    targets = logits.argmax(-1)
    validation = model(tokens, targets)
losses = {
    "cross_entropy": torch.nn.functional.cross_entropy(logits[0], targets[0]).item(),
    "validation": validation.item(),
    "training": model(tokens, targets).item(),
}
with open("probe.json", "w", encoding="utf-8") as file:
    json.dump({"names": list(model.state_dict())} | losses, file)
"""
COMMANDS = [command.text for command in docs.read_commands(HACKING)]


@pytest.fixture(scope="module")
def changed_code(tmp_path_factory) -> Path:
    """A copy of the code with all changes of the page, and a run with all its commands."""
    code = tmp_path_factory.mktemp("code")
    copy_changed_code(HACKING, code)
    words = ["data.path=null", "schedule.warmup_steps=0", "name=a"]
    for command in COMMANDS:
        if command.startswith("python train.py"):
            words += shlex.split(command, comments=True)[2:]
    run_python(code, ["-c", PROGRAM, *words, "eval.every=3"])
    return code


@pytest.fixture
def changed_run(changed_code, monkeypatch) -> dict:
    """The config of the run, whose files are in the current folder."""
    monkeypatch.chdir(changed_code)
    return yaml.safe_load(Path("runs/a/config.yaml").read_text(encoding="utf-8"))


def run_block(code: str) -> dict:
    namespace = {}
    exec(compile(code, HACKING.name, "exec"), namespace)
    return namespace


def test_sample_begins_with_its_prompt(trained, capsys):
    run_block(SAMPLE.replace("def main(x):", "The 1"))  # has only characters of the tiny run
    assert capsys.readouterr().out.startswith("The 1")


@pytest.mark.parametrize("code", [NOTEBOOK, PARTS], ids=["PyTorch loop", "project's parts"])
def test_loss_falls_in_a_notebook(code, workdir, capsys):
    (workdir / "mybook.txt").write_text(TEXT, encoding="utf-8")
    code = code.replace("range(101)", "range(51)").replace(
        "steps = 16, 64, 50", "steps = 4, 64, 31"
    )
    run_block(code)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", capsys.readouterr().out)]
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.draws
def test_attention_weights_of_a_run_are_shown(trained, workdir, capsys):
    shown = run_block(ATTENTION)
    T = len(shown["ids"])
    assert shown["weights"].shape == (2, 2, T, T)
    assert "head 1 attends to" in capsys.readouterr().out
    assert (workdir / "attention.png").stat().st_size > 0


def test_names_are_recorded_in_the_config(changed_run):
    assert changed_run["model"]["mlp"] == "silu"
    assert changed_run["model"]["norm"] == "plain_rmsnorm"
    assert changed_run["attention"]["backend"] == "einsum"
    assert changed_run["data"]["source"] == "own_docs"
    assert changed_run["optimizer"] == {"name": "sgd", "lr": 0.1, "momentum": 0.95}
    assert summary("a")["attention"]["resolved"] == "einsum"


@pytest.mark.slow
def test_backend_passes_its_tests(changed_code):
    (command,) = [command for command in COMMANDS if command.startswith("pytest")]
    words = shlex.split(command.replace("-n auto", "-n 0"), comments=True)
    run_python(changed_code, ["-m", *words])  # fails if a test fails, or none is selected


@pytest.fixture
def probe(changed_code) -> dict:
    """The weights of a new model with the default norm, and its loss with and without gradients."""
    return json.loads((changed_code / "probe.json").read_text(encoding="utf-8"))


def test_term_of_the_model_has_weights_and_label_smoothing_changes_the_training_loss_only(probe):
    assert "norm_embedding.weight" in probe["names"]
    assert probe["validation"] == pytest.approx(probe["cross_entropy"])
    assert probe["training"] > probe["cross_entropy"] + 0.1


def test_schedule_follows_its_formula(changed_run):
    rates = [row["lr"] for row in metrics("a") if "lr" in row]
    assert rates[:STEPS] == pytest.approx(
        [0.1 * (1 - math.sqrt(step / STEPS)) for step in range(STEPS)]
    )


def test_metric_is_in_each_evaluation(changed_run):
    evaluations = [row for row in metrics("a") if "val/loss" in row]
    assert evaluations
    assert all(row["weight_norm"] > 0 for row in evaluations)


def test_profile_has_the_operations_of_three_steps(changed_run):
    events = json.loads(Path("runs/a/trace.json").read_text(encoding="utf-8"))["traceEvents"]
    steps = [event["name"] for event in events if event["name"].startswith("ProfilerStep")]
    assert len(steps) == 3
    assert any(event["name"] == "aten::mm" for event in events)


def test_run_resumes_with_the_state_of_the_optimizer_and_without_weights_of_norms(changed_run):
    assert [row["step"] for row in metrics("a")] == list(range(9))
    checkpoint = load("a")
    assert set(checkpoint["optimizer"]) == set(checkpoint["model"])
    assert all("momentum_buffer" in state for state in checkpoint["optimizer"].values())
    assert not [name for name in checkpoint["model"] if "norm" in name]


def test_tokenizer_has_a_token_for_a_frequent_word(changed_run):
    tokenizer = from_spec(load("a")["tokenizer"])
    assert len(tokenizer.encode(" the model")) == 2
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
