"""Parts of error messages: suggestions for typos, lists of choices, and types in words.

The sentences for unknown keys and wrong types are in configs/compose.py.
"""

import difflib
from collections.abc import Iterable
from dataclasses import is_dataclass
from types import NoneType, UnionType
from typing import Any, get_args, get_origin, get_type_hints

TYPE_NAMES = {
    int: ["a whole number"],
    float: ["a number"],
    bool: ["true", "false"],
    str: ["text"],
    list: ["a list"],
    NoneType: ["null"],
}


def one_of(options: list[str]) -> str:
    """[a, b, c] -> "a, b or c"."""
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"


def did_you_mean(wrong: str, options: Iterable[str]) -> str:
    """Suggest the most similar option. Options with the same last part come first: steps -> train.steps."""
    options, leaf = list(options), wrong.split(".")[-1]
    similar = [option for option in options if option.split(".")[-1] == leaf]
    similar = similar or difflib.get_close_matches(wrong, options, n=1)
    similar = similar or [o for o in options if difflib.get_close_matches(leaf, [o.split(".")[-1]])][:1]
    return f", did you mean {one_of(similar)}?" if similar else ""


def find_type(schema: type, key: str) -> Any:
    """The type of a key: (Train, "train.steps") -> int | None; (Bench, "block_sizes[0]") -> int."""
    kind: Any = schema
    for part in key.replace("[", ".[").split("."):
        # Without a dataclass, it is an item of list[T] or a value of dict[str, T].
        kind = get_type_hints(kind)[part] if is_dataclass(kind) else get_args(remove_null(kind))[-1]
    return kind


def remove_null(kind: Any) -> Any:
    """int | None -> int."""
    return next(option for option in _split_union(kind) if option is not NoneType)


def describe_type(kind: Any) -> str:
    """The values of a type in words: int | None -> "a whole number or null"."""
    names = [TYPE_NAMES.get(get_origin(option) or option, ["a section"]) for option in _split_union(kind)]
    return one_of([name for group in names for name in group])


def _split_union(kind: Any) -> tuple:
    return get_args(kind) if isinstance(kind, UnionType) else (kind,)
