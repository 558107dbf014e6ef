"""Rules of DataConfig and TokenizerConfig (data/config.py), files of a source, and their hash."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from data_helpers import load_documents, prepare_data, write_file, write_table
from helpers import BPE, BYTE, TEXT_SOURCE

from common.errors import UserError
from common.settings import check
from data import DataConfig
from data.sources import find_files, hash_source, resolve_source

# Rules


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(), r"data.path.* set data.path"),
        (replace(TEXT_SOURCE, repo="a/b"), r"data.repo=a/b .*data=hub"),
        (DataConfig(source="hub"), r"data.repo.* set data.repo"),
        (replace(TEXT_SOURCE, prompt_column="text"), r"data.prompt_column=text .*text_column"),
        (
            replace(TEXT_SOURCE, prompt_column="q", row_is_document=False),
            r"data.prompt_column=q .*row_is_document",
        ),
        (replace(TEXT_SOURCE, separator=""), r"data.separator= .*null"),
        (replace(TEXT_SOURCE, val_fraction=1.0), r"data.val_fraction"),
        (replace(TEXT_SOURCE, name="../a"), r"data.name"),
    ],
)
def test_settings_that_do_not_fit_together_are_rejected(config, message):
    with pytest.raises(UserError, match=message):
        check(config, "data")


@pytest.mark.parametrize(
    ("path", "label"),
    [
        ("mine.txt", "mine"),
        ("~/books/my-novel.txt.gz", "my-novel"),
        ("/home/me/books/", "books"),
        ("v1.2-notes.txt", "v1.2-notes"),
        ("https://host/a/input.txt", "shakespeare_char"),
        ("hub:alice/repo/a.txt", "shakespeare_char"),
        ("books/*.txt", "shakespeare_char"),
        (["a.txt", "b.txt"], "shakespeare_char"),
        ("ein Buch.txt", "shakespeare_char"),  # cannot be in the name of a run
    ],
)
def test_local_text_in_place_of_a_remote_one_is_named_after_its_file(path, label):
    remote = DataConfig(name="shakespeare_char", path=path, text_bytes=1_115_394)
    assert remote.label == label
    assert replace(remote, text_bytes=None, source="hub", repo="a/b").label == label
    assert replace(remote, text_bytes=None).label == "shakespeare_char"  # a local text


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (replace(BPE, vocab_size=256), r"tokenizer.vocab_size=256 must be above 256"),
        (replace(BPE, vocab_size=None), r"tokenizer.vocab_size=null must be above 256"),
        (replace(BYTE, vocab_size=300), r"tokenizer.vocab_size=300 is not for byte; set null"),
        (replace(BYTE, run="a"), r"tokenizer.run=a .*tokenizer=run"),
        (replace(BYTE, name="run"), r"tokenizer.run=null .*tokenizer=run"),
    ],
)
def test_invalid_tokenizer_settings_are_rejected(config, message):
    with pytest.raises(UserError, match=message):
        check(config, "tokenizer")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"source": "pages"}, r"data.source=pages is unknown; set one of python_stdlib"),
        ({"path": "a.csv", "separator": "#"}, r"data.separator .*not for tables; set null"),
    ],
    ids=["source", "separator"],
)
def test_settings_that_do_not_fit_the_files_are_refused(workdir, keys, message):
    write_table("a.csv", q=["Q: "], text=["a#b"])
    with pytest.raises(UserError, match=message):
        resolve_source(DataConfig(**keys))


def test_unknown_tokenizer_is_refused(workdir):
    with pytest.raises(UserError, match=r"tokenizer.name=words is unknown.* set one of char"):
        prepare_data(TEXT_SOURCE, replace(BYTE, name="words"))


# Files


@pytest.fixture
def folder(workdir) -> None:
    """A folder b with text files, a table, and files that are not read. Each text is its path."""
    paths = ["b/part-10.txt", "b/part-9.txt", "b/deep/x.md", "b/.hidden/no.txt", "b/.no.txt"]
    for path in [*paths, "b/code.py", "runs/a.txt", "data/prepared/a.txt", "other/y.txt"]:
        write_file(path, path)
    write_table("b/t.parquet", text=["row 1", "row 2", "row 3"])
    Path("text.txt").unlink()


ROWS = ["row 1", "row 2", "row 3"]
IN_FOLDER = ["b/deep/x.md", "b/part-9.txt", "b/part-10.txt", *ROWS]


@pytest.mark.parametrize("path", ["b", "b/", "./b", "../{}/b"])
def test_folder_means_its_texts_and_tables_in_order(workdir, folder, path):
    assert load_documents(path.format(workdir.name)) == IN_FOLDER


def test_files_with_equal_numbers_are_sorted_by_name(workdir, monkeypatch):
    files = [write_file(f"c/{name}", name) for name in ("p-001", "p-01", "p-1", "p-1a", "p-1a2")]
    monkeypatch.setattr("glob.glob", lambda *_, **__: files[::-1])
    assert find_files("c/*", "data.path") == files


@pytest.mark.parametrize("path", ["c", "c/*.txt", "c/b.txt"])
def test_link_to_a_missing_file_is_refused(workdir, path):
    Path(write_file("c/a.txt", "text")).with_name("b.txt").symlink_to("missing.txt")
    with pytest.raises(UserError, match=r"^c/b.txt cannot be read; .* pattern"):
        find_files(path, "data.path")


def test_subfolder_that_cannot_be_read_is_refused(folder, monkeypatch):
    """Permissions are simulated, because root can read every folder."""
    monkeypatch.setattr("os.access", lambda file, mode: Path(file).name != "deep")
    with pytest.raises(UserError, match=r"^b/deep cannot be read; change its permissions"):
        find_files("b", "data.path")


def test_outputs_are_not_read(folder):
    assert load_documents(".") == [*IN_FOLDER, "other/y.txt"]


def test_linked_folders_and_second_links_are_not_read(folder):
    Path("b/linked").symlink_to(Path("other").resolve())
    Path("b/link.txt").symlink_to(Path("b/deep/x.md").resolve())
    assert load_documents("b") == IN_FOLDER


@pytest.mark.parametrize(
    ("path", "expected"),
    [("b/part*", ["b/part-9.txt", "b/part-10.txt"]), ("b/**/*.py", ["b/code.py"])],
)
def test_pattern_finds_files_of_any_suffix(folder, path, expected):
    assert load_documents(path) == expected


@pytest.mark.parametrize("path", ["no*", "runs/*", [], ["b/*.py", "no*"]])
def test_path_without_a_file_is_refused(folder, path):
    with pytest.raises(UserError, match=r"data.path=.* has no file to read .* a pattern"):
        load_documents(path)


@pytest.mark.parametrize(
    "path", ["papers", "~no_such_user/x.txt", "x" * 300 + "/y.txt"], ids=lambda p: p[:9]
)
def test_empty_or_impossible_path_gets_no_suggestion(workdir, path):
    Path("papers").mkdir()
    with pytest.raises(UserError, match=r"data.path=.* has no file to read in [^?]*; set a file"):
        find_files(path, "data.path")


@pytest.mark.parametrize("folder", ["", "texts/"])
def test_path_with_a_typo_gets_a_suggestion(workdir, folder):
    write_file(f"{folder}mybook.txt", "text")
    with pytest.raises(UserError, match=rf"\(did you mean {folder}mybook.txt\?\); set"):
        find_files(f"{folder}mybok.txt", "data.path")


def test_list_is_read_in_its_order_and_each_file_once(folder):
    assert load_documents(["b/**/*.py", "b/deep", "b/code.py"]) == ["b/code.py", "b/deep/x.md"]


@pytest.mark.parametrize("name", ["c/a[b].txt", "c/it's.txt", "c/é, x=1.txt", "c/st*r ?.txt"])
def test_path_that_exists_is_not_a_pattern(workdir, name):
    assert load_documents(write_file(name, "text")) == ["text"]
    assert load_documents("[c]/*.txt") == ["text"]
    assert load_documents("c") == ["text"]


@pytest.mark.parametrize(
    ("path", "keys", "expected"),
    [
        ("text.txt", {}, False),
        ("rows.csv", {}, True),
        ("rows.csv", {"row_is_document": False}, False),
        ("text.txt", {"separator": "\n"}, True),
        ("text.txt", {"val_path": "other.txt"}, True),
        (["text.txt", "other.txt"], {}, True),
    ],
)
def test_source_that_can_have_several_documents(workdir, path, keys, expected):
    write_table("rows.csv", text=["a", "b"])
    write_file("other.txt", "a")
    source = resolve_source(DataConfig(path=path, **keys))
    assert source.has_several_documents == expected


# Files in both splits


def hub(split: str, val_split: str | None = None, **keys) -> DataConfig:
    return DataConfig(source="hub", repo="a/b", split=split, val_split=val_split, **keys)


@pytest.fixture
def three_files(workdir) -> None:
    for number in range(3):
        write_file(f"folder/{number}.txt", f"document {number} " * 20)
    Path("link").symlink_to("folder")


FOLDER = DataConfig(path="folder")


@pytest.mark.parametrize(
    "config",
    [
        replace(FOLDER, val_path="link/1.txt"),
        hub("test", "test"),
        hub("a[:9]+b", "b[9:]"),
    ],
)
def test_file_cannot_be_trained_on_and_held_out(three_files, config):
    with pytest.raises(UserError, match="used for both training and validation; remove it"):
        resolve_source(config)


# The hash


@pytest.fixture
def table(workdir) -> DataConfig:
    """The same documents in 1.csv and same.csv, and others in 0.csv."""
    write_table("0.csv", x=["a", "b"], text=["document 0", "b"])
    write_table("1.csv", x=["a", "b"], text=["document 1", "b"])
    shutil.copy("1.csv", "same.csv")
    return DataConfig(path="1.csv")


def hash_config(config: DataConfig) -> str:
    return hash_source(resolve_source(config))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("text_column", "x"),
        ("prompt_column", "x"),
        ("path", "0.csv"),
        ("val_path", "0.csv"),
        ("val_documents", 3),
        ("max_documents", 9),
        ("val_fraction", 0.2),
        ("row_is_document", False),
    ],
)
def test_hash_covers_what_decides_the_documents(table, key, value):
    assert hash_config(replace(table, **{key: value})) != hash_config(table)


@pytest.mark.parametrize(("key", "value"), [("path", "same.csv"), ("document_mask", True)])
def test_hash_covers_nothing_else(table, key, value):
    assert hash_config(replace(table, **{key: value})) == hash_config(table)


@pytest.mark.parametrize(
    "config",
    [
        hub("b"),
        hub("a", "b"),
        hub("a", config="x"),
        hub("a", revision="x"),
    ],
    ids=["split", "val_split", "config", "revision"],
)
def test_hash_covers_what_selects_other_data(config):
    assert hash_config(config) != hash_config(hub("a"))


def test_hash_covers_the_separator(workdir):
    configs = [replace(TEXT_SOURCE, separator=value) for value in (None, "a", "b")]
    assert len(set(map(hash_config, configs))) == 3


@pytest.mark.parametrize("position", [0, 15, 29])
def test_hash_of_a_large_file_covers_its_start_middle_and_end(workdir, monkeypatch, position):
    monkeypatch.setattr("data.sources.MAX_HASHED_BYTES", 2**20)
    content = bytearray(3 * 2**20)
    before = hash_config(DataConfig(path=write_file("large.txt", bytes(content))))
    content[position * len(content) // 30] = 1
    assert hash_config(DataConfig(path=write_file("large.txt", bytes(content)))) != before
