"""Text that is safe to print."""

from common.errors import printable


def test_only_characters_that_control_a_terminal_are_replaced():
    written = "日本\u3000語, 12\u00a0km, नमस्\u200cते, 👩\u200d🚀, e\u0301\n\tx"  # spaces, joiners and accents stay
    assert printable(written) == written
    for control in ("\x1b", "\x9b", "\r", "\x07", "\x7f", "\u202e", "\u2066"):
        assert printable(f"a{control}b") == "a\ufffdb"
