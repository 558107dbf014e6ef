"""Config dataclasses: a field's default and limits are one line, and check() finds violations.

`steps: int | None = setting(1000, 1, 10**12)` is a number from 1 to 10^12, or None.
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import field, fields, is_dataclass
from math import inf
from operator import attrgetter
from typing import Any

from common.errors import UserError

ESCAPES = {r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\\": "\\"}
# From a method `rules`: key, whether its value is valid, what to set instead.
Rule = tuple[str, bool, str]
# Our values, and the values of other programs for which they are suggested.
VALUE_SYNONYMS = {"cuda": "gpu cuda:0", "float16": "fp16 half", "bfloat16": "bf16"}


def setting(
    default: Any,
    low: float = -inf,
    high: float = inf,
    *,
    above: float = -inf,
    below: float = inf,
    choices: tuple = (),
) -> Any:
    """A field of a config dataclass.

    None is always allowed, if the type allows it. The limits of a list apply to its items.
    low, high: smallest and largest value.
    above, below: limits that the value must not reach.
    choices: all valid values. In a choice, NAME stands for any text, and N for digits.
    """
    metadata = {"low": low, "high": high, "above": above, "below": below, "choices": choices}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def check(config: Any, section: str = "") -> None:
    """Check all settings and rules of a config dataclass and of its sections.

    section: key of the config in messages, such as "eval.sample". It is empty for the complete
    config of a command.
    Raises UserError for the first violation.
    """
    prefix = f"{section}." if section else ""
    for entry in fields(config):
        value = getattr(config, entry.name)
        key = prefix + entry.name
        if is_dataclass(value):
            check(value, key)
        elif entry.metadata:
            for item in value if isinstance(value, list) else [value]:
                _check_value(key, item, **entry.metadata)
    if hasattr(config, "rules"):
        for name, is_valid, advice in config.rules(section):
            if not is_valid:
                value = attrgetter(name)(config)
                raise UserError(f"{prefix}{name}={format_value(value)} {advice}")


def _check_value(
    key: str, value: Any, low: float, high: float, above: float, below: float, choices: tuple
) -> None:
    """Raise UserError if a value violates the arguments of setting()."""
    if choices and value is not None:
        pattern = "|".join(map(re.escape, choices))
        pattern = re.sub(r"\bNAME\b", ".+", pattern)
        pattern = re.sub(r"\bN\b", "[0-9]+", pattern)
        if not re.fullmatch(pattern, str(value)):
            raise unknown_value(key, value, choices)
    elif isinstance(value, int | float) and not (low <= value <= high and above < value < below):
        bounds = {"at least": low, "above": above, "at most": high, "below": below}
        words = [f"{word} {bound:,.15g}" for word, bound in bounds.items() if abs(bound) != inf]
        if not abs(value) < inf:  # infinite or nan
            words.append("finite")
        raise UserError(f"{key}={format_value(value)} must be {' and '.join(words)}")


def unknown_value(key: str, value: Any, choices: Iterable[str]) -> UserError:
    """Error for a value that is none of the choices, with a suggestion for a typo."""
    hint = did_you_mean(str(value), choices, VALUE_SYNONYMS)
    return UserError(
        f"{key}={format_value(value)} is unknown{hint}; "
        f"set one of {', '.join(choices)}{describe_commas(str(value))}"
    )


def describe_commas(text: str) -> str:
    """What to do with several values, as in train.steps=100,200 or seed=auto."""
    is_sweep = "," in text or text == "auto"
    return "; several values need -m, and a list needs brackets: [a,b]" if is_sweep else ""


def format_value(value: Any) -> str:
    """Format a value as typed on the command line: null, true, 0.1, [64,null], {a:1}."""
    if isinstance(value, str | float):
        return str(value)
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=str)
    return text.replace('"', "")


def describe_changes(old: dict, new: dict) -> dict[str, str]:
    """Describe the keys that both have and whose values differ: {key: "key=old (now new)"}."""
    return {
        key: f"{key}={format_value(old[key])} (now {format_value(value)})"
        for key, value in new.items()
        if key in old and old[key] != value
    }


def unescape(value: Any) -> Any:
    r"""Replace \n, \r, \t and \\ in a string or a list of strings. Others are unchanged."""
    if isinstance(value, list):
        return [unescape(item) for item in value]
    if isinstance(value, str):
        return re.sub(r"\\[nrt\\]", lambda match: ESCAPES[match[0]], value)
    return value


def did_you_mean(wrong: str, options: Iterable[str], synonyms: dict[str, str]) -> str:
    """Suggest up to three options for a wrong key or value: " (did you mean eval.every?)".

    synonyms: {option, or key=value: words for which it is suggested}.
    Separators and capitals do not matter: eval-every and Eval.every are eval.every.
    Returns an empty string if no option is similar.
    """
    wrong = wrong.strip("-+~").lower().replace("-", "_").replace("/", ".")
    name = wrong.replace(".", "_")
    leaf = wrong.split(".")[-1]  # the last part of a key
    leaves = {option: option.split(".")[-1] for option in options}
    close_leaves = difflib.get_close_matches(leaf, leaves.values(), n=1)
    # The first rule that finds options gives the suggestion.
    rules = [
        [
            option
            for option, words in synonyms.items()
            if option.split("=")[0] in leaves and {name, leaf} & set(words.split())
        ],
        [option for option in leaves if leaves[option] == leaf],
        difflib.get_close_matches(wrong, leaves, n=1),
        [option for option in leaves if leaves[option] in close_leaves],
    ]
    for similar in rules:
        if similar:
            return f" (did you mean {' or '.join(similar[:3])}?)"
    return ""


def list_keys(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all keys of a config dataclass with their types.

    These are keys of sections and of settings: ("model", GPTConfig), ("model.n_layer", int), ...
    """
    for entry in fields(config):
        yield prefix + entry.name, entry.type
        value = getattr(config, entry.name)
        if is_dataclass(value):
            yield from list_keys(value, f"{prefix}{entry.name}.")


def set_values(config: Any, values: dict[str, Any]) -> Any:
    """A copy of a config dataclass with other values. The new values are not checked.

    values: by key, as in {"model.n_layer": 2}.
    """
    config = copy(config)
    for key, value in values.items():
        name, _, rest = key.partition(".")
        if rest:
            value = set_values(getattr(config, name), {rest: value})
        setattr(config, name, value)
    return config


def flatten_dict(config: dict, prefix: str = "") -> dict:
    """Join nested keys with dots: {"model": {"n_layer": 2}} becomes {"model.n_layer": 2}."""
    flat = {}
    for key, value in config.items():
        if isinstance(value, dict):
            flat |= flatten_dict(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def check_path_component(key: str, word: str) -> None:
    """Raise UserError for a word that cannot be part of a folder name."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", word) or ".." in word:
        raise UserError(
            f"{key}={word!r} is not a folder name; use up to 100 letters, digits, '.', '_' and '-'"
        )
