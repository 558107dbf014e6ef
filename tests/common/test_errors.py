"""Errors that are one sentence, their status, and text that is safe to print."""

import errno

import pytest
import torch

from common.errors import (
    EXIT_CODES,
    TrainingFailed,
    UserError,
    error_message,
    printable,
    status_of,
)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("set a"), "set a"),
        (TrainingFailed("loss is nan"), "loss is nan"),
        (KeyboardInterrupt(), "interrupted"),
        (KeyboardInterrupt("saved"), "saved"),
        (OSError(errno.ENOSPC, "No space left", "a.pt"), "a.pt: No space left; free some disk"),
        (OSError(errno.ENOSPC, "No space left"), "writing a file: No space left; free some"),
        (
            OSError(errno.EACCES, "Permission denied", "a.pt"),
            "a.pt: Permission denied; set another",
        ),
        (MemoryError(), "out of memory; set a smaller batch"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory; set"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), "out of memory; set"),
    ],
    ids=lambda value: repr(value) if isinstance(value, BaseException) else "",
)
def test_error_that_is_not_a_bug_is_one_sentence(error, message):
    assert error_message(error).startswith(message)


@pytest.mark.parametrize(
    "error",
    [KeyError("a"), RuntimeError("wrong shape"), OSError("closed"), ValueError("out of memory")],
    ids=repr,
)
def test_bug_has_no_sentence(error):
    assert error_message(error) is None


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "finished"),
        (UserError("a"), "refused"),
        (KeyboardInterrupt(), "interrupted"),
        (TrainingFailed("a"), "failed"),
        (KeyError("a"), "failed"),
    ],
    ids=repr,
)
def test_error_determines_the_status(error, status):
    assert status_of(error) == status
    assert status in EXIT_CODES


@pytest.mark.parametrize(
    "control", ["\x1b", "\x9b", "\r", "\x07", "\x7f", "\u202e", "\u2066"], ids=ascii
)
def test_character_that_controls_a_terminal_is_replaced(control):
    assert printable(f"a{control}b") == "a\ufffdb"


@pytest.mark.parametrize(
    "text",
    ["日本\u3000語", "12\u00a0km", "नमस्\u200cते", "👩\u200d🚀", "e\u0301", "a\n\tx"],
    ids=["wide space", "no-break space", "non-joiner", "joiner", "accent", "newline, tab"],
)
def test_other_characters_are_printed_unchanged(text):
    assert printable(text) == text
