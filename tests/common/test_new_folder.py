"""new_folder (common/files.py): a folder is complete or absent, also after a kill."""

import threading

import pytest

from common.files import new_folder


@pytest.fixture
def path(tmp_path):
    return tmp_path / "parent/folder"


def write(path, content="complete"):
    with new_folder(path) as unfinished:
        (unfinished / "file").write_text(content, encoding="utf-8")


def test_folder_appears_with_its_files(path):
    write(path)
    assert (path / "file").read_text(encoding="utf-8") == "complete"


def test_only_the_folder_remains(path):
    write(path)
    assert list(path.parent.iterdir()) == [path]


def test_folder_is_absent_while_it_is_written(path):
    with new_folder(path):
        assert not path.exists()


def test_failure_leaves_nothing(path):
    with pytest.raises(KeyboardInterrupt), new_folder(path) as unfinished:
        (unfinished / "file").touch()
        raise KeyboardInterrupt
    assert not list(path.parent.iterdir())


def test_files_of_a_killed_process_are_removed(path):
    with new_folder(path) as unfinished:
        name = unfinished.name
    leftover = path.parent / "other" / name
    leftover.mkdir(parents=True)
    (leftover / "old").touch()
    write(path.parent / "other/folder")
    assert [file.name for file in leftover.parent.rglob("*")] == ["folder", "file"]


def test_existing_folder_is_refused_and_not_changed(path):
    write(path)
    with pytest.raises(FileExistsError):
        write(path, "another")
    assert (path / "file").read_text(encoding="utf-8") == "complete"


def test_second_writer_waits_and_then_finds_the_folder(path):
    errors = []

    def write_again():
        try:
            write(path, "another")
        except FileExistsError as error:
            errors.append(error)

    second = threading.Thread(target=write_again)
    with new_folder(path) as unfinished:
        second.start()
        (unfinished / "file").write_text("complete", encoding="utf-8")
    second.join()
    assert len(errors) == 1
    assert (path / "file").read_text(encoding="utf-8") == "complete"
