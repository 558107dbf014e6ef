"""Reads the commands and files that README.md and docs/*.md show, and prepares a folder in which they can run.

A bash block has one command per line. A comment after the command may state what it needs: `# GPU`, `# network`,
`# several machines` or `# SLURM cluster`. A comment at the top of a YAML block names its file: `# own/data/both.yaml`.
It may be followed by a command that uses the file.
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from data_helpers import write_file
from helpers import ROOT, TEXT

from common.settings import unescape
from data.sources import is_remote

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
HACKING = ROOT / "docs/hacking.md"  # test_hacking.py runs its blocks
ATTENTION_PAGES = sorted(
    (ROOT / "docs/attention").glob("*.md")
)  # test_attention_pages.py runs their Python blocks
SCRIPTS = ("train", "sample", "eval", "prepare", "bench", "compare", "export")
NEEDS = re.compile(r"\b(GPUs?|several machines|cluster|SLURM)\b")
YAML_FILE = r"^# (\S+\.yaml)(?:\s+(python .*))?$"
DOWNLOADED_VOCABULARY = r"\btokenizer=(gpt2|cl100k_base|o200k_base)\b"
# Other programs, which the tests do not run.
FOREIGN = (
    "git",
    "uv",
    "pip",
    "source",
    "cd",
    "pytest",
    "ruff",
    "ty",
    "pre-commit",
    "wandb",
    "export",
    "ls",
    "cat",
)
FOREIGN += (
    "ct2-transformers-converter",
    "lm_eval",
    "llama.cpp/convert_hf_to_gguf.py",
    "benchmarks/gpu_check.sh",
)
SMALL_MODEL = {
    "model.n_layer": 2,
    "model.n_head": 2,
    "model.block_size": 16,
    "model.ngram_table_size": 64,
}
SHRINK = {
    "train": SMALL_MODEL
    | {"train.batch_size": 4, "train.micro_batch_size": "null", "eval.windows": 4},
    "bench": SMALL_MODEL | {"vocab_size": 64, "batch_size": 16},  # larger inputs have fewer copies
}
# These replace the values of the command, because they determine only how long it takes.
SHRINK_ALWAYS = {
    "train": {
        "train.steps": 2,
        "eval.every": 2,
        "checkpoint.every": 2,
        "eval.sample.max_new_tokens": 2,
    }
    | {"wandb.mode": "disabled"},
    "sample": {"max_new_tokens": 8},
    "bench": {
        "block_sizes": "[16]",
        "rounds": 1,
        "repeats": 1,
        "seconds": 0.001,
        "wandb.mode": "disabled",
    },
}


@dataclass
class Command:
    """One command of a page: `python train.py name=a` has script "train" and words ["name=a"].

    launcher: the words before the script, as in torchrun --nproc_per_node=2. output: the lines that the page shows
    below it, if the page shows a transcript.
    """

    place: str
    text: str
    comment: str
    script: str | None
    words: list[str]
    launcher: list[str]
    output: list[str] = field(default_factory=list)

    @property
    def needs_other_machine(self) -> bool:
        """Whether the comment states that the command needs a GPU or several machines, or a download of tasks."""
        return bool(NEEDS.search(self.comment)) or (
            self.script == "eval" and "network" in self.comment
        )

    @property
    def is_sweep(self) -> bool:
        return "-m" in self.words

    @property
    def is_slow(self) -> bool:
        """Whether the command runs in the slow suite: it starts processes, measures, or is not on the first page."""
        is_slow = (
            self.is_sweep
            or self.launcher
            or self.script == "bench"
            or "train.profile=true" in self.words
        )
        return bool(is_slow) or not self.place.startswith("README")

    def shortened_words(self) -> list[str]:
        """The words, with two values of each swept key, and without the values that SHRINK_ALWAYS replaces."""
        words = [first_values(word, 2) for word in self.words] if self.is_sweep else self.words
        return [
            word
            for word in words
            if word.split("=", 1)[0] not in SHRINK_ALWAYS.get(self.script, {})
        ]

    def value(self, key: str) -> str | None:
        values = [word.split("=", 1)[1] for word in self.words if word.startswith(f"{key}=")]
        return values[-1] if values else None


def blocks(page: Path) -> Iterator[tuple[int, str, list[str]]]:
    """The fenced blocks of a page: number of the first line, language, lines."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(.*)\n((?s:.*?))^```$", text, re.MULTILINE):
        yield text[: match.start(2)].count("\n") + 1, match[1].strip(), match[2].splitlines()


def read_commands(page: Path) -> list[Command]:
    """All commands of a page, in order: of bash blocks, of YAML blocks' first lines and of transcripts ("$ ...")."""
    commands = []
    for first, language, lines in blocks(page):
        if language == "bash":
            joined = "\n".join(lines).replace("\\\n", "  ")
            for offset, line in enumerate(joined.splitlines()):
                commands += parse_line(f"{page.name}:{first + offset}", line)
        if (
            language == "yaml"
            and (match := re.search(YAML_FILE, "\n".join(lines), re.MULTILINE))
            and match[2]
        ):
            commands += parse_line(f"{page.name}:{first}", match[2])
        if language == "":
            for shown in re.split(r"^\$ ", "\n".join(lines), flags=re.MULTILINE)[1:]:
                line, *output = shown.splitlines()
                (command,) = parse_line(f"{page.name}:{first}", line)
                command.output = output
                commands.append(command)
    return commands


def parse_line(place: str, line: str) -> list[Command]:
    """The commands of one line, separated by &&. Raises AssertionError for a command that the tests do not know."""
    comment = match[1] if (match := re.search(r"(?:^|\s)#\s*(.*)$", line)) else ""
    commands = []
    for text in re.split(r"\s&&\s", line):
        words = shlex.split(text, comments=True)
        words = words[: words.index("|")] if "|" in words else words
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):  # environment variables
            words = words[1:]
        if words[:2] == ["uv", "run"]:  # the commands of .venv, without `python`
            words = ["python"] * words[2].endswith(".py") + words[2:]
        if not words:
            continue
        if words[0] == "sbatch":  # a batch script that passes its arguments to train.py
            assert (ROOT / words[1]).is_file(), f"{place}: {words[1]} does not exist"
            words = ["torchrun", "train.py", *words[2:]]
        files = [i for i, word in enumerate(words) if word.endswith(".py")]
        if words[0] in ("python", "torchrun") and files:
            file = words[files[0]]
            assert (ROOT / file).is_file(), f"{place}: {file} does not exist"
            script = Path(file).stem if Path(file).stem in SCRIPTS else None
            launcher = words[1 : files[0]] if words[0] == "torchrun" else []
            commands.append(
                Command(place, text.strip(), comment, script, words[files[0] + 1 :], launcher)
            )
        else:
            known = words[0] in FOREIGN or words[:3] in (
                ["python", "-m", "venv"],
                ["python3", "-m", "venv"],
            )
            assert known, f"{place}: the tests do not know how to check {text!r}"
    return commands


def write_yaml_files(page: Path, folder: Path) -> None:
    """Write the YAML files that the page shows, and the documents that they read."""
    for first, language, lines in blocks(page):
        if language == "yaml":
            text = "\n".join(lines)
            content = yaml.safe_load(text)
            match = re.search(YAML_FILE, text, re.MULTILINE)
            assert match, (
                f"{page.name}:{first}: name the file of this YAML block in a comment, as in # own/data/a.yaml"
            )
            write_file(f"{folder}/{match[1]}", text)
            for section in [content, *content.get("mix", {}).values()]:
                if isinstance(section, dict) and "path" in section:
                    write_document(folder, section["path"], "text")


def prepare_folder(folder: Path, run: Path, exported: Path, command: Command) -> None:
    """Put the files and runs that the command names into `folder`.

    run: a trained run, which is copied. exported: the folder of another run, in the format of transformers.
    """
    column = command.value("data.text_column") or "text"
    for word in command.words:
        key, _, value = word.partition("=")
        if key.endswith("path"):
            write_document(folder, value, column)
            if separator := unescape(command.value("data.separator")):
                (folder / value).write_text(TEXT.replace("\n", separator), encoding="utf-8")
        elif key in ("prompts", "prompt_file"):
            lines = (
                '{"prompt": "The 1"}\n{"prompt": "The 2"}'
                if value.endswith(".jsonl")
                else "The 1\nThe 2"
            )
            (folder / value).write_text(lines, encoding="utf-8")
        elif key == "tasks" and value.endswith(".yaml"):
            (folder / "questions.jsonl").write_text(
                '{"context": "The 1", "choices": ["st", "th"], "answer": 0}', encoding="utf-8"
            )
        elif value.startswith("hf:"):
            copy_run(exported, folder / value.removeprefix("hf:"))
        elif command.script == "export" and key == "run":
            copy_run(exported.parent, folder / "runs" / value)
            shutil.rmtree(folder / "runs" / value / exported.name)
        elif key in ("run", "tokenizer.run", "train.init_from"):
            copy_run(run, folder / "runs" / value.removeprefix("run:").removeprefix("runs/"))
        elif word.startswith("runs/sweeps/") and command.script == "compare":
            jobs = ["seed=1", "seed=2"]
            for job in jobs:
                copy_run(run, folder / word / job)
            (folder / word / "sweep.json").write_text(
                json.dumps({"command": "python train.py -m", "jobs": jobs}), encoding="utf-8"
            )
        elif word.startswith("runs/"):
            copy_run(run, folder / word)
    if command.script == "train" and (name := command.value("name")):
        shutil.rmtree(folder / "runs" / name, ignore_errors=True)


def copy_run(run: Path, target: Path) -> None:
    if not target.exists():
        shutil.copytree(run, target)


def write_document(folder: Path, value: str, column: str) -> None:
    """Write small documents where data.path=`value` finds them: a file, a folder, a pattern or a list of these."""
    if value.startswith("["):
        for item in json.loads(value):
            write_document(folder, item, column)
        return
    path = folder / value.replace("**", "inner").replace("*", "a")
    rows = [
        {column: TEXT[i : i + 1000], "number": i, "prompt": TEXT[i : i + 50]}
        for i in range(0, 20_000, 1000)
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == "":
        write_file(f"{path}/a.txt", TEXT)
        write_file(f"{path}/b.md", TEXT[:2000])
    else:
        write_file(str(path), lines if ".jsonl" in path.name else TEXT)


def shrink(command: Command, data) -> list[str]:
    """The command's words, with a tiny model and few steps. data: the DataConfig that they compose to."""
    script, words = command.script, command.shortened_words()
    if data is not None and not command.value("tasks"):  # tasks read no document of data
        if (data.source == "hub" and data.path is None) or is_remote(str(data.path)):
            words += ["data.path=text.txt", "data.stream=false", "data.max_documents=null"]
            words += ["data.val_split=null", "data.val_documents=null", "data.val_fraction=0.1"]
        elif data.source == "python_stdlib" and data.path is None:
            words += ["data.max_documents=20"]
    if script in ("train", "prepare"):
        words = replace_vocabulary(words)
        if any(word.startswith("experiment=gpt2") for word in words):
            words.append("tokenizer=byte")
        if command.value("tokenizer") in (None, "bpe") and "experiment=" not in " ".join(words):
            words.append("tokenizer.vocab_size=300")
    words = ["sweep.trials=2" if word.startswith("sweep.trials=") else word for word in words]
    keys = {word.split("=", 1)[0] for word in words}
    small = {key: value for key, value in SHRINK.get(script, {}).items() if key not in keys}
    if script in SHRINK and "model.n_embd" not in keys:
        small["model.n_embd"] = 8 * int(command.value("model.n_head") or 2)
    if script == "bench" and words and "backends" not in keys:  # bench.py alone runs all backends
        small["backends"] = "[naive,flash]"
    small |= SHRINK_ALWAYS.get(script, {})
    return words + [f"{key}={value}" for key, value in small.items()]


def distinct(commands: list[Command]) -> list[Command]:
    """The first of the commands that are equal after they are shortened, such as train.py with other train.steps."""
    first: dict[tuple[str, ...], Command] = {}
    for command in commands:
        key = (
            command.script,
            *command.launcher,
            "words",
            *command.shortened_words(),
            "output",
            *command.output,
        )
        first.setdefault(key, command)
    return list(first.values())


def replace_vocabulary(words: list[str]) -> list[str]:
    """The words with tokenizer=byte in place of a vocabulary that would be downloaded."""
    return [re.sub(DOWNLOADED_VOCABULARY, "tokenizer=byte", word) for word in words]


def first_values(word: str, count: int) -> str:
    """attention=naive,sdpa,flash -> attention=naive,sdpa if count is 2. The range of a search is one value."""
    key, equals, value = word.partition("=")
    if count == 1:
        value = re.sub(r"^(log|interval)\(", "", value)
    return word if "[" in value else key + equals + ",".join(value.split(",")[:count])
