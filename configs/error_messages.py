"""What Hydra and OmegaConf found wrong, as one sentence that says what to set."""

import difflib
import re
from dataclasses import fields, is_dataclass
from typing import Any, get_origin

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException
from yaml import YAMLError

from configs.composition import choices
from configs.schema import OPTIMIZERS, SCRIPTS
from data import DataConfig

WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a word",
    "list[float]": "a list of numbers, as in [0.9,0.95]",
    "list[str]": "a list of words, as in [a,b]",
    "list[int]": "a list of whole numbers, as in [64,1024]",
}


def explain(error: Exception, overrides: list[str], schema: type, defaults: Any) -> str:
    """The sentence for an exception of Hydra, OmegaConf or PyYAML.

    overrides: the command line's key=value words. schema: the dataclass of the script's config. defaults: a function
    that gives the script's default config as nested dicts, asked only where a key is unknown.
    """
    text = str(error)
    inner = _cause(error)
    if isinstance(error, YAMLError):
        return f"a YAML file cannot be read: {' '.join(text.split())}; mend it there"
    if isinstance(error, MissingConfigException) and error.options is not None:
        group, _, choice = (error.missing_cfg_file or "").rpartition("/")
        options = [option for option in error.options if option != "schema"]
        more = ", or pip install hydra-submitit-launcher for submitit_slurm" if group == "hydra/launcher" else ""
        return f"{group}={choice}: there is no such choice{did_you_mean(choice, options)}; set {one_of(options)}{more}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, choice = error.missing_cfg_file.rpartition("/")
        where, near = _search(r"In '([^']+)'", text), did_you_mean(choice, choices(group))
        return f"{group}={choice}: there is no such choice{near}; mend it in the defaults of {where}.yaml"
    if "Ambiguous value" in text or isinstance(error, OverrideParseException):
        return _unreadable(text, overrides)

    key = getattr(inner, "full_key", None) or _search(r"full_key: (\S+)|^Could not override '(\S+)'", text)
    where = _search(r"In '([^']+)'", text)
    where = f" (in {where}.yaml)" if where else ""
    if key == "experiment" and where:
        return f"the first line{where} must be '# @package _global_'; put it there"
    if key and key.startswith("hydra.launcher."):
        return f"{key}: the launcher has no such setting; set hydra/launcher=NAME as well, one that has"
    if schema is SCRIPTS["sample"] and key and key.split(".")[0] in ("model", "tokenizer"):
        return f"{key}: a run's {key.split('.')[0]} comes from its checkpoint; leave it out"
    text_of_a_mix = _search(r"^(data\.mix\.[^.]+\.)", key or "")
    if text_of_a_mix and isinstance(inner, MissingMandatoryValue):
        name = text_of_a_mix.split(".")[2]
        return (
            f"data.mix.{name} is no text yet; add, say, text@mix.{name} to the defaults of the YAML file that names it"
        )
    if key and ("not in '" in text or "Could not override" in text or "not in '" in str(inner)):
        known = [text_of_a_mix + field.name for field in fields(DataConfig)] if text_of_a_mix else keys(defaults())
        return f"{key}: there is no such key{where}{did_you_mean(key, known)}; see --help and --cfg job"
    if isinstance(inner, MissingMandatoryValue):
        return f"{key} has no value; set {expected(schema, key)} in the YAML file that was chosen, or as {key}=..."
    if key:
        given = next((o for o in reversed(overrides) if o.split("=", 1)[0] == key), key)
        expects = expected(schema, key) or str(inner or error).split("\n")[0]
        return f"{given}{where} does not fit: {key} takes {expects}"
    return " ".join(text.split())


def _cause(error: BaseException | None) -> OmegaConfBaseException | None:
    """OmegaConf's own exception, which Hydra wraps."""
    while error is not None and not isinstance(error, OmegaConfBaseException):
        error = error.__cause__
    return error


def _unreadable(text: str, overrides: list[str]) -> str:
    """A word that Hydra's grammar does not take, or takes for a sweep."""
    word = next((o for o in overrides if f"'{o}'" in text), overrides[-1] if len(overrides) == 1 else None)
    what = f"{word!r}" if word else f"one of {', '.join(map(repr, overrides))}"
    if "Ambiguous value" in text:
        return f"{what} gives several values for one run; add -m to train.py for a run with each, or set one value"
    key = word.split("=", 1)[0] if word else "key"
    return f"{what} cannot be read as key=value; quote special characters twice, as in '{key}=\"a, b\"'"


def _search(pattern: str, text: str) -> str | None:
    found = re.search(pattern, text)
    return next((group for group in found.groups() if group), None) if found else None


def one_of(options: list[str]) -> str:
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"


def did_you_mean(wrong: str, options: list[str]) -> str:
    """The nearest option: the same last word elsewhere first (steps -> train.steps), then by likeness."""
    leaf = wrong.split(".")[-1]
    near = [option for option in options if option.split(".")[-1] == leaf]
    near = near or difflib.get_close_matches(wrong, options, n=1, cutoff=0.5)
    near = near or [o for o in options if difflib.get_close_matches(leaf, [o.split(".")[-1]])][:1]
    return f", did you mean {one_of(near)}?" if near else ""


def keys(node: dict, prefix: str = "") -> list[str]:
    """Every key of a nested dict, sections and leaves: model, model.n_layer, ..."""
    found = []
    for key, value in node.items():
        found += [prefix + key, *(keys(value, f"{prefix}{key}.") if isinstance(value, dict) else [])]
    return found


def expected(schema: type, key: str) -> str | None:
    """In words, the type that the schema wants for `key`; None for a key that it leaves open."""
    kind = schema
    for part in key.split("[")[0].split("."):
        if get_origin(kind) is dict:  # data.mix, whose keys are names that the user gives
            kind = DataConfig
            continue
        if kind is Any:  # one of several dataclasses: the first that has the field
            kind = next((k for k in OPTIMIZERS.values() if part in {field.name for field in fields(k)}), Any)
        kinds = {field.name: field.type for field in fields(kind)} if is_dataclass(kind) else {}
        if part not in kinds:
            return None
        kind = kinds[part]
    name = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    base, _, optional = name.partition(" | ")
    return WORDS[base] + (", or null" if optional else "") if base in WORDS else None
