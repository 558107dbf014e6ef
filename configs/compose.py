"""Compose a command's config: Hydra merges YAML files and key=value words into one typed dataclass.

The dataclasses of schema.py are Hydra's schema (its ConfigStore), so Hydra itself refuses unknown keys and wrong types.
@hydra.main is not used, because it writes a folder and a log file before anything is checked.
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
from omegaconf import MISSING, OmegaConf
from omegaconf._utils import get_yaml_loader
from omegaconf.errors import OmegaConfBaseException

from common.errors import UserError
from common.files import parse_yaml, read_file
from common.settings import flatten_dict, format_value
from configs.error_messages import explain_error
from configs.preset import add_preset_values, select_preset
from configs.schema import NUMBER_KEYS, SCRIPTS, TEXT_KEYS
from training.config import OPTIMIZER_CONFIGS, OptimizerConfig

CONFIGS = Path(__file__).parent
# Keys whose value is used exactly as typed. Hydra's grammar would read "a, b" as a sweep and "f(x)" as a function.
# Only LIST_KEYS can also be a list, as in stop='["a", "b"]'.
LIST_KEYS = ("stop", "path", "val_path")
FREE_TEXT = r"prompt(s|_file)?|tasks|out|name|(.*\.)?(run|stop|path|val_path|separator)|.*\.(init_from|group|repo|\w+_column)"
# The values of other text keys: parts of a list or a sweep, and parts that Hydra would not read as text.
PARTS = r"""'(?:\\.|[^'])*'|"(?:\\.|[^"])*"|[^,\[\]'"]+|."""
NUMBER_OR_BOOL = r"(?i)^\s*([-+]?[.\d][\w.+-]*|[-+]?(?:inf|nan)|true|false)\s*$"

# YAML files of the user: only null and whole numbers have a type, so that no and 1e3 stay text. The schema converts
# them for keys that are numbers or switches.
TextLoader = (
    get_yaml_loader()
)  # a new class, derived from yaml.SafeLoader. It refuses a key that occurs twice
TextLoader.yaml_implicit_resolvers = {}
TextLoader.add_implicit_resolver(
    "tag:yaml.org,2002:null", re.compile("(~|null|Null|NULL|)$"), ["~", "n", "N", ""]
)
TextLoader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile("(0|-?[1-9][0-9]*)$"), list("-0123456789")
)
TextLoader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile("<<$"), ["<"])


def compose_config(script: str, words: list[str], config_dir: str | None = None) -> Any:
    """Compose the config of a script.

    words: key=value. config_dir: the user's YAML files. Returns a dataclass with unchecked values. Raises UserError.
    """
    with hydra_initialized(script, config_dir) as search_path:
        for word in words:
            override = parse_word(script, word)
            if override.is_sweep_override() or (override.value() == "" and word != "prompt="):
                raise UserError(
                    f"{word!r} must have one value; set it, or a list as in [A,B]; train.py -m takes more"
                )
        config = compose(
            script, overrides=[to_hydra_word(script, word) for word in words] + search_path
        )
        if "preset" in config:
            config.preset = select_preset(config)
        return OmegaConf.to_object(config)


@cache  # reading the file takes 15 ms, and each word of the command line needs the list several times
def list_groups(script: str) -> list[str]:
    """List the config groups of a script: model, attention, ..."""
    defaults = OmegaConf.load(CONFIGS / f"{script}.yaml").defaults
    return [next(iter(entry)).split("@")[0] for entry in defaults if not isinstance(entry, str)]


def list_choices(group: str) -> list[str]:
    """List the choices of a group, as in model=gpt2."""
    return sorted(
        OPTIMIZER_CONFIGS
        if group == "optimizer"
        else (f.stem for f in (CONFIGS / group).glob("*.yaml"))
    )


def parse_word(script: str, word: str) -> Override:
    """Parse key=value with Hydra's grammar, inside hydra_initialized()."""
    config_loader = GlobalHydra.instance().config_loader()  # lists the choices for glob(*)
    return OverridesParser.create(config_loader).parse_overrides([to_hydra_word(script, word)])[0]


def to_hydra_word(script: str, word: str) -> str:
    """Convert a word to Hydra's grammar: quote free text, names of choices, and text such as 1e3. Raises UserError."""
    key, value = word.split("=", 1)
    leaf = key.split(".")[-1]
    is_list = leaf in LIST_KEYS and re.fullmatch(r"(?s)\[.*\]", value)
    is_free_text = (
        re.fullmatch(FREE_TEXT, key) and not is_list and (key == "prompt" or value != "null")
    )
    is_group = key in list_groups(script)
    if is_free_text or (is_group and re.match(r"[^,(]*$|\[|{", value)):  # not a sweep
        value = re.sub(
            r"(\\*)\$\{", r"\1\1\\${", value
        )  # OmegaConf would replace ${...} by another value
        value = QuotedString(value, Quote.single).with_quotes()
    elif leaf in TEXT_KEYS and not re.match(r"\w+\(", value):  # not a function
        value = "".join(re.sub(NUMBER_OR_BOOL, r"'\1'", part) for part in re.findall(PARTS, value))
    elif leaf in NUMBER_KEYS:
        refuse_leading_zeros(key, value)
    if script == "train":
        value = re.sub(r"^log(\(.*\))$", r"tag(log,interval\1)", value)  # a range of a search
    return f"{key}@_global_={value}" if is_group and key == "experiment" else f"{key}={value}"


def refuse_leading_zeros(key: str, value: Any) -> None:
    """Raise UserError for numbers such as 010, which are octal in YAML and decimal elsewhere."""
    is_thousands = re.fullmatch(
        r"\d{1,3}(,\d{3})+", str(value)
    )  # 1,000, which is refused as two values
    if not is_thousands and re.search(r"(?<![\w.+-])[-+]?0[\d_]", str(value)):
        raise UserError(
            f"{key}={format_value(value)} has a leading zero, as octal numbers do; remove it"
        )


@contextmanager
def hydra_initialized(script: str, config_dir: str | None) -> Iterator[list[str]]:
    """Context manager: prepare Hydra, explain its errors, yield words that add the user's folder. Raises UserError."""
    register_schema(script)
    search_path = []
    if config_dir is not None:
        if not config_dir or not Path(config_dir).is_dir():
            raise UserError(
                f"--config-dir={config_dir} is not a folder; set a folder of YAML files"
            )
        Plugins.instance().register(UserFolder)
        folder = QuotedString(f"user://{Path(config_dir).resolve()}", Quote.single).with_quotes()
        search_path = [f"hydra.searchpath=[{folder}]"]
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            yield search_path
    except UserError:
        raise
    except (HydraException, OmegaConfBaseException, TypeError, ValueError, RecursionError) as error:
        raise UserError(explain_error(script, error)) from None


def parse_sections(content: bytes) -> dict:
    """Parse a YAML file of the user. Raises ValueError if it contains a list or a number."""
    values = parse_yaml(content, TextLoader) or {}
    if not isinstance(values, dict):
        raise ValueError("its content must be a section, such as train: {steps: 5}")
    return values


class UserFolder(FileConfigSource):
    """The folder of --config-dir. Its files cannot change Hydra's own settings, which could run code."""

    scheme = staticmethod(lambda: "user")

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        values = read_file(path, parse_sections, "write valid YAML in UTF-8")
        for key, value in flatten_dict(values).items():
            if key.split(".")[-1] in NUMBER_KEYS:
                refuse_leading_zeros(f"{config_path}.yaml: {key}", value)
        header = self._get_header_dict(path.read_text(encoding="utf-8"))
        result = ConfigResult(self.provider, self.full_path(), OmegaConf.create(values), header)
        text = f"{header}\n{OmegaConf.to_yaml(result.config)}"
        if re.search(
            r"'package': 'hydra|^hydra[.:]|^- (override )?/?hydra/.*: ", text, re.MULTILINE
        ):
            raise UserError(f"{config_path}.yaml sets hydra, which would have no effect; remove it")
        return result


@cache  # takes up to 30 ms, and a sweep composes many configs
def register_schema(script: str) -> None:
    """Store the script's dataclass in Hydra, as SCRIPT_schema, and the choices of the group optimizer."""
    schema = OmegaConf.structured(SCRIPTS[script])
    add_preset_values(schema)
    if "attention" in schema:
        schema.attention.backend = MISSING  # a YAML file that sets no backend is refused
    if "optimizer" in schema:
        schema.optimizer = OmegaConf.structured(
            OptimizerConfig
        )  # optimizer=NAME sets one of its subclasses
    ConfigStore.instance().store(f"{script}_schema", schema)
    for name, optimizer_type in OPTIMIZER_CONFIGS.items():
        optimizer = OmegaConf.structured(optimizer_type)
        add_preset_values(optimizer, f"{name}.")
        ConfigStore.instance().store(name, optimizer, group="optimizer")
