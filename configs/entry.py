"""All of the Hydra glue: the words on a command line become one checked plain dataclass, or one sentence.

    config = start("train", __doc__)     composes and checks; ends the process with code 2 where a word is wrong
    leave(run(main, config))             runs; a refusal from inside becomes a sentence as well

Hydra's compose API reads the YAML groups and the override grammar. Its application half (a folder and a log file
per run, made before anything is checked, and once per process) is not used: train.py makes runs/<name> itself.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from configs.schema import SCRIPTS, register
from errors import TrainingFailed, UserError

CONFIGS = Path(__file__).parent
# Free text, taken to the letter: Hydra's grammar would read "a, b" as a sweep and "f(x)" as a function.
LITERAL = ("prompt", "prompt_file", "name", "run", "data.path")
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
            print(OmegaConf.to_yaml(composed), end="")
            raise SystemExit(0)
        config.check()
        return config
    except UserError as error:
        raise SystemExit(_say(error, 2)) from None


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
    except BrokenPipeError:  # `python sample.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def leave(code: int) -> None:
    """End the process at once: Python would spend most of a second on taking torch apart again."""
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
    return flags, words


def _quote(override: str) -> str:
    """An override with its literal text quoted for Hydra's grammar, and its ${ for OmegaConf's."""
    key, value = override.split("=", 1)
    if key not in LITERAL or (value == "null" and key != "prompt"):
        return override
    value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
    return f"{key}={QuotedString(value, Quote.single).with_quotes()}"


def _compose(script: str, overrides: list[str], config_dir: str | None) -> DictConfig:
    """Composed by Hydra against the schema. Raises UserError."""
    register()
    search = []
    if config_dir is not None:
        folder = Path(config_dir).resolve()
        if not folder.is_dir():
            raise UserError(f"--config-dir {config_dir} is not a folder; name one that holds YAML files")
        search = [f"hydra.searchpath=[{QuotedString(f'file://{folder}', Quote.single).with_quotes()}]"]
        for file in sorted(folder.rglob("*.yaml")):
            if re.search(r"^['\"]?hydra\b.*:|@package\s+hydra", file.read_text(), re.MULTILINE):
                raise UserError(f"{file} sets Hydra's own machinery (hydra:), which could run code; take that out")
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            return compose(script, overrides=[_quote(override) for override in overrides] + search)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(_explain(error, script, overrides)) from None
    except YAMLError as error:
        raise UserError(f"a YAML file cannot be read: {' '.join(str(error).split())}; mend it there") from None


def _explain(error: Exception, script: str, overrides: list[str]) -> str:
    """One sentence for what Hydra or OmegaConf found wrong."""
    text = str(error)
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    inner = next((e for e in chain if isinstance(e, OmegaConfBaseException)), None)

    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        options = [option for option in error.options if option != "schema"]
        return f"{group}={choice}: there is no such choice{_did_you_mean(choice, options)}; set {_one_of(options)}"
    if "Ambiguous value" in text or isinstance(error, OverrideParseException):
        word = next((o for o in overrides if f"'{o}'" in text), overrides[-1] if len(overrides) == 1 else None)
        what = f"{word!r}" if word else f"one of {', '.join(map(repr, overrides))}"
        if "Ambiguous value" in text:
            return f"{what} gives several values, and one command trains one setting; set one value"
        key = word.split("=", 1)[0] if word else "key"
        return f"{what} cannot be read as key=value; quote special characters twice, as in '{key}=\"a, b\"'"

    key = getattr(inner, "full_key", None) or _search(r"full_key: (\S+)", text)
    where = _search(r"In '([^']+)'", text)
    where = f" (in {where}.yaml)" if where else ""
    if key and ("not in '" in text or "Could not override" in text or "not in '" in str(inner)):
        return f"{key}: there is no such key{where}{_did_you_mean(key, _keys(script))}; see --help and --cfg job"
    if key:
        given = next((o for o in overrides if o.split("=", 1)[0] == key), key)
        expects = _expected(script, key) or str(inner or error).split("\n")[0]
        return f"{given}{where} does not fit: {key} takes {expects}"
    return " ".join(text.split())


def _search(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return found.group(1) if found else None


def _one_of(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"


def _did_you_mean(wrong: str, options: list[str]) -> str:
    """The nearest option: the same last word elsewhere first (steps -> train.steps), then by likeness."""
    leaf = wrong.split(".")[-1]
    near = [option for option in options if option.split(".")[-1] == leaf]
    near = near or difflib.get_close_matches(wrong, options, n=1, cutoff=0.5)
    near = near or [o for o in options if o.split(".")[-1] in difflib.get_close_matches(leaf, [o.split(".")[-1]])][:1]
    return f", did you mean {_one_of(near)}?" if near else ""


def _keys(script: str) -> list[str]:
    """Every key of the script's default config, sections and leaves: model, model.n_layer, ..."""

    def below(node: dict, prefix: str) -> list[str]:
        keys = []
        for key, value in node.items():
            keys += [prefix + key, *(below(value, f"{prefix}{key}.") if isinstance(value, dict) else [])]
        return keys

    return below(OmegaConf.to_container(_compose(script, [], None)), "")


def _expected(script: str, key: str) -> str | None:
    """In words, the type that the schema wants for `key`; None for a key that it leaves open."""
    node, kind = SCRIPTS[script], None
    for part in key.split("[")[0].split("."):
        kinds = {field.name: field.type for field in fields(node)} if is_dataclass(node) else {}
        if part not in kinds:
            return None
        node = kind = kinds[part]
    words = {
        "int": "a whole number", "float": "a number", "bool": "true or false", "str": "a word",
        "list[float]": "a list of numbers, as in [0.9,0.95]", "list[str]": "a list of words, as in [a,b]",
    }  # fmt: skip
    name = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    base, _, optional = name.partition(" | ")
    if base not in words:
        return None
    return words[base] + (", or null" if optional else "")


def choices(group: str) -> list[str]:
    """The names that group=... can take."""
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))


def _help_page(script: str, doc: str) -> str:
    groups = {path.name: choices(path.name) for path in sorted(CONFIGS.iterdir()) if path.is_dir()}
    used = (CONFIGS / f"{script}.yaml").read_text()
    lines = [f"  {group + '=':14}{' | '.join(names)}" for group, names in groups.items()
             if names and re.search(rf"^  - {group}:", used, re.MULTILINE)]  # fmt: skip
    return "\n".join([doc.strip(), "", *(["groups, a choice of each:", *lines, ""] if lines else []), FLAGS.rstrip()])
