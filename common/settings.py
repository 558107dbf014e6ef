"""Config dataclasses: a field's default and limits are one line, and check() finds values that violate them.

`steps: int | None = setting(1000, 1, 10**12)` is a number from 1 to 10^12, or None.
"""

import difflib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import field, fields, is_dataclass
from math import inf
from typing import Any

from common.errors import UserError

ESCAPES = {r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\\": "\\"}
Rule = tuple[
    str, bool, str
]  # from a method `rules`: key, whether its value is valid, what to set instead
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
    """A field of a config dataclass. None is always allowed, if the type allows it. Limits of a list are its items'.

    low, high: smallest and largest value. above, below: limits that the value must not reach.
    choices: all valid values. NAME in a choice stands for any text, and N for digits.
    """
    metadata = {"low": low, "high": high, "above": above, "below": below, "choices": choices}
    if isinstance(default, list | dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def check(config: Any, section: str = "") -> None:
    """Check all settings of a config dataclass and of its sections, and their rules. Raises UserError for the first.

    section: key of the config in messages, such as "eval.sample"; empty for the complete config of a command.
    """
    prefix = f"{section}." if section else ""
    for entry in fields(config):
        value, name = getattr(config, entry.name), prefix + entry.name
        if is_dataclass(value):
            check(value, name)
        elif isinstance(value, dict) and all(map(is_dataclass, value.values())):
            for item_name, item in value.items():
                check(item, f"{name}.{item_name}")
        elif entry.metadata:
            for item in value if isinstance(value, list) else [value]:
                _check_value(name, item, entry.metadata)
    for name, is_valid, advice in config.rules(section) if hasattr(config, "rules") else ():
        if not is_valid:
            raise UserError(f"{prefix}{name}={format_value(getattr(config, name))} {advice}")


def _check_value(name: str, value: Any, limits: Any) -> None:
    low, high, above, below, choices = limits.values()
    if choices and value is not None:
        patterns = re.sub(r"\bNAME\b", ".+", "|".join(map(re.escape, choices)))
        if not re.fullmatch(re.sub(r"\bN\b", "[0-9]+", patterns), str(value)):
            hint = did_you_mean(str(value), choices, VALUE_SYNONYMS)
            raise UserError(
                f"{name}={format_value(value)} is unknown{hint}; set one of {', '.join(choices)}"
            )
    elif isinstance(value, int | float) and not (low <= value <= high and above < value < below):
        bounds = {"at least": low, "above": above, "at most": high, "below": below}
        words = [f"{word} {bound:,.15g}" for word, bound in bounds.items() if abs(bound) != inf]
        words += ["finite"] * (not abs(value) < inf)
        raise UserError(f"{name}={format_value(value)} must be {' and '.join(words)}")


def format_value(value: Any) -> str:
    """A setting's value as typed on the command line: null, true, 0.1, [64,null], {a:1}."""
    if isinstance(value, str | float):
        return str(value)
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False, default=str).replace(
        '"', ""
    )


def unescape(value: Any) -> Any:
    """Replace \\n, \\r, \\t and \\\\ in a string or a list of strings. Other values are returned unchanged."""
    if isinstance(value, list):
        return [unescape(item) for item in value]
    return (
        re.sub(r"\\[nrt\\]", lambda match: ESCAPES[match[0]], value)
        if isinstance(value, str)
        else value
    )


def did_you_mean(wrong: str, options: Iterable[str], synonyms: dict[str, str]) -> str:
    """Suggest up to three options with the same or a similar last part. Empty if none is similar.

    synonyms: {option, or key=value: words for which it is suggested}. A key is equal to itself in capitals, and with
    other separators: eval-every is eval.every.
    """
    names = {option: re.sub("[-./]", "_", option) for option in options}
    leaves = {option: option.split(".")[-1] for option in names}
    name = re.sub("[-./]", "_", wrong.strip("-+~").lower())
    leaf = re.split("[./]", wrong.strip("-+~").lower())[-1].replace("-", "_")
    close = difflib.get_close_matches(leaf, leaves.values(), n=1)
    similar = (
        [
            ours
            for ours, theirs in synonyms.items()
            if {name, leaf} & {*theirs.split()} and ours.split("=")[0] in names
        ]
        or [option for option in names if names[option] == name]
        or [option for option in names if leaves[option] == leaf]
        or difflib.get_close_matches(wrong, names, n=1)
        or [option for option in names if len(leaf) > 2 and leaf in leaves[option]]
        or [option for option in names if leaves[option] in close]
    )
    return f" (did you mean {' or '.join(similar[:3])}?)" if similar else ""


def list_keys(config_type: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all keys of a config dataclass with their types: ("model", GPTConfig), ("model.n_layer", int), ..."""
    for entry in fields(config_type):
        yield prefix + entry.name, entry.type
        if is_dataclass(entry.type):
            yield from list_keys(entry.type, f"{prefix}{entry.name}.")


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
    if (
        not re.fullmatch(r"[A-Za-z0-9._-]{1,100}", word)
        or ".." in word
        or word.startswith((".", "-"))
    ):
        raise UserError(
            f"{key}={word!r} is not a folder name; use up to 100 letters, digits, '.', '_' and '-'"
        )
