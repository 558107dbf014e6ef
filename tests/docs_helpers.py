"""Reads the blocks and commands of README.md and docs/.

A command is a line of a `bash` block, or a line of another block that begins with "$ ". Several
commands in one line are joined by &&.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from helpers import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Their commands need their changes of the code: other tests run them.
HACKING = ROOT / "docs/hacking.md"
ATTENTION_VARIANTS = ROOT / "docs/attention-variants.md"
ATTENTION_PAGES = sorted((ROOT / "docs/attention").glob("*.md"))
SCRIPTS = ("train", "sample", "eval", "prepare", "bench", "compare", "export")
# Words before those of a training command, which may set the keys to other values.
SMALL_MODEL = [
    "model.n_layer=2", "model.n_head=2", "model.n_embd=16", "model.block_size=16",
    "model.ngram_table_size=64",
]  # fmt: skip
# Words after those of the command, so that it takes less than a second.
SHORT_RUN = [
    "train.steps=2", "train.batch_size=4", "eval.every=2", "eval.windows=4",
    "eval.sample.max_new_tokens=2", "data.max_documents=20", "wandb.mode=disabled",
]  # fmt: skip


@dataclass(frozen=True)
class Command:
    """A command of a page."""

    page: str
    line: int
    text: str  # as it is on the page, with its comment
    output: str  # first line that the page shows below it; "" if it shows none

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def script(self) -> str | None:
        """The script of this project that it runs; None for other programs."""
        match = re.match(r"(?:python|(?:\w+=\w+ )?torchrun .*?) ?\b(\w+)\.py\b", self.text)
        return match[1] if match and match[1] in SCRIPTS else None

    @property
    def words(self) -> list[str]:
        """The words after the script. Of a sweep, those of its last run."""
        words = shlex.split(self.text.partition(".py")[2], comments=True)
        if "-m" not in words:
            return words
        words = [word for word in words if word != "-m" and not word.startswith("hydra")]
        words = [re.sub(r"=[^\[]+,", "=", word) for word in words]
        return ["seed=1" if word == "seed=auto" else word for word in words]


def blocks(page: Path) -> Iterator[tuple[int, str, list[str]]]:
    """The fenced blocks of a page: number of the first line, language, lines."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(.*)\n((?s:.*?))^```$", text, re.MULTILINE):
        yield text[: match.start(2)].count("\n") + 1, match[1].strip(), match[2].splitlines()


def read_commands(page: Path) -> Iterator[Command]:
    """All commands of a page, in order."""
    for first, language, lines in blocks(page):
        joined = "\n".join(lines).replace("\\\n", "  ").splitlines()
        for i, line in enumerate(joined):
            is_comment = line.startswith("#")
            if (language == "bash" and line and not is_comment) or line.startswith("$ "):
                output = "\n".join(joined[i + 1 : i + 2]) if language != "bash" else ""
                for text in line.removeprefix("$ ").split(" && "):
                    yield Command(page.name, first + i, text.strip(), output)
