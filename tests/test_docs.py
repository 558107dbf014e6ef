"""README.md and docs/*.md: commands compose, the first commands of README.md run, links exist."""

import re
from contextlib import chdir
from pathlib import Path

import docs_helpers as docs
import pytest
from data_helpers import write_file
from docs_helpers import ATTENTION_PAGES, ATTENTION_VARIANTS, HACKING, PAGES, Command
from helpers import ROOT, TEXT, run_command

from configs.cli import parse_config

ALL_PAGES = [*PAGES, *ATTENTION_PAGES]
# The commands of a page with changes of the code are tested in a copy of the code.
COMMANDS = [
    command
    for page in ALL_PAGES
    if page not in (HACKING, ATTENTION_VARIANTS)
    for command in docs.read_commands(page)
]
OURS = list({command.text: command for command in COMMANDS if command.script}.values())
# The first commands of a new user. .ci/run runs more of them, as processes.
FIRST_COMMANDS = [
    command
    for command in COMMANDS
    if re.match(r"python (train|sample)\.py(?! -m| experiment)", command.text)
    and command.page == "README.md"
]
# Documents that the commands read.
FILES = (
    "mybook.txt", "poem.txt", "letters.txt", "prompt.txt", "text.txt", "a.txt", "jokes.txt",
    "stories.txt", "articles/a.txt", "letters/a.txt", "src/inner/a.py", "b/a.md",
)  # fmt: skip
TABLES = ("docs.jsonl", "posts.jsonl.zst", "2024.jsonl.zst", "pairs.jsonl")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the documents that the commands read, and the YAML files of all pages."""
    folder = tmp_path_factory.mktemp("docs")
    for name in FILES:
        write_file(f"{folder}/{name}", TEXT)
    for name in TABLES:
        write_file(f"{folder}/{name}", '{"text": "a"}\n')
    for page in PAGES:
        for _, language, lines in docs.blocks(page):
            if language == "yaml":  # its first line is a comment that names its file
                write_file(f"{folder}/{lines[0].removeprefix('# ')}", "\n".join(lines))
    return folder


@pytest.mark.parametrize("command", OURS, ids=lambda command: command.place)
def test_command_composes_or_is_refused_as_shown(command: Command, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("sys.argv", [f"{command.script}.py", *command.words])
    if command.output.startswith(f"{command.script}.py: "):
        assert run_command(command.script, *command.words) == 2
        assert capsys.readouterr().err.strip() == command.output
        return
    try:
        parse_config(command.script, "", command.words)
    except SystemExit as end:  # --help and --cfg
        assert end.code == 0, f"{command.text}\n{capsys.readouterr().err}"


@pytest.fixture(scope="module")
def readme_folder(folder) -> Path:
    """`folder` after the first commands of README.md, with a small model and few steps."""
    with chdir(folder):
        for command in FIRST_COMMANDS:
            words = [*command.words, "max_new_tokens=2"]
            if command.script == "train":
                words = [*docs.SMALL_MODEL, *command.words, *docs.SHORT_RUN]
            assert run_command(command.script, *words) == 0, command.text
    return folder


def test_first_commands_of_the_readme_run(readme_folder):
    assert len(FIRST_COMMANDS) >= 4
    assert (readme_folder / "runs/mine/checkpoints/last.pt").exists()


@pytest.mark.parametrize("page", ["configuration", "generation"])
def test_python_example_runs(readme_folder, monkeypatch, page):
    monkeypatch.chdir(readme_folder)
    for _, language, lines in docs.blocks(ROOT / f"docs/{page}.md"):
        if language == "python":
            exec(compile("\n".join(lines), page, "exec"), {})


@pytest.mark.parametrize(
    "page",
    [*ALL_PAGES, *sorted((ROOT / "docs/experiments").glob("*.md"))],
    ids=lambda page: page.name,
)
def test_links_and_pictures_exist(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'(?:src|href)="([^"]+)"', text)
    for link in links:
        if "://" in link:
            continue
        target, _, anchor = link.partition("#")
        file = (page.parent / target).resolve() if target else page
        assert file.exists(), f"{page.name} links to {link}, which does not exist"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file.read_text(encoding="utf-8")), (
                f"{page.name} links to {link}, which has no such heading"
            )


def anchors(markdown: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", markdown, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)
def test_python_files_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    for file in re.findall(r"(?:`|^python )([\w.-]+/[\w./-]+\.py)\b", text, re.MULTILINE):
        assert (ROOT / file).is_file(), f"{page.name} names {file}"


def test_every_page_is_linked_from_the_readme_or_the_attention_pages():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    index, *pages = ATTENTION_PAGES
    for page in [*PAGES[1:], index]:
        assert f"{page.relative_to(ROOT)}" in readme, page.name
    for page in pages:
        assert f"({page.name})" in index.read_text(encoding="utf-8"), page.name


def test_readme_counts_the_lines_of_the_model_and_the_loop():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    counts = re.findall(r"\]\(([\w/]+\.py)\)\s+\((\d+)", readme)
    assert len(counts) == 7
    for file, lines in counts:
        assert len((ROOT / file).read_text(encoding="utf-8").splitlines()) == int(lines), file


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150
