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
from common.settings import check
from training.signals import run_main, run_process, start_process

LAUNCHER = re.compile(
    r"hydra/launcher=submitit_\w+|hydra\.launcher\.(?!.*_target_).+"
)  # a _target_ could run any code
MIX_OR_ITEM = r"(?<=^data)\.mix\.[^.]+|\.\d+$"  # parts that key_types does not list: data.mix.NAME.path, betas.0
FLAGS = """flags:
  --help            print this page and exit
  --cfg job         print the composed config and exit
  --config-dir DIR  also search DIR for YAML files (DIR/experiment/mine.yaml: experiment=mine)"""


def parse_config(script: str, doc: str, argv: list[str] | None = None) -> Any:
    """Parse a command line.

    script, doc: its name without .py, and its docstring for --help.
    argv: defaults to sys.argv, and then also sets up the process's signals and output streams.
    Returns the script's checked config. Exits the process for flags that print something, and for invalid words.
    """
    if argv is None:
        start_process()
    configs: list[Any] = []

    def parse() -> int:
        from configs.compose import compose_config

        flags = _parse_flags(script, argv)
        if flags.help:
            print(_help_page(script, doc))
        elif flags.multirun:
            from configs.multirun import run_multirun

            return run_multirun(flags) if argv is not None else run_process(run_multirun, flags)
        else:
            config = compose_config(script, flags.words, flags.config_dir)
            if script == "compare":
                config.folders += flags.folders
            if flags.cfg:
                print(yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=True), end="")
            else:
                check(config)
                configs.append(config)
        return 0

    code = run_main(parse)
    if not configs:
        raise SystemExit(code)
    return configs[0]


def _parse_flags(script: str, argv: list[str] | None) -> argparse.Namespace:
    """Parse the flags; .words and .launcher_words are key=value. Raises UserError for other words.

    .folders: the words of compare.py that name runs and sweeps, even if they look like attention=flash,seed=1.
    """
    from configs.compose import list_groups  # imports Hydra, which takes 0.2 s
    from configs.error_messages import SYNONYMS, did_you_mean, key_types

    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("--help", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--config-dir")
    short_flags = {"-h": "--help"}  # argparse itself would read -model=gpt2 as -m odel=gpt2
    if script == "train":
        parser.add_argument("--multirun", action="store_true")
        short_flags["-m"] = "--multirun"
    parser.set_defaults(multirun=False, words=[], launcher_words=[], folders=[])
    argv = sys.argv[1:] if argv is None else argv
    try:
        flags, words = parser.parse_known_args([short_flags.get(word, word) for word in argv])
    except argparse.ArgumentError as error:
        raise UserError(f"{error}; see --help") from None
    keys = [*key_types(script), *list_groups(script), *["sweep.trials"] * flags.multirun]
    wrong: list[str] = []
    for word in words:
        key = word.partition("=")[0]
        is_setting = re.match(r"[A-Za-z][\w./-]*=", word)
        if flags.multirun and LAUNCHER.fullmatch(word):
            flags.launcher_words.append(word)
        elif (
            script == "compare"
            and not word.startswith("-")
            and (not is_setting or Path(word).exists())
        ):
            flags.folders.append(word)
        elif is_setting and re.sub(MIX_OR_ITEM, "", key) in keys:
            flags.words.append(word)
        elif is_setting:
            wrong.append(f"{key}: there is no such key{did_you_mean(key, keys, SYNONYMS)}")
        elif (
            not wrong or "=" in word[1:]
        ):  # otherwise, the word is the value of a wrong word: --steps 3
            is_text_file = "data.path" in keys and Path(word).is_file()
            hint = (
                f" (did you mean data.path={word}?)"
                if is_text_file
                else did_you_mean(key, keys, SYNONYMS)
            )
            wrong.append(f"{word!r} is not a setting of the form key=value{hint}")
    if wrong:
        raise UserError(f"{', '.join(wrong)}; see --help and --cfg job")
    return flags


def _help_page(script: str, doc: str) -> str:
    from configs.compose import list_choices, list_groups

    lines = [
        f"  {group + '=':14}{' | '.join(list_choices(group))}" for group in list_groups(script)
    ]
    lines = [textwrap.fill(line, 100, subsequent_indent=" " * 16) for line in lines]
    lines = ["groups and their choices:", *lines, ""] if lines else []
    return "\n".join([doc.strip(), "", *lines, FLAGS])
