"""Texts of the command line and of YAML files become values of the types of their keys."""

from typing import Any

import pytest
from yaml import YAMLError

from configs.values import parse_value


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (int, "0400", 400),  # decimal; in YAML 1.1, a leading zero means octal
        (int | None, "1_000", 1000),
        (int | None, "null", None),
        (float, "1e-3", 0.001),
        (float, ".9", 0.9),
        (bool, "True", True),
        (bool | None, "no", False),
        (str, "null", "null"),
        (str | None, "null", None),
        (str | None, "1.10", "1.10"),
        (str | None, '"a, b"', '"a, b"'),
        (list[float], "[0.9, 1e-3]", [0.9, 0.001]),
        (list[float], [".9", "0.950"], [0.9, 0.95]),  # from a YAML file
        (list[str] | None, "[a, b ,'1,2,3']", ["a", "b", "1,2,3"]),
        (list[str] | None, "[1.10, no]", ["1.10", "no"]),
        (list[str] | str, "[linear,softmax]", ["linear", "softmax"]),
        (list[str] | str, "linear", "linear"),
        (list[str] | str, "null", "null"),
        (int | list[int | None] | None, "[64,null]", [64, None]),
        (Any, "[END]", "[END]"),
        (Any, "[2024]", "[2024]"),
        (Any, '["a, b", "\\n"]', ["a, b", "\n"]),
        (Any, '["a", 1]', '["a", 1]'),
        (Any, "2024", "2024"),
        (Any, "null", None),
    ],
)
def test_text_becomes_a_value_of_the_type(kind, text, value):
    assert parse_value(kind, text) == value
    assert type(parse_value(kind, text)) is type(value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (int | None, "1e3"),
        (int | None, "1:30"),
        (int, "null"),
        (int, ""),
        (str | None, ""),
        (bool, "perhaps"),
        (list[float], "0.9"),
        (list[int], "[64,a]"),
        (list[int], "[64"),
        (str, ["a"]),
        (dict[str, int], "1"),
    ],
)
def test_text_of_another_type_is_refused(kind, text):
    with pytest.raises((ValueError, LookupError, YAMLError)):
        parse_value(kind, text)
