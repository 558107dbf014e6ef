"""Text that is safe to print."""

import re

# Control characters except newline and tab, and Unicode's bidirectional overrides and isolates.
UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def printable(text: str) -> str:
    """Replace the characters with which `text` could control a terminal or reorder what it shows."""
    return UNPRINTABLE.sub("\ufffd", text)
