"""Convert the text of a key=value word, or of a YAML file, to the type of its key."""

import json
from contextlib import suppress
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

import yaml


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
