"""README.md and docs/*.md: every command, YAML file, Python example and link works as written.

Each command is composed unchanged, and then runs with a tiny model and few steps; commands that are equal then run
once. A command whose comment names a GPU, a cluster or several machines is only composed. A data set or vocabulary that
would be downloaded is replaced.
"""

import io
import os
import re
import shutil
import subprocess
import sys
from contextlib import chdir

import docs_helpers as docs
import pytest
from docs_helpers import ATTENTION_PAGES, HACKING, PAGES, Command
from helpers import ROOT, TEXT, run_command

from configs.cli import parse_config

WITH_COMMANDS = [*PAGES, *ATTENTION_PAGES]
COMMANDS = [
    command
    for page in WITH_COMMANDS
    if page != HACKING  # its commands need its changes
    for command in docs.read_commands(page)
    if command.script is not None
]
RUN = docs.distinct([command for command in COMMANDS if not command.needs_other_machine])
PYTHON = [
    pytest.param("\n".join(lines), id=f"{page.name}:{first}")
    for page in PAGES
    if page != HACKING
    for first, language, lines in docs.blocks(page)
    if language == "python"
]


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory):
    """A run with the tiny model of shortened commands and a byte vocabulary."""
    folder = tmp_path_factory.mktemp("docs")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    return train_tiny(folder, "name=mine")


def train_tiny(folder, *words: str):
    settings = docs.SHRINK["train"] | docs.SHRINK_ALWAYS["train"] | {"model.n_embd": 16}
    with chdir(folder):
        words = (*words, "data=text", "data.path=text.txt", "tokenizer=byte")
        assert (
            run_command("train", *words, *(f"{key}={value}" for key, value in settings.items()))
            == 0
        )
    return folder / "runs" / words[0].removeprefix("name=")


@pytest.fixture(scope="session")
def exported_folder(trained_run):
    """A run that can be exported, as a folder in the format of transformers."""
    run = train_tiny(trained_run.parents[1], "name=llama", "model=llama")
    with chdir(trained_run.parents[1]):
        assert run_command("export", "run=llama") == 0
    return run / "huggingface"


def compose(command: Command):
    """Compose and check the config of a command; of a sweep, the config of its first job."""
    words = docs.replace_vocabulary(command.words)
    if command.is_sweep:
        not_of_one_run = ("-m", "hydra", "sweep.trials=")
        words = [
            docs.first_values(word, 1) for word in words if not word.startswith(not_of_one_run)
        ]
    return parse_config(command.script, "", words)


@pytest.fixture
def prepared(workdir, trained_run, exported_folder):
    """prepared(command) puts everything that the command reads into the current folder."""

    def prepare(command):
        docs.write_yaml_files(
            next(page for page in WITH_COMMANDS if command.place.startswith(page.name)), workdir
        )
        docs.copy_run(trained_run, workdir / "runs/newest")
        docs.prepare_folder(workdir, trained_run, exported_folder, command)

    return prepare


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.is_slow or c not in RUN], ids=lambda c: c.place
)
def test_command_composes(command, prepared, capsys):
    prepared(command)
    try:
        compose(command)
    except SystemExit as end:  # --help and --cfg print and stop; a transcript may show a refusal
        message = capsys.readouterr().err
        assert end.code == (2 if shows_refusal(command) else 0), message


def shows_refusal(command: Command) -> bool:
    return bool(command.output) and command.output[0].startswith(f"{command.script}.py: ")


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, id=command.place, marks=pytest.mark.slow if command.is_slow else ())
        for command in RUN
    ],
)
def test_command_runs(command, prepared, monkeypatch, capsys):
    if command.value("tasks"):
        pytest.importorskip("lm_eval", reason="NOT RUN: needs lm-eval")
    prepared(command)
    monkeypatch.setattr(sys, "argv", [f"{command.script}.py", *command.words])
    monkeypatch.setattr(sys, "stdin", io.StringIO("The 1\n\n"))
    if {"--help", "--cfg"} & set(command.words):
        assert run_command(command.script, *command.words) == 0
        return
    try:
        words = docs.shrink(command, getattr(compose(command), "data", None))
    except SystemExit:
        words = command.words  # refused; the message is compared below
        capsys.readouterr()
    if command.launcher:
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *command.launcher,
            ROOT / "train.py",
            *words,
        ]
        environment = os.environ | dict(re.findall(r"\b([A-Z_]+)=(\S+)", command.text))
        done = subprocess.run(launch, capture_output=True, text=True, timeout=600, env=environment)
        assert done.returncode == 0, done.stderr
        return
    code = run_command(command.script, *words)
    message = capsys.readouterr().err
    assert code == (2 if shows_refusal(command) else 0), message
    if shows_refusal(command):
        assert message.strip() == command.output[0]


@pytest.mark.parametrize("code", PYTHON)
def test_python_example_runs(code, workdir, trained_run, exported_folder):
    docs.copy_run(trained_run, workdir / "runs/mine")
    shutil.copytree(exported_folder, workdir / "llama")  # of docs/interoperability.md
    (workdir / "runs/sweeps/sizes").mkdir(parents=True)  # of docs/sweeps.md
    (workdir / "runs/sweeps/sizes/comparison.csv").write_text(
        "training_flops,val_loss\n1e12,4\n1e14,3\n", encoding="utf-8"
    )
    exec(compile(code, "example", "exec"), {})


@pytest.mark.parametrize(
    "page",
    [*WITH_COMMANDS, *sorted((ROOT / "docs/experiments").glob("*.md"))],
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


def test_every_page_is_linked_from_the_readme():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for page in PAGES[1:]:
        assert f"docs/{page.name}" in readme, page.name
    index, *pages = ATTENTION_PAGES
    assert "docs/attention/README.md" in readme
    assert all(f"({page.name})" in index.read_text(encoding="utf-8") for page in pages)


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 160
