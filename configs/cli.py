"""The command line of every script: sys.argv becomes a checked dataclass."""

import argparse
import re
import sys
import textwrap
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from common.errors import UserError
from common.process import run_main, run_process, start_process
from training.config import RunConfig

# Settings of the launcher of a sweep. A _target_ could run any code.
LAUNCHER = re.compile(r"hydra/launcher=submitit_\w+|hydra\.launcher\.(?!.*_target_).+")
FLAGS = """flags:
  --help            print this page and exit
  --cfg job         print the composed config and exit
  --config-dir DIR  also search DIR for YAML files (DIR/experiment/mine.yaml: experiment=mine)"""


def parse_config(script: str, doc: str | None, argv: list[str] | None = None) -> Any:
    """Parse a command line.

    script, doc: its name without .py, and its docstring for --help.
    argv: defaults to sys.argv, and then also sets up the process's signals and output streams.
    Returns the script's checked config. Exits the process for invalid words, after flags that
    print something, and after a sweep.
    """
    if argv is None:
        start_process()
    from configs.compose import compose_config  # imports Hydra, which takes 0.2 s

    flags = call_or_exit(parse_flags, script, sys.argv[1:] if argv is None else argv)
    if flags.help:
        call_or_exit(print, help_page(script, doc))
        raise SystemExit(0)
    if flags.multirun:
        from configs.multirun import run_multirun

        if argv is None:
            run_process(run_multirun, flags)  # exits
        raise SystemExit(run_main(run_multirun, flags))
    config = call_or_exit(compose_config, script, flags.words, flags.config_dir)
    if script == "compare":
        config.folders += flags.folders
    if flags.cfg:
        print(call_or_exit(format_config, config), end="")
        raise SystemExit(0)
    return config


def call_or_exit(function: Callable, *arguments: Any) -> Any:
    """The result of a function. After an error, the process exits with its sentence."""
    results = []

    def call() -> int:
        results.append(function(*arguments))
        return 0

    code = run_main(call)
    if code != 0:
        raise SystemExit(code)
    return results[0]


def format_config(config: Any) -> str:
    """A config as YAML. A config of train.py has the values of its preset.

    With train.minutes, the preset stays auto if its choice would measure the speed of this machine.
    """
    from common.console import prints_unicode
    from training.presets import choose_preset

    if isinstance(config, RunConfig):
        measures = config.train.minutes is not None and config.flops_per_second is None
        config = config if measures else choose_preset(config)
    return yaml.safe_dump(asdict(config), sort_keys=False, allow_unicode=prints_unicode())


def parse_flags(script: str, argv: list[str]) -> argparse.Namespace:
    """Parse the flags of a command line, and sort its words. Raises UserError for a wrong flag.

    Returns the flags, and the words as .words (key=value), .folders (runs that compare.py
    compares) and .launcher_words (settings of a sweep's launcher).
    """
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--config-dir")
    if script == "train":
        parser.add_argument("-m", "--multirun", action="store_true")
    parser.set_defaults(multirun=False, words=[], folders=[], launcher_words=[])
    try:
        flags, words = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}; see --help") from None
    for word in words:
        if flags.multirun and LAUNCHER.fullmatch(word):
            flags.launcher_words.append(word)
        elif script == "compare" and (Path(word).exists() or not re.search("^-|=", word)):
            flags.folders.append(word)  # the name of a job can look like key=value
        else:
            flags.words.append(word)
    return flags


def help_page(script: str, doc: str | None) -> str:
    """The script's docstring, the choices of its config groups, and the flags."""
    from configs.compose import CONFIGS, list_choices, list_groups

    lines = [(doc or "python -OO removes this page; run python without it").strip(), ""]
    for group in list_groups(script):
        line = f"  {group + '=':14}{' | '.join(list_choices(group, [CONFIGS]))}"
        lines.append(textwrap.fill(line, 100, subsequent_indent=" " * 16))
    return "\n".join([*lines, "", FLAGS])
