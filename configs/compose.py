"""Compose a command's config: YAML files and key=value words become one typed dataclass.

Hydra merges the YAML files and the words; the dataclasses of schema.py then decide which keys and types are valid.
@hydra.main is not used, because it writes a folder and a log file before anything is checked.
All errors are UserErrors of one sentence.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from common.errors import UserError
from common.files import read_small_file
from configs.error_messages import did_you_mean, explain_error, explain_schema_error, one_of
from configs.schema import OPTIMIZERS, SCRIPTS, list_types
from configs.text_size import AUTO, choose_preset, load_presets
from data import DataConfig

CONFIGS = Path(__file__).parent
MAX_YAML_BYTES = 2**20
# Keys whose value is used exactly as typed. Hydra's grammar would read "a, b" as a sweep and "f(x)" as a function.
FREE_TEXT_KEYS = {"prompt", "prompt_file", "prompts", "tasks", "out", "name", "run", "tokenizer.run"}
FREE_TEXT_KEYS |= {"train.init_from", "wandb.group", "data.repo", "data.text_column", "data.prompt_column"}
FREE_TEXT_OR_LIST_KEYS = ("stop", "path")  # ends of keys that also accept a list: stop='["a", "b"]'
QUOTED_LIST = re.compile(r"""\[\s*(["'].*)?\]""", re.DOTALL)


def compose_config(
    script: str, words: list[str], config_dir: str | None = None, settings: dict[str, Any] | None = None
) -> Any:
    """Compose the config of `script`. Returns its dataclass, of which the caller must call check().

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
        return _apply_schema(script, composed, config_dir)
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError) as error:  # ValueError: wrong defaults
        raise UserError(explain_error(error)) from None
    except RecursionError:
        raise UserError(
            "a YAML file contains itself, through its defaults or an alias (*name); remove that entry"
        ) from None


def _apply_schema(script: str, composed: DictConfig, config_dir: str | None) -> Any:
    """Check all keys and types of a composed config. Returns the script's dataclass. Raises UserError."""
    config, types = OmegaConf.structured(SCRIPTS[script]), list_types(SCRIPTS[script])
    if "optimizer" in types:  # its keys depend on the optimizer
        name = OmegaConf.select(composed, "optimizer.name")
        if name not in OPTIMIZERS:
            raise UserError(f"optimizer.name={name} is unknown; set optimizer={one_of(list(OPTIMIZERS))}")
        config.optimizer = OmegaConf.structured(OPTIMIZERS[name])
        types |= list_types(OPTIMIZERS[name], "optimizer.")
    mix = OmegaConf.select(composed, "data.mix")
    for name in mix if OmegaConf.is_dict(mix) else ():
        types |= {f"data.mix.{name}": DataConfig, **list_types(DataConfig, f"data.mix.{name}.")}
    try:
        config.merge_with(composed)
        for key, kind in types.items():
            if kind in (bool, bool | None) and type(value := OmegaConf.select(composed, key)) is int:
                raise UserError(f"{key}={value} must be true or false")  # OmegaConf has converted it
        if "text_size" in types:
            config.text_size = _resolve_text_size(config, config_dir)
        typed = OmegaConf.to_object(config)
        if "text_size" in types:  # other keys have taken its values, so its name is enough
            typed.text_size = config.text_size and config.text_size.name
        return typed
    except OmegaConfBaseException as error:
        is_set = config_dir is not None and not isinstance(error, MissingMandatoryValue)
        where = f" (set in the command or in a YAML file of {config_dir})" if is_set else ""
        raise UserError(explain_schema_error(error, composed, types) + where) from None


def _resolve_text_size(config: DictConfig, config_dir: str | None) -> DictConfig | None:
    """The preset from which other keys take values, as in ${text_size.steps}. None: no key takes one.

    Raises UserError if a preset is invalid.
    """
    if "${text_size." not in OmegaConf.to_yaml(config):
        return None
    preset = config.text_size
    if not OmegaConf.is_dict(preset) or (preset.name == AUTO and len(preset) > 1):
        raise UserError(
            "text_size is not a setting of a recipe; list `override /text_size: 1MB` in its defaults, or set the keys "
            "that use the values, such as train.steps"
        )
    if preset.name == AUTO:
        if "data" not in config:
            raise UserError("text_size=auto needs data, which bench.py does not have; set text_size=1MB, for example")
        folders = [CONFIGS, *([Path(config_dir)] if config_dir is not None else [])]
        preset = choose_preset(load_presets(folders), OmegaConf.to_object(config.data))
    if OmegaConf.select(config, "train.init_from") is not None:  # a decay to 0 would erase the weights of that run
        preset.weight_decay = preset.ngram_weight_decay = 0.0
    return preset


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
    if script in ("sample", "eval") and group.split(".")[0] in ("model", "tokenizer"):
        raise UserError(f"{group}: a run's model and tokenizer come from its checkpoint; remove this key")
    if group.startswith("text_size."):
        raise UserError(f"{group} cannot be set; set a key that uses it, such as train.steps, or text_size=NAME")
    options = [] if "." in group else list_choices(group, config_dir)
    if options and group not in list_groups(script):
        raise UserError(f"{group}: {script}.py has no such key; see --help")
    if options and choice not in options:
        raise UserError(f"{word}: there is no such choice{did_you_mean(choice, options)}; set {one_of(options)}")


def parse_word(script: str, word: str) -> Override:
    """Parse key=value with Hydra's grammar, inside hydra_initialized(). Raises UserError."""
    try:
        config_loader = GlobalHydra.instance().config_loader()  # lists the choices for glob(*)
        return OverridesParser.create(config_loader).parse_overrides([to_hydra_word(script, word)])[0]
    except HydraException:
        quoted = f"""'{word.split("=", 1)[0]}="VALUE"'"""
        raise UserError(f"{word!r} cannot be parsed; put its value in two pairs of quotes: {quoted}") from None


def to_hydra_word(script: str, word: str) -> str:
    """Convert a word to Hydra's syntax: quote free text, and accept all keys, because schema.py checks them later."""
    key, value = word.split("=", 1)
    if key in list_groups(script):
        return f"experiment@_global_={value}" if key == "experiment" else word
    is_list = key.endswith(FREE_TEXT_OR_LIST_KEYS) and QUOTED_LIST.fullmatch(value)
    is_free_text = key in FREE_TEXT_KEYS or (key.endswith(FREE_TEXT_OR_LIST_KEYS) and not is_list)
    if is_free_text and (value != "null" or key == "prompt"):
        value = QuotedString(escape_interpolation(value), Quote.single).with_quotes()
    elif script == "train":
        value = re.sub(r"^log(\(.*\))$", r"tag(log,interval\1)", value)  # a range of a search
    return f"++{key}={value}"


def escape_interpolation(value: Any) -> Any:
    """Escape ${ in a string or a list of strings, because OmegaConf replaces ${...} by another value."""
    if isinstance(value, list | tuple):
        return [escape_interpolation(item) for item in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def _check_yaml_file(file: Path) -> None:
    """Raises UserError for a file that cannot be read, or whose settings of Hydra would be ignored."""
    content = read_small_file(file, str(file), MAX_YAML_BYTES)
    try:
        config = yaml.safe_load(content)
    except (YAMLError, ValueError, RecursionError):  # Hydra reports it if the file is used
        return
    defaults = config.get("defaults") if isinstance(config, dict) else None
    defaults = defaults if isinstance(defaults, list) else []
    keys = [str(key) for entry in defaults for key in (entry if isinstance(entry, dict) else [entry])]
    is_section = isinstance(config, dict) and "hydra" in config
    is_group = any(re.match(r"(override\s+)?/?hydra/", key) for key in keys)
    if is_section or is_group or re.search(r"@package\s+hydra", content):
        raise UserError(f"{file} changes Hydra's own settings (hydra:); remove these settings")


@contextmanager
def hydra_initialized(config_dir: str | None) -> Iterator[list[str]]:
    """Context manager: prepare Hydra for compose(). Yields the words that add the user's folder. Raises UserError."""
    search_path = []
    if config_dir is not None:
        folder = Path(config_dir).resolve()
        if not config_dir or not folder.is_dir():
            raise UserError(f"--config-dir={config_dir} is not a folder; set a folder of YAML files")
        for group in [*(path.name for path in CONFIGS.iterdir() if path.is_dir()), "hydra"]:
            for file in sorted((folder / group).rglob("*.yaml")):
                _check_yaml_file(file)
        search_path = [f"hydra.searchpath=[{QuotedString(f'file://{folder}', Quote.single).with_quotes()}]"]
    if GlobalHydra.instance().is_initialized():  # by a sweep, which composes the config of each job
        yield search_path
        return
    with initialize_config_dir(str(CONFIGS), version_base="1.3"):
        yield search_path
