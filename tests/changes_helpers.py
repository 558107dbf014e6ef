"""Applies the changes of the code that a page shows to a copy of the code.

The first line of a block says where the change goes: "# FILE, above|below|in place of LINE".
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import docs_helpers as docs
from helpers import ROOT

HEADER = re.compile(r"# (\S+), (above|below|in place of) (.+)")


def apply_change(folder: Path, lines: list[str]) -> None:
    """Insert the lines of a block where its first line says, with the indentation of that place."""
    header = HEADER.fullmatch(lines[0])
    assert header, f"{lines[0]!r} does not say where the block goes"
    path, place, beginning = header.groups()
    code = (folder / path).read_text(encoding="utf-8").split("\n")
    found = [i for i, line in enumerate(code) if line.strip().startswith(beginning)]
    assert len(found) == 1, f"{len(found)} lines of {path} begin with {beginning!r}"
    start = found[0] + 1 if place == "below" else found[0]
    end = found[0] if place == "above" else found[0] + 1
    indentation = code[found[0]][: -len(code[found[0]].lstrip())]
    code[start:end] = [indentation + line if line else "" for line in lines[1:]]
    (folder / path).write_text("\n".join(code), encoding="utf-8")


def copy_changed_code(page: Path, folder: Path) -> None:
    """Copy the code, and apply all changes of a page."""
    copy_code(folder)
    for first, language, lines in docs.blocks(page):
        if language == "py":
            try:
                apply_change(folder, lines)
            except AssertionError as error:
                raise AssertionError(f"{page.name}:{first}: {error}") from None


def copy_code(folder: Path) -> None:
    """Copy the files that git tracks."""
    list_files = ["git", "ls-files"]
    files = subprocess.run(list_files, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for file in files.splitlines():
        if (ROOT / file).is_file():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, folder / file)


def run_python(folder: Path, words: list[str]) -> None:
    """Run python with these words in a folder. Raises AssertionError if it fails."""
    command = [sys.executable, *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
