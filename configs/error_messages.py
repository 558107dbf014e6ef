"""Parts of error messages: suggestions for typos, and lists of choices."""

import difflib
from collections.abc import Iterable


def one_of(options: list[str]) -> str:
    """[a, b, c] -> "a, b or c"."""
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"


def did_you_mean(wrong: str, options: Iterable[str]) -> str:
    """The most similar option. First come options with the same last part: steps -> train.steps."""
    options, leaf = list(options), wrong.split(".")[-1]
    similar = [option for option in options if option.split(".")[-1] == leaf]
    similar = similar or difflib.get_close_matches(wrong, options, n=1)
    similar = similar or [o for o in options if difflib.get_close_matches(leaf, [o.split(".")[-1]])][:1]
    return f", did you mean {one_of(similar)}?" if similar else ""
