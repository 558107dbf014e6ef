"""Reads the commands of README.md and docs/, and makes the folder in which they run.

A command is a line of a `bash` block, or a line of another block that begins with "$ ". Several
commands in one line are joined by &&. Tables below say which commands are not run, and why, and how
the others are made short.
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

from data_helpers import write_file
from helpers import ROOT, TEXT, run_command

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Their commands need their changes of the code: other tests run them.
HACKING = ROOT / "docs/hacking.md"
ATTENTION_VARIANTS = ROOT / "docs/attention-variants.md"
PAGES_WITH_CHANGES = (HACKING, ATTENTION_VARIANTS)
ATTENTION_PAGES = sorted((ROOT / "docs/attention").glob("*.md"))
SCRIPTS = ("train", "sample", "eval", "prepare", "bench", "compare", "export")

# Commands that no test runs: a pattern that occurs in the command or its comment, and the reason.
NOT_RUN = {
    r"^(git|cd|uv|pip|python3|source|mkdir|ln) ": "prepares the reader's machine",
    r"^(pytest|ruff|ty) ": "is run by .ci/run",
    r"^(wandb|lm_eval|ct2-transformers-converter|optimum-cli|llama.cpp/\S+) ": "is another program",
    r"^(python )?(benchmarks|tests/soak)/": "takes many minutes, or needs a checkout of nanoGPT",
    r"# .*GPU": "needs a GPU",
    r"# .*(several machines|SLURM)": "needs a cluster",
    r"(tasks=hellaswag|run=hf:openai).*# .*network": "downloads questions or a model",
}
# Words before those of the command, which may set the keys to other values.
SMALL_MODEL = (
    "model.n_layer=2 model.n_head=2 model.n_embd=16 model.block_size=16 model.ngram_table_size=64"
)
SMALL_RUN = "train.batch_size=4 train.micro_batch_size=null eval.windows=4 data.max_documents=20"
WORDS_BEFORE = {
    "train": f"{SMALL_MODEL} {SMALL_RUN}",
    "prepare": "data.max_documents=20",
    "bench": f"{SMALL_MODEL} backends=[naive,flash] vocab_size=64 batch_size=16",
}
# Words after those of the command. These keys only determine how long it takes.
SHORT_RUN = "train.steps=2 eval.every=2 checkpoint.every=2 eval.sample.max_new_tokens=2"
WORDS_AFTER = {
    "train": f"{SHORT_RUN} wandb.mode=disabled",
    "sample": "max_new_tokens=8",
    "bench": "block_sizes=[16] rounds=1 repeats=1 seconds=0.001 wandb.mode=disabled",
}
# Words after those of the commands in which a pattern occurs.
LOCAL_TEXT = "data.path=text.txt data.stream=false data.val_split=null data.val_documents=null"
EXCEPTIONS = {
    r"# .*network": f"{LOCAL_TEXT} tokenizer=byte",
    r"data=both": "data.max_documents=null",  # is a setting of the parts of a mix
    r"model\.window=\[64,64": "model.n_layer=4",
}

LINES = TEXT.splitlines()
# Documents that the commands and the YAML blocks read.
FILES = {
    **dict.fromkeys(("mybook.txt", "poem.txt", "letters.txt", "prompt.txt"), TEXT),
    **dict.fromkeys(("articles/a.txt", "letters/a.txt", "src/inner/a.py"), TEXT),
    **dict.fromkeys(("text.txt", "a.txt", "b/a.md", "jokes.txt"), TEXT),
    "stories.txt": "<|endoftext|>".join(LINES),
    "prompts.txt": "The 1\nThe 2",
    "prompts.jsonl": '{"prompt": "The 1"}\n{"prompt": "The 2"}',
    "docs.jsonl": "".join(json.dumps({"text": line}) + "\n" for line in LINES[:3]),
    "posts.jsonl.zst": "".join(json.dumps({"body": line}) + "\n" for line in LINES),
    "2024.jsonl.zst": "".join(json.dumps({"body": line}) + "\n" for line in LINES[:50]),
    "pairs.jsonl": "".join(
        json.dumps({"prompt": line[:9], "completion": line[9:]}) + "\n" for line in LINES
    ),
    "questions.jsonl": '{"context": "The 1", "choices": ["st", "th"], "answer": 0}',
}
# Copies of a run with the small model that the commands and the Python examples read.
COPIES = (
    "other", "names", "base", "sweeps/backends/seed=1", "sweeps/backends/seed=2",
)  # fmt: skip


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
        """The words after the script."""
        return shlex.split(self.text.partition(".py")[2], comments=True)

    @property
    def reason_not_to_run(self) -> str | None:
        reasons = [reason for pattern, reason in NOT_RUN.items() if re.search(pattern, self.text)]
        return reasons[0] if reasons else None

    @property
    def is_refused(self) -> bool:
        """Whether the page shows an error message of the script."""
        return self.output.startswith(f"{self.script}.py: ")

    @property
    def is_sweep(self) -> bool:
        return "-m" in self.words

    def short_words(self) -> list[str]:
        """The words, with a small model and few steps."""
        words = self.words
        if "--help" in words or "--cfg" in words or self.is_refused:
            return words
        if self.is_sweep:  # two values of each key
            words = [word if "[" in word else ",".join(word.split(",")[:2]) for word in words]
            words = [re.sub(r"^train\.steps=\d+,\d+", "train.steps=2,3", word) for word in words]
        exceptions = [
            added for pattern, added in EXCEPTIONS.items() if re.search(pattern, self.text)
        ]
        before = WORDS_BEFORE.get(self.script, "").split()
        after = WORDS_AFTER.get(self.script, "").split()
        return [*before, *words, *after, *" ".join(exceptions).split()]


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


def write_yaml_files(folder: Path) -> None:
    """Write the YAML blocks of all pages. A comment in the first line of a block names its file."""
    for page in PAGES:
        for first, language, lines in blocks(page):
            if language == "yaml":
                assert lines[0].startswith("# "), f"{page.name}:{first} does not name its file"
                write_file(f"{folder}/{lines[0].removeprefix('# ')}", "\n".join(lines))


def make_folder(folder: Path) -> None:
    """Fill a folder with what the commands read: documents, YAML files, runs, an exported model."""
    for name, text in FILES.items():
        write_file(f"{folder}/{name}", text)
    write_yaml_files(folder)
    settings = f"{WORDS_BEFORE['train']} {WORDS_AFTER['train']} data.path=text.txt tokenizer=byte"
    with chdir(folder):
        assert run_command("train", "name=mine", *settings.split()) == 0
        for name in COPIES:
            shutil.copytree("runs/mine", f"runs/{name}")
        for name in ("llama", "portable"):
            assert run_command("train", f"name={name}", "model=llama", *settings.split()) == 0
        assert run_command("export", "run=llama", "out=llama") == 0
        (folder / "runs/sweeps/backends/sweep.json").write_text(
            json.dumps({"command": "python train.py -m", "jobs": ["seed=1", "seed=2"]}),
            encoding="utf-8",
        )
