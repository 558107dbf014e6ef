"""Compose a command's config: Hydra merges YAML files and key=value words into one typed dataclass.

The dataclasses of schema.py are Hydra's schema (its ConfigStore), so Hydra itself refuses unknown
keys and wrong types. @hydra.main is not used, because it writes a folder and a log file before
anything is checked. For the data of train.py and prepare.py, composition also finds the files:
their sizes select the preset, and a missing file is reported before torch is imported.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from common.errors import UserError
from common.files import parse_yaml, read_file
from common.settings import check
from configs.error_messages import explain_error
from configs.preset import add_preset_values, select_preset
from configs.schema import SCRIPTS, key_type
from data.sources import resolve_sources
from training.config import OPTIMIZER_CONFIGS, OptimizerConfig

CONFIGS = Path(__file__).parent

# Keys, by their last part, whose values are used exactly as typed. a,b is one value of these keys.
LITERAL_KEYS = {
    "group",
    "init_from",
    "out",
    "path",
    "prompt",
    "prompt_column",
    "prompt_file",
    "prompts",
    "repo",
    "run",
    "separator",
    "stop",
    "tasks",
    "text_column",
    "val_path",
}
LIST_KEYS = {"path", "stop", "val_path"}  # can also be lists, as in stop='["a", "b"]'
# Several values, as in a,b and range(1,3), or a value in quotes. [a,b] is neither.
EXPRESSION = re.compile(r"""[^\[{].*[,(]|['"]""")

# YAML files of the user: only null and whole numbers have a type, so that no and 1e3 stay text.
# The schema converts them for keys that are numbers or switches. The loader is a new class,
# derived from yaml.SafeLoader, which refuses a key that occurs twice.
TextLoader = get_yaml_loader()
TextLoader.yaml_implicit_resolvers = {}
TextLoader.add_implicit_resolver(
    "tag:yaml.org,2002:null", re.compile("(~|null|Null|NULL|)$"), ["~", "n", "N", ""]
)
TextLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile("(0|-?[1-9][0-9]*)$"), list("-0123456789")
)
TextLoader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile("<<$"), ["<"])


def compose_config(script: str, words: list[str], config_dir: str | None = None) -> Any:
    """Compose and check the config of a script.

    words: key=value. config_dir: folder of the user's YAML files.
    Returns a dataclass. Raises UserError for invalid keys, types and values, and missing data.
    """
    with hydra_initialized(script, config_dir) as search_path:
        overrides = [to_hydra_word(script, word) for word in words]
        config = compose(script, overrides=overrides + search_path)
        if "data" in config:
            replace_default_data(config.data)
        if "preset" in config:  # train.py and prepare.py
            data = OmegaConf.to_object(config.data)
            check(data, "data")
            config.preset = select_preset(config, resolve_sources(data))
        result = OmegaConf.to_object(config)
    check(result)
    return result


def replace_default_data(data: DictConfig) -> None:
    """If data.path is set, it replaces the default data. A source of data.mix has the same rule."""
    for source in [data, *data.mix.values()]:
        if source.path is not None and source.source in ("none", "python_stdlib"):
            source.source = "text"
            source.name = source.name.replace("python_stdlib", "text")


@cache  # reading the file takes 15 ms, and each word of the command line needs the list
def list_groups(script: str) -> list[str]:
    """List the config groups of a script: model, attention, ..."""
    groups = []
    for entry in OmegaConf.load(CONFIGS / f"{script}.yaml").defaults:
        if not isinstance(entry, str):
            groups += [key.removesuffix("@_global_") for key in entry]
    return groups


def list_choices(script: str) -> dict[str, list[str]]:
    """List the choices of each config group, as in model=gpt2."""
    with hydra_initialized(script, None):
        loader = GlobalHydra.instance().config_loader()
        return {group: loader.get_group_options(group) for group in list_groups(script)}


def parse_word(script: str, word: str) -> Override:
    """Parse key=value with Hydra's grammar, inside hydra_initialized()."""
    config_loader = GlobalHydra.instance().config_loader()  # lists the choices for glob(*)
    return OverridesParser.create(config_loader).parse_overrides([to_hydra_word(script, word)])[0]


def to_hydra_word(script: str, word: str) -> str:
    """Convert key=value to Hydra's grammar."""
    key, value = word.split("=", 1)
    if is_text(script, key, value):
        value = quote(value)
    if key == "experiment":
        key = "experiment@_global_"
    return f"{key}={value}"


def is_text(script: str, key: str, value: str) -> bool:
    """Whether a value is the text that was typed, even if Hydra would read it as something else.

    Otherwise, 1e3 would be a number, true a switch, "a, b" several values, and f(x) a function.
    """
    leaf = key.split(".")[-1]
    if key in list_groups(script):
        return not EXPRESSION.match(value)
    if value == "null" and key != "prompt":
        return False
    if leaf in LIST_KEYS and value.startswith("[") and value.endswith("]"):
        return False
    if leaf in LITERAL_KEYS or key == "name":  # of a run
        return True
    return key_type(script, key) in (str, str | None) and not EXPRESSION.match(value)


def quote(text: str) -> str:
    """Quote text for Hydra. OmegaConf would replace ${...} by another value."""
    escaped = re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
    return QuotedString(escaped, Quote.single).with_quotes()


@contextmanager
def hydra_initialized(script: str, config_dir: str | None) -> Iterator[list[str]]:
    """Context manager in which Hydra can compose the config of a script.

    Yields the words that add config_dir to Hydra's search path.
    Raises UserError if config_dir is no folder, and for errors of Hydra and OmegaConf.
    """
    register_schema(script)
    search_path = []
    if config_dir is not None:
        if not config_dir or not Path(config_dir).is_dir():
            raise UserError(f"--config-dir={config_dir} is not a folder; set one with YAML files")
        Plugins.instance().register(UserFolder)
        search_path.append(f"hydra.searchpath=[{quote(f'user://{Path(config_dir).resolve()}')}]")
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            yield search_path
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, TypeError, ValueError, RecursionError) as error:
        raise UserError(explain_error(script, error)) from None


class UserFolder(FileConfigSource):
    """The folder of --config-dir, as a source of YAML files for Hydra.

    They cannot change Hydra's own settings, which could run code.
    """

    @staticmethod
    def scheme() -> str:
        return "user"

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        values = read_file(path, parse_sections, "write valid YAML in UTF-8")
        header = self._get_header_dict(path.read_text(encoding="utf-8"))
        if "hydra" in f"{header} {[*values]} {values.get('defaults')}":
            raise UserError(f"{config_path}.yaml sets hydra, which would have no effect; remove it")
        return ConfigResult(self.provider, self.full_path(), OmegaConf.create(values), header)


def parse_sections(content: bytes) -> dict:
    """Parse a YAML file of the user. Raises TypeError if it does not contain keys."""
    return {**(parse_yaml(content, TextLoader) or {})}


@cache  # takes up to 30 ms, and a sweep composes many configs
def register_schema(script: str) -> None:
    """Store the script's dataclass in Hydra, as SCRIPT_schema, and all optimizers as a group."""
    schema = OmegaConf.structured(SCRIPTS[script])
    add_preset_values(schema)
    if "optimizer" in schema:
        # optimizer=NAME sets one of its subclasses
        schema.optimizer = OmegaConf.structured(OptimizerConfig)
    ConfigStore.instance().store(f"{script}_schema", schema)
    for name, optimizer_type in OPTIMIZER_CONFIGS.items():
        optimizer = OmegaConf.structured(optimizer_type)
        add_preset_values(optimizer, f"{name}.")
        ConfigStore.instance().store(name, optimizer, group="optimizer")
