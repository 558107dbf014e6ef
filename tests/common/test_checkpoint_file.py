"""Checkpoint files: damage, unknown formats, and files that are replaced while they are read."""

import zipfile
from operator import attrgetter
from pathlib import Path

import pytest
import torch
from helpers import file_size_limit

from common.checkpoint_file import FORMAT, load_checkpoint, save_checkpoint
from common.errors import UserError


@pytest.mark.parametrize("name", ["load", "UntypedStorage.from_file"])
def test_checkpoint_that_is_replaced_while_it_is_read_is_old_or_new(tmp_path, monkeypatch, name):
    """torch.load opens a file more than once."""
    path = tmp_path / "last.pt"
    old = {"step": 1, "weight": torch.zeros(100)}
    new = {"step": 2, "weight": torch.ones(100), "padding": torch.zeros(1000)}  # other offsets
    save_checkpoint(path, old)
    function = attrgetter(name)(torch)

    def replace_and_call(*args, **kwargs):
        monkeypatch.undo()
        save_checkpoint(path, new)
        return function(*args, **kwargs)

    monkeypatch.setattr(f"torch.{name}", replace_and_call)
    content = load_checkpoint(path)
    expected = old if content["step"] == 1 else new
    assert torch.equal(content["weight"], expected["weight"])
    assert load_checkpoint(path)["step"] == 2


def flip_bit(path: Path) -> bytes:
    """The content of a checkpoint with another bit in its largest tensor."""
    with zipfile.ZipFile(path) as archive:
        largest = max(archive.infolist(), key=lambda entry: entry.file_size)
    raw = bytearray(path.read_bytes())
    raw[largest.header_offset + 200 + largest.file_size // 2] ^= 1
    return bytes(raw)


def cut(path: Path) -> bytes:
    """The first half of a file."""
    raw = path.read_bytes()
    return raw[: len(raw) // 2]


@pytest.mark.parametrize("damage", [flip_bit, cut])
def test_damaged_checkpoint_is_refused(tmp_path, damage):
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"step": 1, "weights": torch.randn(1000)})
    path.write_bytes(damage(path))
    with pytest.raises(UserError, match=r"last.pt is damaged"):
        load_checkpoint(path)


def test_full_disk_leaves_the_previous_checkpoint_and_no_other_file(tmp_path):
    """torch itself raises a RuntimeError."""
    path = tmp_path / "last.pt"
    save_checkpoint(path, {"step": 1})
    with pytest.raises(OSError, match=r"File too large: '.*last\.pt'"), file_size_limit(5_000):
        save_checkpoint(path, {"step": 2, "weights": torch.zeros(20_000)})
    assert load_checkpoint(path)["step"] == 1
    assert list(tmp_path.iterdir()) == [path]


def test_reading_a_checkpoint_executes_no_code(tmp_path):
    class Attack:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    torch.save({"format": FORMAT, "step": Attack()}, tmp_path / "last.pt")
    with pytest.raises(UserError, match=r"last.pt is damaged"):
        load_checkpoint(tmp_path / "last.pt")
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [({"format": 99}, f"this version reads {FORMAT}"), ({}, "checkpoint format"), ([1], "damaged")],
    ids=["newer", "none", "no dict"],
)
def test_other_file_of_torch_is_refused(tmp_path, content, message):
    torch.save(content, tmp_path / "last.pt")
    with pytest.raises(UserError, match=rf"last.pt .*{message}"):
        load_checkpoint(tmp_path / "last.pt")
