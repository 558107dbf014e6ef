"""Config dataclasses: a field's default and limits are one line, and check() finds values that violate them.

    steps: int | None = setting(1000, 1, 10**12)                  from 1 to 10^12, or None
    norm: str = setting("rmsnorm", choices=("layernorm", "rmsnorm"))

Rules between several keys are a method `rules` of the dataclass.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import field, fields, is_dataclass
from math import inf
from typing import Any

from common.errors import UserError

Rule = tuple[str, bool, str]  # key, whether its value is valid, what is required and what to set instead


def setting(
    default: Any,
    low: float = -inf,
    high: float = inf,
    *,
    above: float = -inf,
    below: float = inf,
    choices: Sequence[str] = (),
) -> Any:
    """A field of a config dataclass. None is always allowed, if the type allows it. Limits of a list are its items'.

    default: a list or dict is copied for each instance.
    low, high: smallest and largest value.
    above, below: limits that the value must not reach.
    choices: all valid values. NAME in a choice stands for any text, and N for digits.
    """
    metadata = {"low": low, "high": high, "above": above, "below": below, "choices": choices}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: default.copy(), metadata=metadata)
    return field(default=default, metadata=metadata)


def check(config: Any, section: str = "") -> None:
    """Check all settings of a config dataclass, of its sections, and the rules between them.

    config: dataclass. Its method rules(section), if there is one, yields Rules.
    section: key of the config in messages, such as "eval.sample"; empty for the complete config of a command.
    Raises UserError for the first setting that is invalid.
    """
    for entry in fields(config):
        value, name = getattr(config, entry.name), f"{section}.{entry.name}".removeprefix(".")
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
            prefix = f"{section}.{name}".removeprefix(".")
            raise UserError(f"{prefix}={format_value(getattr(config, name))} {advice}")


def _check_value(name: str, value: Any, limits: Any) -> None:
    if value is None:
        return
    if limits["choices"]:
        patterns = re.sub(r"\bNAME\b", ".+", "|".join(map(re.escape, limits["choices"])))
        if not re.fullmatch(re.sub(r"\bN\b", "[0-9]+", patterns), str(value)):
            raise UserError(f"{name}={format_value(value)} is unknown; set one of {', '.join(limits['choices'])}")
    elif isinstance(value, int | float):
        low, high, above, below = (limits[key] for key in ("low", "high", "above", "below"))
        if not (low <= value <= high and above < value < below):
            bounds = {"at least": low, "above": above, "at most": high, "below": below}
            words = [f"{word} {bound:,.15g}" for word, bound in bounds.items() if abs(bound) != inf]
            words += ["finite"] * (not abs(value) < inf)
            raise UserError(f"{name}={format_value(value)} must be {' and '.join(words)}")


def format_value(value: Any) -> str:
    """A setting's value as typed on the command line: null, true, 0.1, [64,null], {a:1}."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_value, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{format_value(inner)}' for key, inner in value.items())}}}"
    return str(value)


def list_keys(config_type: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield all keys of a config dataclass with their types: ("model", GPTConfig), ("model.n_layer", int), ..."""
    for entry in fields(config_type):
        yield prefix + entry.name, entry.type
        if is_dataclass(entry.type):
            yield from list_keys(entry.type, f"{prefix}{entry.name}.")
