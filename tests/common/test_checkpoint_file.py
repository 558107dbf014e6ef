"""Checkpoint files that are replaced while they are read."""

from pathlib import Path

import pytest
import torch

from common import checkpoint_file


@pytest.mark.parametrize("moment", ["before torch.load", "before the weights"])
def test_checkpoint_that_is_replaced_while_it_is_read_is_old_or_new(trained, workdir, monkeypatch, moment):
    """torch.load opens a file more than once. At `moment`, another checkpoint takes its place."""
    path = Path("runs/a/checkpoints/last.pt")
    old = checkpoint_file.load_checkpoint(path)
    new = {**old, "step": old["step"] + 1, "model": {name: weight + 1 for name, weight in old["model"].items()}}
    new["padding"] = torch.zeros(1000)  # changes the offsets in the file
    checkpoint_file.save_checkpoint(path, old)
    replacements = [new]

    def replace_once():
        if replacements:
            checkpoint_file.save_checkpoint(path, replacements.pop())

    def replacing(function):
        def call(*args, **kwargs):
            replace_once()
            return function(*args, **kwargs)

        return call

    if moment == "before torch.load":
        monkeypatch.setattr(torch, "load", replacing(torch.load))
    else:
        monkeypatch.setattr(torch.UntypedStorage, "from_file", replacing(torch.UntypedStorage.from_file))
    content = checkpoint_file.load_checkpoint(path)
    assert not replacements, "it was never replaced"
    expected = old if content["step"] == old["step"] else new
    assert all(torch.equal(content["model"][name], weight) for name, weight in expected["model"].items())
