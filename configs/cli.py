"""The command line of every script: sys.argv becomes a checked dataclass."""

import argparse
import re
import sys
import textwrap
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from common.errors import UserError
from common.process import run_main, run_process, start_process

# argparse itself would read -model=gpt2 as -m odel=gpt2
SHORT_FLAGS = {"-h": "--help", "-m": "--multirun"}
SETTING = re.compile(r"[A-Za-z][\w./-]*=")  # the start of key=value
# Settings of the launcher of a sweep. A _target_ could run any code.
LAUNCHER = re.compile(r"hydra/launcher=submitit_\w+|hydra\.launcher\.(?!.*_target_).+")
FLAGS = """flags:
  --help            print this page and exit
  --cfg job         print the composed config and exit
  --config-dir DIR  also search DIR for YAML files (DIR/experiment/mine.yaml: experiment=mine)"""


def parse_config(script: str, doc: str, argv: list[str] | None = None) -> Any:
    """Parse a command line.

    script, doc: its name without .py, and its docstring for --help.
    argv: defaults to sys.argv, and then also sets up the process's signals and output streams.
    Returns the script's checked config. Exits the process for invalid words, after flags that
    print something, and after a sweep.
    """
    if argv is None:
        start_process()
    config: Any = None

    def parse() -> int:
        nonlocal config
        from configs.compose import compose_config  # imports Hydra, which takes 0.2 s

        flags = parse_flags(script, sys.argv[1:] if argv is None else argv)
        if flags.help:
            print(help_page(script, doc))
        elif flags.multirun:
            from configs.multirun import run_multirun

            if argv is None:
                run_process(run_multirun, flags)  # exits
            return run_multirun(flags)
        else:
            composed = compose_config(script, flags.words, flags.config_dir)
            if script == "compare":
                composed.folders += flags.folders
            if flags.cfg:
                print(yaml.safe_dump(asdict(composed), sort_keys=False, allow_unicode=True), end="")
            else:
                config = composed
        return 0

    exit_code = run_main(parse)
    if config is None:
        raise SystemExit(exit_code)
    return config


def parse_flags(script: str, argv: list[str]) -> argparse.Namespace:
    """Parse the flags of a command line, and sort its words. Raises UserError for unknown words.

    Returns the flags, and the words as .words (key=value), .folders (runs that compare.py
    compares) and .launcher_words (settings of a sweep's launcher).
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--help", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--config-dir")
    if script == "train":
        parser.add_argument("--multirun", action="store_true")
    parser.set_defaults(multirun=False, words=[], folders=[], launcher_words=[])
    try:
        flags, words = parser.parse_known_args([SHORT_FLAGS.get(word, word) for word in argv])
    except argparse.ArgumentError as error:
        raise UserError(f"{error}; see --help") from None
    problems = []
    for word in words:
        if flags.multirun and LAUNCHER.fullmatch(word):
            flags.launcher_words.append(word)
        elif script == "compare" and is_folder(word):
            flags.folders.append(word)
        else:
            flags.words.append(word)
            problems += find_problems(script, word)
    if problems:
        raise UserError(f"{', '.join(dict.fromkeys(problems))}; see --help and --cfg job")
    return flags


def is_folder(word: str) -> bool:
    """Whether a word of compare.py is a folder. The name of a job can look like key=value."""
    return Path(word).exists() or not (SETTING.match(word) or word.startswith("-"))


def find_problems(script: str, word: str) -> list[str]:
    """What is wrong with a word: it is not key=value, its key does not exist, or it has no value.

    Empty if it is right.
    """
    from configs.compose import list_groups
    from configs.error_messages import SYNONYMS, did_you_mean, explain_unknown_key
    from configs.schema import key_type, key_types

    key = word.partition("=")[0]
    keys = [*key_types(script), *list_groups(script)]
    if not SETTING.match(word):
        suggestion = did_you_mean(key, keys, SYNONYMS)
        if "data.path" in keys and Path(word).is_file():
            suggestion = f" (did you mean data.path={word}?)"
        if not suggestion and word[:1].isalnum():
            suggestion = " (a value with spaces needs quotes)"
        return [f"{word!r} is not a setting of the form key=value{suggestion}"]
    if key not in keys and key_type(script, key) is None:
        return [explain_unknown_key(key, keys)]
    if word.endswith("=") and key != "prompt":
        return [f"{word} must have a value, or null"]
    return []


def help_page(script: str, doc: str) -> str:
    """The script's docstring, the choices of its config groups, and the flags."""
    from configs.compose import list_choices

    lines = [doc.strip(), ""]
    for group, choices in list_choices(script).items():
        line = f"  {group + '=':14}{' | '.join(choices)}"
        lines.append(textwrap.fill(line, 100, subsequent_indent=" " * 16))
    return "\n".join([*lines, "", FLAGS])
