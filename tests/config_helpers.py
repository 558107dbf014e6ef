"""Command lines that are refused, and values of a config by key."""

from operator import attrgetter

import pytest
from data_helpers import write_file

from configs.cli import parse_config

MINE = ["--config-dir", "own", "experiment=mine"]  # words for write_recipe


def write_recipe(content: str | bytes) -> None:
    """Write a YAML file of the user, which MINE selects."""
    write_file("own/experiment/mine.yaml", content)


def parse(script: str, *words: str, key: str):
    """The value of a key after parsing a command line."""
    return attrgetter(key)(parse_config(script, "", list(words)))


def refuse(capsys, script: str, *words: str) -> str:
    """The one sentence of a command line that is refused."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        parse_config(script, "", list(words))
    out, err = capsys.readouterr()
    assert (stopped.value.code, out, err.count("\n")) == (2, "", 1), err
    return err


def name_case(value) -> str:
    """The id of a case: the script and its words, without the parts of the message."""
    if isinstance(value, tuple):
        return ""
    return " ".join(value)[:60] if isinstance(value, list) else str(value)
