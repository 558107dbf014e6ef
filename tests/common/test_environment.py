"""Facts about the machine, the software and the command in summary.json."""

import sys
from importlib.metadata import version

import pytest
import torch

from common.machine import describe_environment


@pytest.fixture(scope="module")
def environment() -> dict:
    return describe_environment(torch.device("cpu"))


def test_environment_has_the_device(environment):
    assert environment["device"] == "cpu"
    assert environment["device_name"].endswith(" cores")


def test_environment_has_the_versions_of_packages(environment):
    assert environment["versions"]["torch"] == version("torch")


def test_environment_has_the_commit_of_the_checkout(environment):
    commit = environment["commit"]
    assert commit is None or len(commit.removesuffix("+")) == 40


def test_command_has_no_folder_and_quotes_words_with_spaces(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/some/folder/train.py", "name=a", "eval.sample.prompt=a b"])
    command = describe_environment(torch.device("cpu"))["command"]
    assert command == "python train.py name=a 'eval.sample.prompt=a b'"
