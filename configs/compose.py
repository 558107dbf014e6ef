"""Compose a command's config: Hydra merges YAML files and key=value words into one typed dataclass.

The dataclasses of schema.py are Hydra's schema (its ConfigStore), so Hydra itself refuses unknown keys and wrong types.
@hydra.main is not used, because it writes a folder and a log file before anything is checked.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from common.errors import UserError
from configs.error_messages import explain_error, no_such_choice
from configs.preset import add_preset_values, select_preset
from configs.schema import SCRIPTS
from training.config import OPTIMIZER_CONFIGS, OptimizerConfig

CONFIGS = Path(__file__).parent
# Keys whose value is used exactly as typed. Hydra's grammar would read "a, b" as a sweep and "f(x)" as a function.
FREE_TEXT = re.compile(r"prompt|prompt_file|prompts|tasks|out|name|run|.*\.(run|init_from|group|repo|\w+_column)")
FREE_TEXT_OR_LIST = re.compile(r"(.*\.)?(stop|path|val_path)")  # also accept a list: stop='["a", "b"]'


def compose_config(script: str, words: list[str], config_dir: str | None = None) -> Any:
    """Compose the config of a script.

    words: key=value.
    config_dir: the user's folder of YAML files.
    Returns the script's dataclass; common.settings.check must check its values. Raises UserError.
    """
    try:
        with hydra_initialized(config_dir) as search_path:
            for word in words:
                override = parse_word(script, word)
                if override.is_sweep_override():
                    raise UserError(f"{word!r} has several values for one run; set one value, or use train.py -m")
                if override.key_or_group in list_groups(script) and not isinstance(override.value(), str):
                    raise UserError(f"{word}: {no_such_choice(word, list_choices(override.key_or_group))}")
            config = compose(script, overrides=[to_hydra_word(script, word) for word in words] + search_path)
        if "preset" in config:
            config.preset = select_preset(config)
        return OmegaConf.to_object(config)
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, YAMLError, TypeError, ValueError, RecursionError) as error:
        raise UserError(explain_error(script, error)) from None


@cache  # reading the file takes 15 ms, and each word of the command line needs the list several times
def list_groups(script: str) -> list[str]:
    """List the config groups of a script: model, attention, ..."""
    defaults = OmegaConf.load(CONFIGS / f"{script}.yaml").defaults
    return [next(iter(entry)).split("@")[0] for entry in defaults if not isinstance(entry, str)]


def list_choices(group: str) -> list[str]:
    """List the choices of a group, as in model=gpt2."""
    files = [file.stem for file in (CONFIGS / group).glob("*.yaml")]
    return sorted(OPTIMIZER_CONFIGS if group == "optimizer" else files)


def parse_word(script: str, word: str) -> Override:
    """Parse key=value with Hydra's grammar, inside hydra_initialized(). Raises UserError."""
    try:
        config_loader = GlobalHydra.instance().config_loader()  # lists the choices for glob(*)
        return OverridesParser.create(config_loader).parse_overrides([to_hydra_word(script, word)])[0]
    except HydraException:
        advice = f"""put its value in two pairs of quotes: '{word.split("=", 1)[0]}="VALUE"'"""
        raise UserError(f"{word!r} cannot be parsed; {advice}") from None


def to_hydra_word(script: str, word: str) -> str:
    """Convert a word to Hydra's grammar: quote free text."""
    key, value = word.split("=", 1)
    if key == "experiment" and key in list_groups(script):
        return f"experiment@_global_={value}"
    is_list = value.startswith("[") and value.endswith("]")
    is_free_text = FREE_TEXT.fullmatch(key) or (FREE_TEXT_OR_LIST.fullmatch(key) and not is_list)
    if is_free_text and (value != "null" or key == "prompt"):
        value = re.sub(r"(\\*)\$\{", r"\1\1\\${", value)  # OmegaConf would replace ${...} by another value
        value = QuotedString(value, Quote.single).with_quotes()
    elif script == "train":
        value = re.sub(r"^log(\(.*\))$", r"tag(log,interval\1)", value)  # a range of a search
    return f"{key}={value}"


@contextmanager
def hydra_initialized(config_dir: str | None) -> Iterator[list[str]]:
    """Context manager: prepare Hydra for compose(). Yields the words that add the user's folder. Raises UserError."""
    search_path = []
    if config_dir is not None:
        if not config_dir or not Path(config_dir).is_dir():
            raise UserError(f"--config-dir={config_dir} is not a folder; set a folder of YAML files")
        folder = QuotedString(f"file://{Path(config_dir).resolve()}", Quote.single).with_quotes()
        search_path = [f"hydra.searchpath=[{folder}]"]
    is_nested = GlobalHydra.instance().is_initialized()  # in a sweep, which composes the config of each job
    with nullcontext() if is_nested else initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield search_path


def register_schemas() -> None:
    """Store the dataclasses in Hydra, as SCRIPT_schema and as the choices of the group optimizer."""
    for script, config_type in SCRIPTS.items():
        schema = OmegaConf.structured(config_type)
        add_preset_values(schema)
        if "optimizer" in schema:
            schema.optimizer = OmegaConf.structured(OptimizerConfig)  # optimizer=NAME sets one of its subclasses
        ConfigStore.instance().store(f"{script}_schema", schema)
    for name, optimizer_type in OPTIMIZER_CONFIGS.items():
        optimizer = OmegaConf.structured(optimizer_type)
        add_preset_values(optimizer, f"{name}.")
        ConfigStore.instance().store(name, optimizer, group="optimizer")


register_schemas()
