"""Errors that are not bugs: invalid input, a run that cannot continue, and too little memory."""

import re
from collections.abc import Iterable
from math import inf
from typing import Any

# Control characters except newline and tab, and Unicode's bidirectional overrides and isolates.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class UserError(ValueError):
    """Wrong input. Its message is one sentence: what is wrong, where, and what to set instead.

    The scripts print the sentence without a traceback and exit with code 2.
    """


class TrainingFailed(RuntimeError):
    """A run cannot continue, but not because of a bug. For example, its loss is NaN.

    The message is also one sentence. The scripts exit with code 1.
    """


def printable(text: str) -> str:
    """Replace the characters with which `text` could control a terminal or reorder what it shows."""
    return UNPRINTABLE.sub("\ufffd", text)


def format_value(value: Any) -> str:
    """A setting's value as typed on the command line: null, true, 0.1, [64,null], {a:1}."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(format_value, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{format_value(inner)}' for key, inner in value.items())}}}"
    return str(value)


def check_settings(section: str, config: object, rules: Iterable[tuple[str, bool, str]]) -> None:
    """Check the settings of a config dataclass. Raises UserError for the first setting that is invalid.

    rules: (key, whether its value is valid, what is required and what to set instead). section: the part of the key
    before the dot; "" for none.
    """
    for key, holds, requirement in rules:
        if not holds:
            name = f"{section}.{key}" if section else key
            raise UserError(f"{name}={format_value(getattr(config, key))} {requirement}")


def check_positive(section: str, config: object, *keys: str, **limits: int) -> None:
    """Check that settings are None, or finite numbers above 0. limits: the largest valid values of further keys.

    The limits are far above all useful values. Larger ones would hang, or fail with an error of PyTorch's C++ code.
    """
    rules = []
    for key, limit in (dict.fromkeys(keys, inf) | limits).items():
        value, at_most = getattr(config, key), f" and at most {limit:,}" if key in limits else ""
        is_valid = value is None or (0 < value < inf and value <= limit)
        rules.append((key, is_valid, f"must be a number greater than 0{at_most}"))
    check_settings(section, config, rules)


def check_seed(seed: int) -> None:
    """Raises UserError for a seed that NumPy or PyTorch does not accept."""
    if not 0 <= seed < 2**32:
        raise UserError(f"seed={seed} must be at least 0 and below 2^32; set 1337, for example")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python or PyTorch ran out of memory, on any device. Compares messages, because torch is not imported."""
    messages = ("allocate memory", "out of memory", "bad_alloc", "ALLOC_FAILED")
    is_from_torch = isinstance(error, RuntimeError) and any(message in str(error) for message in messages)
    return isinstance(error, MemoryError) or is_from_torch
