"""Compose a command's config: YAML files and key=value words become one typed dataclass.

Hydra merges the YAML files and the words; the dataclasses of schema.py then decide which keys and types are valid.
@hydra.main is not used, because it writes a folder and a log file before anything is checked.
All errors are UserErrors of one sentence.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args, get_origin

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import (
    ConfigKeyError,
    ConfigTypeError,
    InterpolationResolutionError,
    MissingMandatoryValue,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import YAMLError

from common.errors import UserError, format_value
from configs.error_messages import describe_type, did_you_mean, find_type, one_of, remove_null
from configs.schema import OPTIMIZERS, SCRIPTS
from data import DataConfig

CONFIGS = Path(__file__).parent
# Keys whose value is used exactly as typed. Hydra's grammar would read "a, b" as a sweep and "f(x)" as a function.
FREE_TEXT_KEYS = {"prompt", "prompt_file", "prompts", "out", "name", "run"}
FREE_TEXT_KEYS |= {"wandb.group", "data.repo", "data.text_column", "tokenizer.run", "train.init_from"}
FREE_TEXT_OR_LIST_KEYS = ("stop", "path")  # ends of keys that also accept a list: stop='["a", "b"]'
QUOTED_LIST = re.compile(r"""\[\s*(["']).*\1\s*\]""", re.DOTALL)
RUN_GROUPS = ("model", "tokenizer")  # groups that sample.py reads from the checkpoint
RUN_GROUPS_MESSAGE = "a run's model and tokenizer come from its checkpoint; remove this key"


def compose_config(
    script: str, words: list[str], config_dir: str | None = None, settings: dict[str, Any] | None = None
) -> Any:
    """Compose the config of `script`. Returns its dataclass, before the rules of schema.py that span packages.

    words: key=value. config_dir: the user's folder of YAML files. settings: values from Python, set last.
    """
    try:
        with hydra_initialized(config_dir) as search_path:
            for word in words:
                if parse_word(script, word).is_sweep_override():
                    raise UserError(f"{word!r} has several values for one run; set one value, or use train.py -m")
                check_choice(script, word, config_dir)
            composed = compose(script, overrides=[to_hydra_word(script, word) for word in words] + search_path)
        for key, value in (settings or {}).items():
            OmegaConf.update(composed, key, escape_interpolation(value), force_add=True)
        return _apply_schema(script, composed, words, config_dir)
    except (HydraException, OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise UserError(explain_error(error, config_dir)) from None


def _apply_schema(script: str, composed: DictConfig, words: list[str], config_dir: str | None) -> Any:
    """Check all keys and types of a composed config. Returns the script's dataclass. Raises UserError."""
    schema = SCRIPTS[script]
    config, known_keys = OmegaConf.structured(schema), list_keys(schema)
    if "optimizer" in known_keys:  # its keys depend on the optimizer
        name = OmegaConf.select(composed, "optimizer.name")
        if name not in OPTIMIZERS:
            raise UserError(f"optimizer.name={name} is unknown; set optimizer={one_of(list(OPTIMIZERS))}")
        config.optimizer = OmegaConf.structured(OPTIMIZERS[name])
        known_keys += list_keys(OPTIMIZERS[name], "optimizer.")
    mix = OmegaConf.select(composed, "data.mix")
    for name in mix if OmegaConf.is_dict(mix) else ():
        known_keys += [f"data.mix.{name}", *list_keys(DataConfig, f"data.mix.{name}.")]
    try:
        config.merge_with(composed)
        return OmegaConf.to_object(config)
    except OmegaConfBaseException as error:
        key = error.full_key or _find_section_with_value(script, composed, known_keys)
        where = _find_source(script, key, words, config_dir)
        if script == "sample" and key.split(".")[0] in RUN_GROUPS:
            raise UserError(f"{key}: {RUN_GROUPS_MESSAGE}") from None
        if isinstance(error, ConfigKeyError):
            suggestion = did_you_mean(key, known_keys)
            raise UserError(f"{key}{where}: there is no such key{suggestion}; see --help and --cfg job") from None
        if isinstance(error, MissingMandatoryValue):
            mix = re.match(r"data\.mix\.(\w+)\.", key)
            advice = f"add text@mix.{mix[1]} to the defaults of its YAML file" if mix else f"set {key}=VALUE"
            raise UserError(f"{key} has no value; {advice}") from None
        is_type_error = isinstance(error, ValidationError | ConfigTypeError)
        if key and is_type_error and not isinstance(error, InterpolationResolutionError):
            raise UserError(_explain_type_error(script, key, where, composed, words)) from None
        raise UserError(f"{key}{where}: {str(error).splitlines()[0]}") from None


def _find_source(script: str, key: str, words: list[str], config_dir: str | None) -> str:
    """Which of the user's YAML files may set `key`: " (in own/experiment/mine.yaml)"; "" if a word sets it."""
    key = key.split("[")[0]
    word_keys = {word.split("=")[0] for word in words} - set(list_groups(script))
    if config_dir is None or any(f"{key}.".startswith(f"{word_key}.") for word_key in word_keys):
        return ""
    name = re.compile(rf"\b{key.split('.')[-1]}['\"]?\s*:")
    files = [str(file) for file in sorted(Path(config_dir).rglob("*.yaml")) if name.search(file.read_text())]
    return f" (in {one_of(files)})" if files else ""


def _find_section_with_value(script: str, composed: DictConfig, keys: list[str]) -> str:
    """The first section that is set to a single value, as in train=5. OmegaConf's error does not contain its key."""
    for key in keys:
        if is_dataclass(_find_key_type(script, key, composed)) and not OmegaConf.is_dict(
            OmegaConf.select(composed, key)
        ):
            return key
    return ""


def _find_key_type(script: str, key: str, composed: DictConfig) -> Any:
    if key.startswith("optimizer."):
        return find_type(OPTIMIZERS[composed.optimizer.name], key.removeprefix("optimizer."))
    return find_type(SCRIPTS[script], key)


def _explain_type_error(script: str, key: str, where: str, composed: DictConfig, words: list[str]) -> str:
    """One sentence for a value of the wrong type: the value, the expected type and a valid value."""
    kind, value = _find_key_type(script, key, composed), _select_value(composed, key)
    if get_origin(remove_null(kind)) is list and isinstance(value, get_args(remove_null(kind))):
        advice = f"set {key}={format_value([value])}"
    else:
        valid_key = f"{key}.{fields(kind)[0].name}" if is_dataclass(kind) else key.split("[")[0]
        advice = f"set, for example, {valid_key}={format_value(_find_default(script, valid_key, words))}"
    return f"{key}={format_value(value)}{where}: not {describe_type(kind)}; {advice}"


def _find_default(script: str, key: str, words: list[str]) -> Any:
    """The value of a key in the YAML files of this project, with the groups that the words choose."""
    pairs = [word.split("=", 1) for word in words]
    chosen = [
        f"{group}={choice}" for group, choice in pairs if group in list_groups(script) and choice in list_choices(group)
    ]
    with hydra_initialized(None):
        defaults = compose(script, overrides=[to_hydra_word(script, word) for word in chosen])
    return _select_value(defaults, re.sub(r"^data\.mix\.[^.]+\.", "data.", key))


def _select_value(config: DictConfig, key: str) -> Any:
    value = OmegaConf.select(config, key)
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def list_keys(kind: type, prefix: str = "") -> list[str]:
    """List all keys of a dataclass and its sections: model, model.n_layer, ..."""
    keys = []
    for field in fields(kind):
        keys.append(prefix + field.name)
        if is_dataclass(field.type):
            keys += list_keys(field.type, f"{prefix}{field.name}.")
    return keys


@cache  # reading the file takes 15 ms, and each word of the command line needs the list several times
def list_groups(script: str) -> list[str]:
    """List the config groups of a script: model, attention, ..."""
    defaults = OmegaConf.load(CONFIGS / f"{script}.yaml").defaults
    return [next(iter(entry)).split("@")[0] for entry in defaults if entry != "_self_"]


def list_choices(group: str, config_dir: str | None = None) -> list[str]:
    """List the valid values of <group>=NAME."""
    folders = [CONFIGS / group, *([Path(config_dir) / group] if config_dir is not None else [])]
    return sorted(
        {str(file.relative_to(folder).with_suffix("")) for folder in folders for file in folder.rglob("*.yaml")}
    )


def check_choice(script: str, word: str, config_dir: str | None) -> None:
    """Raises UserError if `word` sets a group that the script does not have, or a choice that does not exist."""
    group, choice = word.split("=", 1)
    if group not in list_groups(script):
        if "." not in group and list_choices(group, config_dir):
            raise UserError(_explain_unknown_group(script, group, choice))
        return
    if group == "experiment" and choice == "null":
        return
    options = list_choices(group, config_dir)
    if choice not in options:
        raise UserError(f"{word}: there is no such choice{did_you_mean(choice, options)}; set {one_of(options)}")


def _explain_unknown_group(script: str, group: str, choice: str) -> str:
    if script == "sample" and group in RUN_GROUPS:
        return f"{group}={choice}: {RUN_GROUPS_MESSAGE}"
    advice = "remove it, or see --help"
    if script == "bench" and group == "attention":
        advice = f"set backends=[{choice}]"
    return f"{group}={choice}: {script}.py has no key {group}; {advice}"


def parse_word(script: str, word: str) -> Override:
    """Parse key=value with Hydra's grammar, inside hydra_initialized(). Raises UserError."""
    try:
        config_loader = GlobalHydra.instance().config_loader()  # lists the choices for glob(*)
        return OverridesParser.create(config_loader).parse_overrides([to_hydra_word(script, word)])[0]
    except HydraException:
        key = word.split("=", 1)[0]
        raise UserError(
            f"{word!r} cannot be parsed; put special characters in two pairs of quotes: '{key}=\"a, b\"'"
        ) from None


def to_hydra_word(script: str, word: str) -> str:
    """Convert a word to Hydra's syntax: quote free text, and accept all keys, because schema.py checks them later."""
    key, value = word.split("=", 1)
    if key == "experiment":
        return f"experiment@_global_={value}"
    if key in list_groups(script):
        return word
    is_list = key.endswith(FREE_TEXT_OR_LIST_KEYS) and QUOTED_LIST.fullmatch(value)
    is_free_text = key in FREE_TEXT_KEYS or (key.endswith(FREE_TEXT_OR_LIST_KEYS) and not is_list)
    if is_free_text and (value != "null" or key == "prompt"):
        value = QuotedString(escape_interpolation(value), Quote.single).with_quotes()
    return f"++{key}={value}"


def escape_interpolation(value: Any) -> Any:
    """Escape ${ in a string or a list of strings, because OmegaConf replaces ${...} by another value."""
    if isinstance(value, list | tuple):
        return [escape_interpolation(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


@contextmanager
def hydra_initialized(config_dir: str | None) -> Iterator[list[str]]:
    """Context manager: prepare Hydra for compose(). Yields the words that add the user's folder. Raises UserError."""
    search_path = []
    if config_dir is not None:
        folder = Path(config_dir).resolve()
        if not folder.is_dir():
            raise UserError(f"--config-dir {config_dir} is not a folder; set a folder of YAML files")
        for file in sorted(folder.rglob("*.yaml")):
            if re.search(r"^['\"]?hydra\b.*:|@package\s+hydra", file.read_text(errors="replace"), re.MULTILINE):
                raise UserError(
                    f"{file} changes Hydra's own settings (hydra:), which could run code; remove these settings"
                )
        search_path = [f"hydra.searchpath=[{QuotedString(f'file://{folder}', Quote.single).with_quotes()}]"]
    if GlobalHydra.instance().is_initialized():  # by a sweep, which composes the config of each job
        yield search_path
        return
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield search_path


def explain_error(error: Exception, config_dir: str | None = None) -> str:
    """One sentence for an exception of Hydra, OmegaConf or PyYAML."""
    if isinstance(error, YAMLError):
        return f"a YAML file cannot be read: {' '.join(str(error).split())}; correct it there"
    sentence = str(error).splitlines()[0].rstrip(".")
    merged = re.fullmatch(r"Error merging override \+*(.*)", sentence)
    if merged:
        return f"{merged[1]}: a list cannot replace a section, nor a section a list; see --cfg job"
    if "raised while composing config" in sentence:  # the cause is on the next lines
        return " ".join(str(error).split())
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:  # in the defaults of a YAML file
        group, _, choice = error.missing_cfg_file.rpartition("/")
        options = error.options or list_choices(group, config_dir)
        return f"{sentence}{did_you_mean(choice, options)}; choices of {group}: {', '.join(options)}"
    key = error.full_key if isinstance(error, OmegaConfBaseException) else None
    return f"{key}: {sentence}" if key else sentence
