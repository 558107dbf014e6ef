"""Command-line words and YAML groups to one composed config, by Hydra's compose API.

Hydra's application half (a folder and a log file per run, made before anything is checked, and once per process) is
not used: train.py makes runs/<name> itself.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import DictConfig

from common.errors import UserError
from configs.schema import register

CONFIGS = Path(__file__).parent
# Free text, taken to the letter: Hydra's grammar would read "a, b" as a sweep and "f(x)" as a function.
UNPARSED_KEYS = ("prompt", "prompt_file", "name", "run", "wandb.group", "prompts", "out", "data.repo", "tokenizer.run",
           "train.init_from", "data.text_column")  # fmt: skip
# These as well, unless they are lists of them in Hydra's way: stop='["a", "b"]'.
LITERAL_OR_LIST = ("stop", "path")


def quote(override: str) -> str:
    """An override with its literal text quoted for Hydra's grammar, and its ${ for OmegaConf's."""
    key, value = override.split("=", 1)
    literal = key in UNPARSED_KEYS or (
        key.endswith(LITERAL_OR_LIST) and not re.fullmatch(r"""\[\s*(["']).*\1\s*\]""", value, re.DOTALL)
    )
    if not literal or (value == "null" and key != "prompt"):
        return override
    return f"{key}={QuotedString(escape_interpolation(value), Quote.single).with_quotes()}"


def escape_interpolation(text: str) -> str:
    """As OmegaConf will give it back: it takes ${...} for a reference."""
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)


def compose_config(script: str, overrides: list[str], config_dir: str | None) -> DictConfig:
    """Composed by Hydra against the schema. Raises UserError, and what Hydra and OmegaConf raise."""
    with composing(config_dir) as search:
        return compose(script, overrides=[quote(override) for override in overrides] + search)


@contextmanager
def composing(config_dir: str | None) -> Iterator[list[str]]:
    """Hydra's compose() works inside; gives the overrides that add the user's own folder. Raises UserError."""
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
        yield search


def is_hydras(key: str) -> bool:
    return key.split(".")[0].split("/")[0].split("@")[0] == "hydra"


def is_launcher(override: str) -> bool:
    """Whether it says where a sweep's runs run: all that a user may set of Hydra's own; _target_ would run code."""
    return override.startswith(("hydra/launcher=", "hydra.launcher.")) and "_target_" not in override


def choices(group: str) -> list[str]:
    """The names that group=... can take."""
    return sorted(path.stem for path in (CONFIGS / group).glob("*.yaml"))
