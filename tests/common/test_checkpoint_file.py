"""Checkpoint files: damage, unknown formats, and files that are replaced while they are read."""

import zipfile
from contextlib import nullcontext
from io import BytesIO
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from helpers import file_size_limit

from common.checkpoint_file import FORMAT, load_checkpoint, save_checkpoint
from common.errors import UserError


@pytest.mark.parametrize(("owner", "name"), [(torch, "load"), (torch.UntypedStorage, "from_file")])
def test_checkpoint_that_is_replaced_while_it_is_read_is_old_or_new(
    trained, workdir, monkeypatch, owner, name
):
    """torch.load opens a file more than once. Before torch.load, or before the weights, another one takes its place."""
    path = Path("runs/a/checkpoints/last.pt")
    old = load_checkpoint(path)
    new = {
        **old,
        "step": old["step"] + 1,
        "model": {name: weight + 1 for name, weight in old["model"].items()},
    }
    new["padding"] = torch.zeros(1000)  # changes the offsets in the file
    save_checkpoint(path, old)
    replacements, function = [new], getattr(owner, name)

    def replace_and_call(*args, **kwargs):
        if replacements:
            save_checkpoint(path, replacements.pop())
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, replace_and_call)
    content = load_checkpoint(path)
    assert not replacements, "it was never replaced"
    expected = old if content["step"] == old["step"] else new
    assert all(
        torch.equal(content["model"][name], weight) for name, weight in expected["model"].items()
    )


@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_damaged_checkpoint_is_refused(tmp_path, damage):
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"step": 1, "weights": torch.randn(1000)})
    raw = bytearray(path.read_bytes())
    if damage == "cut":
        raw = raw[: len(raw) // 2]
    else:
        with zipfile.ZipFile(path) as archive:
            largest = max(archive.infolist(), key=lambda entry: entry.file_size)
        raw[largest.header_offset + 200 + largest.file_size // 2] ^= 1
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"last.pt is damaged"):
        load_checkpoint(path)


def test_full_disk_leaves_the_previous_checkpoint_and_no_other_file(tmp_path):
    save_checkpoint(path := tmp_path / "last.pt", {"step": 1})
    with pytest.raises(OSError, match=r"File too large: '.*last\.pt'"), file_size_limit(5_000):
        save_checkpoint(
            path, {"step": 2, "weights": torch.zeros(20_000)}
        )  # torch itself raises a RuntimeError
    assert load_checkpoint(path)["step"] == 1 and list(tmp_path.iterdir()) == [path]


def test_signal_while_torch_writes_is_not_hidden(tmp_path, monkeypatch):
    writes = iter([BytesIO().write, Mock(side_effect=KeyboardInterrupt("stopped"))])
    file = Mock(write=lambda data: next(writes)(data))
    monkeypatch.setattr("common.checkpoint_file.atomic_writer", lambda path: nullcontext(file))
    with pytest.raises(KeyboardInterrupt, match="stopped"):
        save_checkpoint(tmp_path / "last.pt", {"step": 1})


def test_reading_a_checkpoint_executes_no_code(tmp_path):
    class Attack:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    torch.save({"format": FORMAT, "step": Attack()}, tmp_path / "last.pt")
    with pytest.raises(UserError, match=r"last.pt is damaged"):
        load_checkpoint(tmp_path / "last.pt")
    assert not (tmp_path / "executed").exists()


def test_unknown_checkpoint_format_is_refused(tmp_path):
    torch.save({"format": 99}, tmp_path / "last.pt")
    with pytest.raises(UserError, match=f"checkpoint format 99, but this version reads {FORMAT}"):
        load_checkpoint(tmp_path / "last.pt")
