"""All of the Hydra glue: the words on a command line become one checked plain dataclass, or one sentence.

    config = start("train", __doc__)     composes and checks; ends the process with code 2 where a word is wrong
    leave(run(main, config))             runs; a refusal from inside becomes a sentence as well

Hydra's compose API reads the YAML groups and the override grammar. Its application half (a folder and a log file
per run, made before anything is checked, and once per process) is not used: train.py makes runs/<name> itself.
"""

import argparse
import errno
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from configs.explain import explain
from configs.schema import SCRIPTS, register
from errors import TrainingFailed, UserError

CONFIGS = Path(__file__).parent
# Free text, taken to the letter: Hydra's grammar would read "a, b" as a sweep and "f(x)" as a function.
LITERAL = ("prompt", "prompt_file", "name", "run", "data.path")
# What goes wrong with files on a user's machine, and is no bug.
MENDABLE = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EEXIST, errno.ENOTDIR, errno.EISDIR}
FLAGS = """flags:
  --help            this page
  --cfg job         print the composed config and stop
  --config-dir DIR  look for YAML files of your own in DIR as well (DIR/experiment/mine.yaml -> experiment=mine)
"""


def start(script: str, doc: str, argv: list[str] | None = None) -> Any:
    """The checked config of `script` from a command line, as plain dataclasses. Ends the process where it is wrong."""
    try:
        flags, overrides = _parse(argv)
        if flags.help:
            print(_help_page(script, doc))
            raise SystemExit(0)
        composed = _compose(script, overrides, flags.config_dir)
        config = OmegaConf.to_object(composed)
        if flags.cfg:
            print(OmegaConf.to_yaml(composed, resolve=True), end="")
            raise SystemExit(0)
        config.check()
        return config
    except UserError as error:
        raise SystemExit(_say(error, 2)) from None
    except (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        sentence = explain(
            error, overrides, SCRIPTS[script], lambda: OmegaConf.to_container(_compose(script, [], None))
        )
        raise SystemExit(_say(sentence, 2)) from None


def run(main: Callable[[Any], int], config: Any) -> int:
    """main(config) -> the process's exit code. What a user can mend is told in one sentence, without a traceback."""
    try:
        return main(config)
    except UserError as error:
        return _say(error, 2)
    except TrainingFailed as error:
        return _say(error, 1)
    except KeyboardInterrupt as error:
        return _say(str(error) or "interrupted", 75)
    except BrokenPipeError:  # nobody reads any more, as in `python sample.py | head`
        return 1
    except OSError as error:
        if error.errno not in MENDABLE:
            raise
        return _say(f"{error.filename or 'writing'}: {error.strerror}; make room or set another folder or name", 1)
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError" and "allocate memory" not in str(error):
            raise
        return _say("out of memory; set a smaller train.micro_batch_size, model.block_size or model", 1)


def leave(code: int) -> None:
    """End the process at once: Python would spend most of a second on taking torch apart again."""
    with suppress(BrokenPipeError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _say(message: object, code: int) -> int:
    print(f"{Path(sys.argv[0]).name}: {message}", file=sys.stderr)
    return code


def _parse(argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Flags, and the key=value overrides. Raises UserError for anything else."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("-h", "--help", action="store_true")
    parser.add_argument("--cfg", choices=["job"])
    parser.add_argument("--config-dir")
    try:
        flags, words = parser.parse_known_args(argv)
    except argparse.ArgumentError as error:
        raise UserError(f"{error}; see --help") from None
    for word in words:
        key = word.split("=", 1)[0]
        if word in ("-m", "--multirun"):
            raise UserError("-m sweeps are not supported: one command trains one setting; start it once for each")
        if word.startswith("-"):
            raise UserError(f"{word} is not a flag of this command; see --help")
        if word.startswith(("+", "~")):
            raise UserError(f"{word}: every key exists already and none can go; set {key.lstrip('+~')}=VALUE instead")
        if key.split(".")[0].split("/")[0].split("@")[0] == "hydra":
            raise UserError(f"{key} belongs to Hydra's own machinery, which this command does not use; leave it out")
        if "=" not in word:
            raise UserError(f"{word!r} is not of the form key=value; see --help")
        if choices(key) and key != "experiment" and word.split("=", 1)[1] in ("", "null"):
            raise UserError(f"{word} leaves {key} without a choice; set {key}={' or '.join(choices(key))}")
    return flags, words


def _quote(override: str) -> str:
    """An override with its literal text quoted for Hydra's grammar, and its ${ for OmegaConf's."""
    key, value = override.split("=", 1)
    if key not in LITERAL or (value == "null" and key != "prompt"):
        return override
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return f"{key}={QuotedString(value, Quote.single).with_quotes()}"


def _compose(script: str, overrides: list[str], config_dir: str | None) -> DictConfig:
    """Composed by Hydra against the schema. Raises UserError, and what Hydra and OmegaConf raise."""
    register()
    search = []
    if config_dir is not None:
        folder = Path(config_dir).resolve()
        if not folder.is_dir():
            raise UserError(f"--config-dir {config_dir} is not a folder; name one that holds YAML files")
        search = [f"hydra.searchpath=[{QuotedString(f'file://{folder}', Quote.single).with_quotes()}]"]
        for file in sorted(folder.rglob("*.yaml")):
            if re.search(r"^['\"]?hydra\b.*:|@package\s+hydra", file.read_text(errors="replace"), re.MULTILINE):
                raise UserError(f"{file} sets Hydra's own machinery (hydra:), which could run code; take that out")
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        return compose(script, overrides=[_quote(override) for override in overrides] + search)


def choices(group: str) -> list[str]:
    """The names that group=... can take."""
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def _help_page(script: str, doc: str) -> str:
    groups = {path.name: choices(path.name) for path in sorted(CONFIGS.iterdir()) if path.is_dir()}
    used = (CONFIGS / f"{script}.yaml").read_text()
    lines = [f"  {group + '=':14}{' | '.join(names)}" for group, names in groups.items()
             if names and re.search(rf"^  - {group}:", used, re.MULTILINE)]  # fmt: skip
    return "\n".join([doc.strip(), "", *(["groups, a choice of each:", *lines, ""] if lines else []), FLAGS.rstrip()])
