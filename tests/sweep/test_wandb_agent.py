"""The words that an agent of wandb passes to train.py, for the sweep of docs/sweeps.md."""

import docs_helpers as docs
import pytest
import yaml
from helpers import ROOT

from configs.cli import parse_config
from training.config import RunConfig


@pytest.fixture
def sweep() -> dict:
    (text,) = (
        "\n".join(lines)
        for _, language, lines in docs.blocks(ROOT / "docs/sweeps.md")
        if language == "yaml"
    )
    return yaml.safe_load(text)


def parse_agent_words(sweep: dict, **values) -> RunConfig:
    """The config of a run that an agent starts. values: chosen by the server."""
    from wandb.sdk.launch.sweeps.utils import create_sweep_command_args  # takes seconds

    arguments = {key: {"value": value} for key, value in values.items()}
    macros = create_sweep_command_args({"args": arguments})
    *_, words = sweep["command"]
    return parse_config("train", "", macros[words.strip("${}")])


def test_command_of_the_sweep_runs_train(sweep):
    assert sweep["program"] == "train.py"
    assert sweep["command"][:3] == ["${env}", "${interpreter}", "${program}"]


@pytest.mark.slow
def test_keys_of_the_sweep_are_keys_of_train(sweep):
    values = {"optimizer.lr": 0.004567, "attention": "flash"}
    assert values.keys() == sweep["parameters"].keys()
    config = parse_agent_words(sweep, **values)
    assert config.optimizer.lr == 0.004567
    assert config.attention.backend == "flash"


@pytest.mark.slow
def test_small_numbers_are_numbers(sweep):
    """Python writes them as 1e-05."""
    assert parse_agent_words(sweep, **{"optimizer.lr": 1e-5}).optimizer.lr == 1e-5
