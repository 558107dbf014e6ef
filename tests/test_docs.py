"""README.md and docs/*.md: every command, YAML file, Python example and link works as written.

Each command is composed as it is on the page. The slow tests also run it, with a small model and
few steps. docs_helpers.py lists the commands that are not run.
"""

import io
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import docs_helpers as docs
import pytest
from docs_helpers import ATTENTION_PAGES, PAGES, PAGES_WITH_CHANGES, Command
from helpers import ROOT, run_command

from configs.cli import parse_config

COMMANDS = [
    command
    for page in [*PAGES, *ATTENTION_PAGES]
    if page not in PAGES_WITH_CHANGES
    for command in docs.read_commands(page)
]
OURS = [command for command in COMMANDS if command.script is not None]
PYTHON = [
    pytest.param("\n".join(lines), id=f"{page.name}:{first}")
    for page in PAGES
    if page not in PAGES_WITH_CHANGES
    for first, language, lines in docs.blocks(page)
    if language == "python" and "import optuna" not in lines
]


def mark(command: Command):
    """A parameter of a test. A refusal and the single runs of README.md are fast."""
    is_single_run = command.script in ("train", "sample") and not command.is_sweep
    is_fast = command.is_refused or (is_single_run and command.page == "README.md")
    return pytest.param(command, id=command.place, marks=() if is_fast else pytest.mark.slow)


@pytest.fixture(scope="session")
def template(tmp_path_factory) -> Path:
    """A folder with everything that the pages read. Tests work in a copy."""
    folder = tmp_path_factory.mktemp("docs")
    docs.make_folder(folder)
    return folder


@pytest.fixture
def folder(template, tmp_path, monkeypatch) -> Path:
    """The current folder: a copy of `template`."""
    shutil.copytree(template, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def remove_output(command: Command) -> None:
    """Remove the runs and the folder that the command makes."""
    for word in command.words:
        key, _, value = word.partition("=")
        if command.script == "train" and key == "name":
            shutil.rmtree(f"runs/{value}", ignore_errors=True)
            shutil.rmtree(f"runs/sweeps/{value}", ignore_errors=True)
        if key == "out":
            shutil.rmtree(value, ignore_errors=True)


def run(command: Command, words: list[str]) -> int:
    """Run a script in this process, and torchrun in another one. Returns the exit code."""
    if "torchrun" not in command.text:
        return run_command(command.script, *words)
    launcher = command.text.partition("train.py")[0]
    line = f"{launcher} {ROOT / 'train.py'} {shlex.join(words)}"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(line, shell=True, env=os.environ | {"PATH": path}).returncode


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.script is None], ids=lambda c: c.place
)
def test_other_program_is_listed(command):
    assert command.reason_not_to_run, (
        f"{command.place}: {command.text}\nlist it in NOT_RUN of docs_helpers.py"
    )
    for file in re.findall(r"^python (\S+\.py)", command.text):
        assert (ROOT / file).is_file()


@pytest.mark.parametrize(
    "command",
    [command for command in OURS if not (command.is_sweep or command.is_refused)],
    ids=lambda command: command.place,
)
def test_command_composes(command, folder, capsys):
    try:
        parse_config(command.script, "", command.words)
    except SystemExit as end:
        assert end.code == 0, f"{command.place}: {command.text}\n{capsys.readouterr().err}"


@pytest.mark.parametrize("command", [mark(c) for c in OURS if c.reason_not_to_run is None])
def test_command_runs(command, folder, monkeypatch, capfd):
    if "tasks=" in command.text:
        pytest.importorskip("lm_eval", reason="NOT RUN: needs lm-eval")
    words = command.short_words()
    monkeypatch.setattr(sys, "argv", [f"{command.script}.py", *words])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"The 1\n\n"), "utf-8"))
    remove_output(command)
    code = run(command, words)
    message = capfd.readouterr().err
    report = f"{command.place}: {command.text}\nran as {command.script}.py {words}\n{message}"
    assert code == (2 if command.is_refused else 0), report
    if command.is_refused:
        assert message.strip() == command.output, report


@pytest.mark.parametrize("code", PYTHON)
def test_python_example_runs(code, folder):
    exec(compile(code, "example", "exec"), {})


@pytest.mark.slow
def test_hyperparameter_search_trains_and_prints_the_best_value(folder, monkeypatch, capfd):
    (search,) = (
        "\n".join(lines)
        for _, language, lines in docs.blocks(ROOT / "docs/training.md")
        if language == "python" and "import optuna" in lines
    )
    words = [*docs.WORDS_BEFORE["train"].split(), *docs.WORDS_AFTER["train"].split()]
    short = search.replace('"experiment=shakespeare_char_cpu_fast"', f"*{words}")
    short = short.replace('"train.py"', repr(str(ROOT / "train.py"))).replace("=10)", "=2)")
    exec(compile(short, "example", "exec"), {})
    assert len(list(folder.glob("runs/lr-*/summary.json"))) == 2
    assert re.search(r"^\{'lr': 0\.\d+\}$", capfd.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    "page",
    [*PAGES, *ATTENTION_PAGES, *sorted((ROOT / "docs/experiments").glob("*.md"))],
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


@pytest.mark.parametrize("page", [*PAGES, *ATTENTION_PAGES], ids=lambda page: page.name)
def test_python_files_that_a_page_names_exist(page):
    for file in re.findall(r"`([\w.-]+/[\w./-]+\.py)`", page.read_text(encoding="utf-8")):
        assert (ROOT / file).is_file(), f"{page.name} names {file}"


def anchors(markdown: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", markdown, re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_every_page_is_linked_from_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        assert f"docs/{page.name}" in readme, page.name


def test_every_attention_page_is_linked_from_their_index():
    index, *pages = ATTENTION_PAGES
    assert "docs/attention/README.md" in (ROOT / "README.md").read_text(encoding="utf-8")
    for page in pages:
        assert f"({page.name})" in index.read_text(encoding="utf-8"), page.name


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 180
