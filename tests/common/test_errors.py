"""Messages of invalid settings, and text that is safe to print."""

from types import SimpleNamespace

import pytest

from common.errors import UserError, check_settings, format_value, printable


@pytest.mark.parametrize(("value", "typed"), [
    (None, "null"), (True, "true"), (False, "false"), (0.1, "0.1"), (3, "3"), ("flash", "flash"),
    ([64, 64, None], "[64,64,null]"), ([], "[]"), ({"a": 1, "b": None}, "{a:1,b:null}"),
])  # fmt: skip
def test_values_are_printed_as_typed_on_the_command_line(value, typed):
    assert format_value(value) == typed


def test_first_rule_that_does_not_hold_is_reported():
    config = SimpleNamespace(a=1, b=[None], c=3)
    check_settings("model", config, [("a", True, "is wrong")])
    with pytest.raises(UserError, match=r"^model\.b=\[null\] is wrong$"):
        check_settings("model", config, [("a", True, "x"), ("b", False, "is wrong"), ("c", False, "is wrong, too")])
    with pytest.raises(UserError, match=r"^a=1 is wrong$"):
        check_settings("", config, [("a", False, "is wrong")])


def test_only_characters_that_control_a_terminal_are_replaced():
    written = "日本\u3000語, 12\u00a0km, नमस्\u200cते, 👩\u200d🚀, e\u0301\n\tx"  # spaces, joiners and accents stay
    assert printable(written) == written
    for control in ("\x1b", "\x9b", "\r", "\x07", "\x7f", "\u202e", "\u2066"):
        assert printable(f"a{control}b") == "a\ufffdb"
