"""Compose a command's config from YAML files and key=value words.

Hydra selects the YAML files: its defaults lists say which files a choice such as model=gpt2 needs,
and in which order. The values in them and the words are text, which the types of the dataclasses
in schema.py convert. Composition is pure: it reads nothing but YAML, and measures nothing.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass, replace
from functools import cache
from inspect import formatannotation
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import yaml
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode

from common.errors import UserError
from common.settings import (
    check,
    describe_commas,
    did_you_mean,
    flatten_dict,
    format_value,
    list_keys,
    set_values,
)
from configs.schema import SCRIPTS, SYNONYMS
from data import DataConfig
from training.config import OPTIMIZER_CONFIGS, OptimizerConfig

CONFIGS = Path(__file__).parent


def compose_config(script: str, words: list[str], config_dir: str | None = None) -> Any:
    """Compose and check the config of a script.

    words: key=value. config_dir: folder of the user's YAML files.
    Returns a dataclass. Raises UserError for invalid keys, types and values.
    """
    texts: dict[str, Any] = {}
    for word in words:
        key, _, texts[key] = word.partition("=")
    choices = {group: texts.pop(group) for group in list_groups(script) if group in texts}
    texts = read_files(script, choices, config_dir) | texts
    config = SCRIPTS[script]()
    if "optimizer.name" in texts:
        optimizer_type = OPTIMIZER_CONFIGS.get(texts["optimizer.name"], OptimizerConfig)
        config = replace(config, optimizer=optimizer_type())
    kinds = dict(list_keys(config))
    values = {key: parse_text(script, key, text, kinds) for key, text in texts.items()}
    config = set_values(config, values)
    if "data" in kinds:
        config = replace(config, data=replace_default_data(config.data))
    check(config)
    config.set_keys = frozenset(values)
    return config


def read_files(script: str, choices: dict[str, str], config_dir: str | None) -> dict[str, Any]:
    """Read the YAML files for the choices of groups. Later files override earlier ones.

    Returns texts and lists of texts by key. Raises UserError.
    """
    folders = [CONFIGS]
    words = []
    if config_dir is not None:
        folder = Path(os.path.expanduser(config_dir))
        if not config_dir or not folder.is_dir():
            raise UserError(f"--config-dir={config_dir} is not a folder; set one with YAML files")
        folders.append(folder.resolve())
        path = str(folders[1]).replace("\\", "\\\\").replace("'", "\\'")  # in Hydra's grammar
        words.append(f"hydra.searchpath=['file://{path}']")
    for group, choice in choices.items():
        options = list_choices(group, folders)
        if choice not in options:
            suggestion = did_you_mean(choice, options, {})
            if group == "data" and Path(choice).suffix:
                suggestion = f" (did you mean data.path={choice}?)"
            raise UserError(
                f"{group}={choice} is unknown{suggestion}; "
                f"set one of {', '.join(options)}{describe_commas(choice)}"
            )
        words.append(f"{'experiment@_global_' if group == 'experiment' else group}={choice}")
    texts = {}
    for name, package in select_files(script, *words):
        paths = [folder / f"{name}.yaml" for folder in folders]
        found = list(filter(Path.exists, paths))  # none for files of Hydra itself
        if len(found) > 1:
            raise UserError(f"{found[1]} has the name of a built-in file; rename it")
        for path in found:
            texts |= read_texts(path, package)
    return texts


@cache  # a sweep composes many jobs, and this is most of the time
def select_files(script: str, *words: str) -> list[tuple[str, str]]:
    """Select YAML files by their defaults lists, with Hydra.

    words: choices of groups.
    Returns (path in a folder of configs, section of its keys) of each file. Raises UserError.
    """
    with hydra_loader() as loader:
        defaults = loader.compute_defaults_list(script, list(words), RunMode.RUN).defaults
    return [(file.config_path, file.package) for file in defaults]


def read_texts(path: Path, package: str) -> dict[str, Any]:
    """Read the texts of a YAML file by key. Not even numbers are converted here.

    package: the section of its keys, such as model. It is empty for a recipe.
    """
    content = yaml.load(path.read_bytes(), yaml.BaseLoader) or {}
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a mapping; write lines with key: value")
    if "hydra" in str(content.pop("defaults", None)):
        raise UserError(f"{path} sets hydra, which would have no effect; remove it")
    return flatten_dict(content, f"{package}." if package else "")


def parse_text(script: str, key: str, text: Any, kinds: dict[str, Any]) -> Any:
    """Convert the text of a key to its type. Raises UserError.

    kinds: the types of all keys.
    """
    kind = kinds.get(key)
    if kind is None:
        suggestion = did_you_mean(key, [*kinds, *list_groups(script)], SYNONYMS)
        recipe = Path(key).stem.removeprefix("train_")
        if "experiment" in list_groups(script) and recipe in list_choices("experiment", [CONFIGS]):
            suggestion = f" (did you mean experiment={recipe}?)"  # nanoGPT's config/train_NAME.py
        hint = "" if text else " (text with spaces needs quotes)"
        if not text and not key.startswith("-"):
            if "data.path" in kinds and Path(key).suffix and not suggestion:
                suggestion = f" (did you mean data.path={key}?)"
            elif "run" in kinds:
                suggestion = f" (did you mean run={key}?)"
        raise UserError(f"{key}: there is no such key{suggestion}; see --help and --cfg job{hint}")
    try:
        return parse_value(kind, text)
    except (ValueError, LookupError, yaml.YAMLError):
        type_name = formatannotation(kind).replace("None", "null")
        advice = f"set a value of type {type_name}{describe_commas(text)}"
        if is_dataclass(kind):
            advice = f"set its keys, such as {key}.{fields(kind)[0].name}"
        raise UserError(f"{key}={format_value(text)}: {advice}") from None


def parse_bool(text: str) -> bool:
    """true, yes, on, false, no or off. Raises KeyError."""
    return yaml.SafeLoader.bool_values[text.lower()]


PARSERS = {str: str, int: int, float: float, bool: parse_bool}


def parse_value(kind: Any, text: Any) -> Any:
    """Convert text to a type. Raises ValueError, LookupError or YAMLError.

    kind: of a field of a dataclass. In A | B, the first type that fits is used. Any is text, or a
    list of strings in JSON: ["a", "b"].
    text: in a YAML file, also a list of texts.
    """
    if isinstance(kind, UnionType):
        if text == "null" and NoneType in get_args(kind):
            return None
        if text == "":
            raise ValueError
        for option in get_args(kind):
            with suppress(ValueError, LookupError):
                return parse_value(option, text)
        raise ValueError
    if kind is Any:
        return None if text == "null" else parse_strings(text)
    if get_origin(kind) is list:
        if isinstance(text, str) and text.startswith("["):
            text = yaml.load(text, yaml.BaseLoader)  # [a,b]: its items are text
        if not isinstance(text, list):
            raise ValueError
        (item_kind,) = get_args(kind)
        return [parse_value(item_kind, item) for item in text]
    if not isinstance(text, str):
        raise ValueError
    return PARSERS[kind](text)


def parse_strings(text: Any) -> Any:
    """A list of strings if the text is one in JSON; else the text as it is."""
    with suppress(ValueError, TypeError):
        value = json.loads(text)
        if isinstance(value, list) and all(isinstance(item, str) for item in value):
            return value
    return text


def replace_default_data(data: DataConfig) -> DataConfig:
    """If data.path is set, it replaces the default data."""
    if data.path is None or data.source not in ("none", "python_stdlib"):
        return data
    return replace(data, source="text", name=data.name.replace("python_stdlib", "text"))


@contextmanager
def hydra_loader() -> Iterator[ConfigLoader]:
    """Context manager: Hydra's loader of configs/. Its errors become UserErrors."""
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            yield GlobalHydra.instance().config_loader()
    except Exception as error:  # a wrong YAML file can cause any exception in Hydra and OmegaConf
        reason = " ".join(str(error).partition("Config search path:")[0].split())
        raise UserError(f"Hydra cannot compose this: {reason}") from None


def list_groups(script: str) -> list[str]:
    """List the config groups of a script: model, attention, ..."""
    names = {entry.name for entry in fields(SCRIPTS[script])}
    if "model" in names and "data" in names:
        names.add("experiment")
    return sorted(path.name for path in CONFIGS.iterdir() if path.name in names)


def list_choices(group: str, folders: list[Path]) -> list[str]:
    """List the choices of a config group, as in model=gpt2."""
    return sorted({path.stem for folder in folders for path in folder.glob(f"{group}/*.yaml")})
