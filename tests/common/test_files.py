"""Files that are complete or absent, and files that cannot be read."""

import threading
from pathlib import Path

import pytest
from helpers import file_size_limit

from common.errors import UserError
from common.files import (
    atomic_write,
    atomic_writer,
    check_output,
    new_folder,
    read_json,
    read_text,
)


def test_full_disk_leaves_the_previous_file_and_no_other(tmp_path):
    path = tmp_path / "a.txt"
    atomic_write(path, "old")
    with pytest.raises(OSError, match=r"File too large: '.*a\.txt'"), file_size_limit(1000):
        atomic_write(path, "new" * 1000)
    assert path.read_text(encoding="utf-8") == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_error_of_reading_keeps_the_name_of_its_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"source\.txt"), atomic_writer(tmp_path / "a.txt"):
        (tmp_path / "source.txt").read_bytes()
    assert not list(tmp_path.iterdir())


def test_previous_file_is_replaced_and_not_overwritten(tmp_path):
    """A process that is killed while it overwrites a file would leave a part of it."""
    path = tmp_path / "a.txt"
    atomic_write(path, "old")
    with open(path, encoding="utf-8") as previous:
        atomic_write(path, "new")
        assert previous.read() == "old"
    assert path.read_text(encoding="utf-8") == "new"


def test_json_file_that_does_not_exist_is_empty(tmp_path):
    assert read_json(tmp_path / "a.json") == {}


@pytest.mark.parametrize("content", ['{"a": 1', "[]", "null", ""])
def test_damaged_json_file_is_refused_with_its_name(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=r"a\.json cannot be read .*; restore it"):
        read_json(path)


def test_only_the_first_byte_order_mark_is_removed(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfa\r\n\xef\xbb\xbf")
    assert read_text(str(path)) == "a\r\n\ufeff"


def test_text_in_another_encoding_is_refused_with_its_name(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("été".encode("latin-1"))
    with pytest.raises(UserError, match=r"a\.txt cannot be read .*; set a text file in UTF-8"):
        read_text(str(path))


# New folders


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "parent/folder"


def write(folder: Path, content: str = "complete") -> None:
    with new_folder(folder) as unfinished:
        (unfinished / "file").write_text(content, encoding="utf-8")
        assert not folder.exists()


def test_folder_appears_when_it_is_complete(folder):
    write(folder)
    assert (folder / "file").read_text(encoding="utf-8") == "complete"
    assert list(folder.parent.iterdir()) == [folder]


def test_failure_leaves_no_folder(folder):
    with pytest.raises(KeyboardInterrupt), new_folder(folder) as unfinished:
        (unfinished / "file").touch()
        raise KeyboardInterrupt
    assert not list(folder.parent.iterdir())


def test_files_of_a_killed_process_are_removed(folder):
    leftover = folder.with_name(".folder.unfinished")
    leftover.mkdir(parents=True)
    (leftover / "old").touch()
    write(folder)
    assert [path.name for path in folder.parent.rglob("*")] == ["folder", "file"]


def test_second_writer_waits_and_then_finds_the_folder(folder):
    errors = []

    def write_again():
        try:
            write(folder, "another")
        except FileExistsError as error:
            errors.append(error)

    second = threading.Thread(target=write_again)
    with new_folder(folder) as unfinished:
        second.start()
        (unfinished / "file").write_text("complete", encoding="utf-8")
    second.join()
    assert len(errors) == 1
    assert (folder / "file").read_text(encoding="utf-8") == "complete"


@pytest.mark.parametrize("out", ["text.txt", "no/o.jsonl"], ids=["exists", "no folder"])
def test_output_that_cannot_be_a_new_file_is_refused(workdir, out):
    with pytest.raises(UserError, match=f"out={out} exists, or its folder does not"):
        check_output(out)


@pytest.mark.parametrize("out", [None, "o.jsonl"])
def test_new_output_file_is_accepted(workdir, out):
    check_output(out)
