"""The model card of an exported run."""

import json
import re
from pathlib import Path

import pytest
from helpers import TEXT, load, metrics, summary

from common.files import write_json
from results.card import hide_path, write_card


def make_card(has_code: bool = False, **changed) -> str:
    """Write the card of the run a into the current folder. Returns its text.

    changed: values of the checkpoint.
    """
    write_json(Path("config.json"), {"auto_map": {}} if has_code else {})
    write_card(Path(), Path("runs/a"), load("a") | changed)
    return Path("README.md").read_text(encoding="utf-8")


def read_facts(card: str) -> dict[str, str]:
    """The lines of the indented block."""
    return {name.strip(): fact for name, fact in re.findall("^    (.{24})(.+)$", card, re.M)}


def change_command(command: str) -> None:
    write_json(Path("runs/a/summary.json"), summary("a") | {"command": command})


@pytest.mark.parametrize(("step", "evaluated"), [(3, 3), (5, 3), (6, 6)])
def test_card_has_the_losses_of_the_last_evaluation_up_to_its_step(trained, step, evaluated):
    facts = read_facts(make_card(step=step))
    row = metrics("a")[evaluated]
    assert float(facts["validation loss, nats"]) == pytest.approx(row["val/loss"], abs=1e-4)
    assert float(facts["validation, bits/byte"]) == pytest.approx(row["val/bpb"], abs=1e-4)
    assert facts["training tokens"] == f"{metrics('a')[step]['tokens']:,}"


def test_card_has_the_sizes_of_model_and_text(trained):
    facts = read_facts(make_card())
    assert facts["parameters"] == f"{summary('a')['n_params']:,}"
    assert facts["in the n-gram table"] == "1,024"
    assert facts["data, bytes"] == f"{Path('text.txt').stat().st_size:,}"
    assert (facts["context, tokens"], facts["tokenizer"]) == ("16", "char")


def test_card_has_no_path_of_the_machine(trained, workdir):
    change_command(f"python train.py name=a data.path={workdir}/text.txt seed=2")
    card = make_card()
    assert read_facts(card)["command"] == "python train.py name=a data.path=... seed=2"
    assert read_facts(card)["data"] == "text"
    assert str(workdir) not in card


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("--config-dir=/home/me/configs", "--config-dir=..."),
        ("/home/me/configs", "..."),
        ("data.path=~/books/*.txt", "data.path=..."),
        ("data.path=mine.txt", "data.path=mine.txt"),
        ('data.path=["/x y/a.txt","https://host/b.txt"]', "data.path=..."),
        ("data.path=https://user:secret@host/a?key=b", "data.path=..."),
        ("train.init_from=hf:/home/me/model", "train.init_from=..."),
        ("train.init_from=hf:owner/model", "train.init_from=hf:owner/model"),
        ("data.repo=owner/texts", "data.repo=owner/texts"),
    ],
)
def test_folders_and_urls_are_hidden_and_names_of_the_hub_are_not(word, expected):
    assert hide_path(word) == expected


def test_prompt_of_a_character_model_is_in_its_vocabulary(trained):
    (prompt,) = re.findall(r"generate\((.*?), max_new_tokens", make_card())
    assert json.loads(prompt) in TEXT


def test_text_of_a_run_stays_in_the_indented_block(trained):
    """So it can end neither the front matter nor a block of code."""
    expected = make_card().splitlines()
    text = "a\n---\nlicense: mit\n```\n# b\x1b[0m"
    change_command(f"python train.py '{text}'")
    card = make_card(config={"data": {"name": text}})
    lines = [line for line in card.splitlines() if not line.startswith("    ")]
    assert lines == [line for line in expected if not line.startswith("    ")]
    assert "\x1b" not in card


@pytest.mark.parametrize("has_code", [False, True])
def test_code_of_the_folder_is_trusted_only_if_it_has_some(trained, has_code):
    assert ("trust_remote_code=True" in make_card(has_code)) == has_code


def test_card_of_a_checkpoint_alone_has_only_its_facts(trained):
    for file in ("summary.json", "metrics.jsonl"):
        Path("runs/a", file).unlink()
    facts = read_facts(make_card())
    assert {"step", "context, tokens", "vocabulary"} <= facts.keys()
    assert not {"command", "validation, bits/byte", "parameters"} & facts.keys()
